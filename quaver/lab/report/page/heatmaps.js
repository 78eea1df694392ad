const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** What the heat maps of all runs show: a statistic, rows, a zoomed part of them, and the chosen cell. */
class HeatMaps {
  /** runs: {label, samples, cells, alarms}; onChosen(row, step): called for each choice. */
  constructor({ statistics, colors, special, runs, onChosen }) {
    Object.assign(this, { statistics, colors, special, runs, onChosen });
    this.filter = { statistic: statistics[0].name, kind: "", order: "model", text: "" };
    this.status = make("p", { class: "status", role: "status" });
    this.legend = make("p", { class: "scale" });
    this.panel = make("div", { class: "panel", role: "region", "aria-live": "polite", "aria-label": "The chosen cell" });
    this.panel.append(make("p", { text: "Choose a cell to see its numbers and, where it was recorded, its distribution." }));
    this.allRows = joinedRows(runs);
    this.worstOf = new Map();
    this.maps = runs.map((run) => new HeatMap(this, run));
    this.refresh();
    const places = make("div", { class: runs.length > 1 ? "maps beside-runs" : "maps" }, ...this.maps.map((map) => map.element));
    this.element = make("div", {}, this.controls(), this.legend, places, this.panel);
    dark.addEventListener("change", () => this.refresh(false));
  }

  controls() {
    const choice = (label, name, options) => [make("label", { for: `maps-${name}`, text: label }), make("select", {
      id: `maps-${name}`, onchange: (event) => this.changeFilter({ [name]: event.target.value }),
    }, ...options.map(([value, text]) => make("option", { value, text })))];
    const kinds = [...new Set(this.allRows.map((row) => row.operand))];
    const button = (text, label, onclick) => make("button", { type: "button", class: "more", "aria-label": label, title: label, text, onclick });
    return make("div", { class: "controls" },
      ...choice("Show", "statistic", this.statistics.map(({ name, title }) => [name, title])),
      ...choice("of", "kind", [["", "all tensors"], ...kinds.map((kind) => [kind, words(kind)])]),
      ...choice("Order", "order", [["model", "as in the model"], ["worst", "worst first"]]),
      make("label", { for: "maps-text", text: "Filter" }), make("input", {
        type: "search", id: "maps-text", placeholder: "words in a layer's name", autocomplete: "off",
        oninput: (event) => this.changeFilter({ text: event.target.value.toLowerCase() }) }),
      button("+", "Zoom in", () => this.zoom(0.5)), button("\u2212", "Zoom out", () => this.zoom(2)),
      button("Whole", "Zoom out to the whole run", () => this.showAll()), this.status);
  }

  changeFilter(changes) {
    Object.assign(this.filter, changes);
    this.refresh();
  }

  /** Filters and sorts the rows, and shows them all; if not `isNew`, only draws them again. */
  refresh(isNew = true) {
    this.statistic = this.statistics.find(({ name }) => name === this.filter.statistic);
    this.inks = inksOf(this.colors, this.specialColors());
    this.describeScale();
    if (isNew) {
      this.rows = this.chosenRows();
      this.places = new Map();
      this.rows.forEach((row, at) => row.tensors.forEach(({ layer, operand }) => {
        if (!this.places.has(`${layer} ${operand}`)) this.places.set(`${layer} ${operand}`, at);
      }));
      this.showAll();
    } else {
      this.render();
    }
  }

  chosenRows() {
    const { kind, order, text } = this.filter;
    const wanted = text.split(/\s+/).filter(Boolean);
    const rows = this.allRows.filter((row) => (!kind || row.operand === kind)
      && this.runs.some((run) => run.cells.line(this.statistic.name, row.key))
      && row.tensors.some(({ name }) => wanted.every((word) => name.toLowerCase().includes(word))));
    return order === "worst" ? rows.sort((a, b) => this.worst(b) - this.worst(a)) : rows;
  }

  worst({ key }) {
    const at = `${this.statistic.name} ${key}`;
    if (!this.worstOf.has(at)) {
      this.worstOf.set(at, Math.max(...this.runs.map((run) => run.cells.worst(this.statistic.name, key))));
    }
    return this.worstOf.get(at);
  }

  describeScale() {
    const { statistic, colors } = this;
    const ends = statistic.limits.map((end) => scaledText(statistic, end));
    const worseLast = dark.matches ? colors : [...colors].reverse();
    const bar = make("span", { class: "scale-bar", "aria-hidden": "true" });
    bar.style.backgroundImage = `linear-gradient(to right, ${worseLast.join(", ")})`;
    const [zero, infinite, nan] = this.specialColors();
    const [best, unbounded] = statistic.is_low_worse ? ["no error", "no signal"] : ["0", "infinite"];
    this.legend.replaceChildren(make("strong", { text: statistic.title }), ` ${statistic.unit} `,
      make("span", { text: statistic.is_low_worse ? ends[1] : ends[0] }), bar, make("span", { text: statistic.is_low_worse ? ends[0] : ends[1] }),
      statistic.name === "amax" ? " (larger) " : " (worse) ", swatch(zero), `${best} `, swatch(infinite), `${unbounded} `, swatch(nan), "not finite ",
      make("span", { class: "alarm-key", "aria-hidden": "true", text: "\u25b2" }), " alarm");
  }

  specialColors() {
    return this.special[dark.matches ? "dark" : "light"];
  }

  rowOf({ layer, operand }) {
    return this.places.get(`${layer} ${operand}`) ?? -1;
  }

  limits() {
    return [Math.min(...this.runs.map((run) => run.cells.firsts[0])), Math.max(...this.runs.map((run) => run.cells.end))];
  }

  lastStep() {
    return Math.max(...this.runs.map((run) => run.cells.lasts.at(-1)));
  }

  showAll() {
    this.setView(0, this.rows.length, this.limits());
  }

  /** Zooms to the rows and columns between two places, both included. */
  zoomTo(a, b) {
    const ends = this.runs.flatMap(({ cells }) => [a, b].map(({ step }) => cells.columnAt(step)).filter((column) => column >= 0)
      .map((column) => [cells.firsts[column], cells.firsts[column + 1] ?? cells.end]));
    const span = ends.length ? [Math.min(...ends.map(([first]) => first)), Math.max(...ends.map(([, end]) => end))] : this.span;
    this.setView(Math.min(a.row, b.row), Math.max(a.row, b.row) + 1, span);
  }

  /** Makes the shown part `factor` times as large, around a place, the chosen cell or the middle. */
  zoom(factor, place = this.placeOfChosen()) {
    const { from, to, span: [first, end] } = this;
    const row = place && place.row >= from && place.row < to ? place.row : Math.floor((from + to) / 2);
    const step = place && place.step >= first && place.step < end ? place.step : (first + end) / 2;
    const number = factor < 1 ? Math.max(1, Math.round((to - from) * factor)) : Math.ceil((to - from) * factor);
    const start = Math.round(row - (number * (row - from)) / (to - from));
    const [a, b] = [step - (step - first) * factor, step + (end - step) * factor];
    this.setView(start, start + number, [a, b]);
  }

  setView(from, to, [first, end]) {
    const [start, stop] = this.limits();
    const shortest = Math.min(stop - start, 2 * Math.min(...this.runs.map(({ cells }) => narrowest(cells))));
    const length = Math.min(stop - start, Math.max(shortest, end - first));
    const begin = Math.min(stop - length, Math.max(start, (first + end - length) / 2));
    const number = Math.min(this.rows.length, Math.max(1, to - from));
    this.from = Math.max(0, Math.min(from, this.rows.length - number));
    this.to = this.from + number;
    this.span = [begin, begin + length];
    this.render();
  }

  render() {
    this.pointed = null;
    const [first, end] = this.span;
    const last = Math.min(Math.ceil(end) - 1, this.lastStep());
    this.status.textContent = this.rows.length
      ? `${exact(this.to - this.from)} of ${plural(this.allRows.length, "row")}, steps ${exact(Math.ceil(first))} to ${exact(last)}`
      : "no row has all these words";
    this.maps.forEach((map) => map.render());
  }

  placeOfChosen() {
    const row = this.cell ? this.rows.indexOf(this.cell.row) : -1;
    return row < 0 ? null : { row, step: this.cell.step };
  }

  point(map, place) {
    this.pointed = place && { map, place };
    this.maps.forEach((heatMap) => heatMap.show());
  }

  choose({ row, step }) {
    this.chooseCell(this.rows[row], step);
  }

  chooseCell(row, step) {
    this.cell = { row, step };
    this.panel.replaceChildren(...this.describe(row, step));
    this.maps.forEach((map) => map.show());
    this.onChosen(row, step);
  }

  /** Goes to a tensor at a step from elsewhere on the page, such as an alarm. */
  goTo(layer, operand, step) {
    if (this.rowOf({ layer, operand }) < 0) {
      this.filter = { ...this.filter, kind: "", text: "" };
      for (const name of ["kind", "text"]) byId(`maps-${name}`).value = "";
      this.refresh();
    }
    const row = this.rowOf({ layer, operand });
    if (row < 0) return;
    if (row < this.from || row >= this.to || step < this.span[0] || step >= this.span[1]) this.showAll();
    this.choose({ row, step });
  }

  /** Chooses a step, in the row that is chosen already. */
  goToStep(step) {
    const row = this.placeOfChosen()?.row ?? 0;
    if (!this.rows.length) return;
    if (row < this.from || row >= this.to || step < this.span[0] || step >= this.span[1]) this.showAll();
    this.choose({ row, step });
  }

  about({ row, step }) {
    return this.describe(this.rows[row], step);
  }

  /** The numbers of a cell of each run, and the alarms of its tensors at that time. */
  describe(row, step) {
    const runs = this.runs.filter(({ cells }) => cells.columnAt(step) >= 0);
    const head = make("tr", {}, make("td"), ...runs.map(({ label }) => make("td", { text: label })));
    const lines = this.statistics.map((statistic) => [statistic, runs.map(({ cells }) => cells.at(statistic.name, row.key, step))])
      .filter(([, bytes]) => bytes.some((byte) => byte !== MISSING))
      .map(([statistic, bytes]) => make("tr", {}, make("td", { text: statistic.title }),
        ...bytes.map((byte) => make("td", { text: valueText(statistic, byte) }))));
    const alarms = this.runs.flatMap((run) => run.alarms.filter((alarm) => isOf(alarm, row) && alarm.since <= step && step < alarm.until));
    const when = runs.length ? runs[0].cells.stepsText(step) : "no sample";
    return [make("p", { text: row.name }), make("div", { text: [row.form, when].filter(Boolean).join(", ") }),
      make("table", { "aria-label": "Numbers of the cell" }, ...(this.runs.length > 1 ? [head] : []), ...lines),
      ...alarms.map(({ message }) => make("div", { class: "said", text: message }))];
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.rows.length) return;
    const actions = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.showAll(),
      Escape: () => this.showAll(), w: () => this.chooseWorst() };
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0],
      Home: [0, -Infinity], End: [0, Infinity] };
    if (!(event.key in actions) && !(event.key in moves)) return;
    event.preventDefault();
    if (event.key in actions) actions[event.key]();
    else this.walk(...moves[event.key]);
  }

  /** Chooses a neighbor of the chosen cell, and moves the zoomed part so that it contains it. */
  walk(rows, columns) {
    const { cells } = this.runs[0];
    const before = this.placeOfChosen() ?? { row: this.from, step: Math.max(this.span[0], cells.firsts[0]) };
    const row = Math.min(this.rows.length - 1, Math.max(0, before.row + (this.placeOfChosen() ? rows : 0)));
    const at = Math.max(0, cells.columnAt(before.step)) + (this.placeOfChosen() ? columns : 0);
    const column = Math.min(cells.firsts.length - 1, Math.max(0, at));
    const step = cells.firsts[column];
    const [first, end] = this.span;
    const [down, across] = [findShift(this.from, this.to, row, row + 1), findShift(first, end, step, cells.firsts[column + 1] ?? cells.end)];
    if (down || across) this.setView(this.from + down, this.to + down, [first + across, end + across]);
    this.choose({ row, step });
  }

  /** Chooses the worst cell of the part that is shown. */
  chooseWorst() {
    const [first, end] = this.span;
    const worst = { byte: MISSING };
    for (const { cells } of this.runs) {
      for (let row = this.from; row < this.to; row += 1) {
        const line = cells.line(this.statistic.name, this.rows[row].key) || [];
        line.forEach((byte, column) => {
          const step = cells.firsts[column];
          if (byte > worst.byte && step >= first && step < end) Object.assign(worst, { byte, row, step });
        });
      }
    }
    if (worst.byte) this.choose(worst);
  }
}

function isOf({ layer, operand }, row) {
  return row.tensors.some((tensor) => tensor.layer === layer && tensor.operand === operand);
}

/** How far a window must move to contain an interval. */
function findShift(from, to, low, high) {
  return low < from ? low - from : high > to ? high - to : 0;
}

function narrowest(cells) {
  return cells.firsts.reduce((least, first, at) => Math.min(least, (cells.firsts[at + 1] ?? cells.end) - first), Infinity);
}

/** The pixel of each byte. Worse values stand out from the background: dark on a light page, light on a dark one. */
function inksOf(colors, special) {
  const [zero, infinite, nan] = special.map(pixelOf);
  const last = colors.length - 1;
  const inks = Uint32Array.from({ length: 256 }, (_, byte) => {
    const at = Math.round((Math.max(0, Math.min(WORST, byte) - 2) / (WORST - 2)) * last);
    return pixelOf(colors[dark.matches ? at : last - at]);
  });
  [inks[MISSING], inks[BEST], inks[INFINITE], inks[NOT_A_NUMBER]] = [0, zero, infinite, nan];
  return inks;
}

/** A color as a canvas has it in its memory, on little-endian machines, which all browsers run on. */
function pixelOf(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}
