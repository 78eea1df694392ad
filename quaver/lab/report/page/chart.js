const CHART = { left: 58, right: 10, top: 22, bottom: 24, height: 190 };
const SERIES = 6;

/** Lines over steps: an ARIA slider, whose cursor the pointer and the arrow keys move; Enter or a click chooses a step. */
class Chart {
  /**
   * lines: {label, steps, values, series, isDashed}; marks: {step, kind, text}, kind "alarm" or "event";
   * show: a value as text; span: the first and the last step; onChosen(step): called with the user's choice;
   * onMoved(step): called with the step of the cursor, or null when the pointer leaves.
   */
  constructor({ name, title, about, lines, marks, show, span, onMoved, onChosen, isFromZero = false }) {
    Object.assign(this, { lines, marks, show, span, onMoved, onChosen });
    const values = lines.flatMap((line) => line.values);
    this.isLog = !isFromZero && Math.min(...values) > 0 && Math.max(...values) > 100 * Math.min(...values);
    this.range = padded(values.map((value) => this.scaled(value)));
    if (isFromZero) this.range[0] = 0;
    this.steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    this.tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.plot = make("div", {
      class: "plot chart", id: `${name}-plot`, role: "slider", tabindex: 0, "aria-label": `${title} by step`,
      "aria-valuemin": this.steps[0], "aria-valuemax": this.steps.at(-1), "aria-valuenow": this.steps.at(-1),
      "aria-valuetext": this.say(this.steps.at(-1)),
      onpointermove: (event) => this.select(this.stepAt(event)), onpointerleave: () => this.leave(), onblur: () => this.leave(),
      onclick: (event) => this.onChosen(this.select(this.stepAt(event))), onkeydown: (event) => this.onKey(event),
    });
    const caption = [about, this.isLog ? "logarithmic" : ""].filter(Boolean).join(", ");
    this.element = make("figure", {}, make("figcaption", {}, make("strong", { text: title }), caption && ` ${caption}`), this.plot);
    new ResizeObserver(() => this.render()).observe(this.plot);
  }

  scaled(value) {
    return this.isLog ? Math.log10(value) : value;
  }

  x(step) {
    const [first, last] = this.span;
    return CHART.left + ((step - first) / (last - first || 1)) * (this.widthPx - CHART.left - CHART.right);
  }

  y(value) {
    const [low, high] = this.range;
    const part = (this.scaled(value) - low) / (high - low);
    return CHART.height - CHART.bottom - part * (CHART.height - CHART.top - CHART.bottom);
  }

  render() {
    this.widthPx = this.plot.clientWidth;
    if (this.widthPx <= CHART.left + CHART.right) return;
    const bottom = CHART.height - CHART.bottom;
    this.cursor = draw("line", { class: "cursor", y1: CHART.top, y2: bottom, visibility: "hidden" });
    const measures = { width: this.widthPx, height: CHART.height, viewBox: `0 0 ${this.widthPx} ${CHART.height}` };
    const svg = draw("svg", { ...measures, "aria-hidden": "true", focusable: "false" }, ...this.grid(),
      ...stepAxis(this.span, (step) => this.x(step), bottom), ...this.lines.map((line) => this.line(line)),
      ...this.marks.map((mark) => this.mark(mark)), this.cursor);
    this.plot.replaceChildren(svg, this.tip);
  }

  grid() {
    const [low, high] = this.range;
    const step = this.isLog ? Math.max(1, Math.round((high - low) / 4)) : niceStep(high - low, 4);
    const lines = [];
    for (let at = Math.ceil(low / step); at * step <= high; at += 1) {
      const value = this.isLog ? 10 ** (at * step) : at * step;
      const y = this.y(value);
      lines.push(draw("line", { class: "grid", x1: CHART.left, x2: this.widthPx - CHART.right, y1: y, y2: y }),
        draw("text", { x: CHART.left - 6, y: y + 4, "text-anchor": "end", text: this.show(value) }));
    }
    return lines;
  }

  line({ steps, values, series, isDashed, label }) {
    const points = steps.map((step, at) => `${this.x(step).toFixed(1)},${this.y(values[at]).toFixed(1)}`);
    const kinds = `${isDashed ? " dashed" : ""}${points.length === 1 ? " point" : ""}`;
    return draw("polyline", {
      class: `line series-${series % SERIES}${kinds}`, "data-label": label,
      points: (points.length === 1 ? [...points, ...points] : points).join(" "),
    });
  }

  mark({ step, kind }) {
    const x = this.x(step);
    return draw("g", { class: `mark ${kind}` }, draw("line", { x1: x, x2: x, y1: CHART.top, y2: CHART.height - CHART.bottom }),
      draw("path", { d: `M${x - 4.5},${CHART.top - 8}h9l-4.5,8z` }));
  }

  stepAt(event) {
    const box = this.plot.getBoundingClientRect();
    const x = event.clientX - box.left;
    const mark = this.marks.find(({ step }) => Math.abs(this.x(step) - x) < 4);
    const part = (x - CHART.left) / (box.width - CHART.left - CHART.right);
    return this.nearest(mark ? mark.step : this.span[0] + part * (this.span[1] - this.span[0]));
  }

  nearest(wanted) {
    const before = Math.max(0, lastUpTo(this.steps, wanted));
    const after = Math.min(this.steps.length - 1, before + 1);
    return wanted - this.steps[before] <= this.steps[after] - wanted ? this.steps[before] : this.steps[after];
  }

  onKey(event) {
    const most = this.steps.length - 1;
    const at = this.step === undefined ? most : lastUpTo(this.steps, this.step);
    const page = Math.ceil(most / 20);
    const places = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - page, PageUp: at + page,
      Home: 0, End: most,
    };
    if (event.key === "Escape") this.leave();
    if (event.key === "Enter" && this.step !== undefined) this.onChosen(this.step);
    if (!(event.key in places) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(this.steps[Math.min(most, Math.max(0, places[event.key]))]);
  }

  leave() {
    this.tip.hidden = true;
    this.onMoved(null);
  }

  /** Shows the cursor at a step, or hides it for null. */
  point(step) {
    if (!this.cursor) return;
    const x = this.x(step ?? this.span[0]);
    fill(this.cursor, { x1: x, x2: x, visibility: step === null ? "hidden" : "visible" }, []);
  }

  /** Each line with its value at the last point up to a step. */
  rows(step) {
    return this.lines.map((line) => ({ ...line, value: line.values[lastUpTo(line.steps, step)] }))
      .filter(({ value }) => value !== undefined);
  }

  marksAt(step) {
    return this.marks.filter((mark) => this.nearest(mark.step) === step);
  }

  say(step) {
    const values = this.rows(step).map(({ label, value }) => `${label} ${this.show(value)}`).join(", ");
    return [`step ${exact(step)}: ${values}`, ...this.marksAt(step).map((mark) => mark.text)].join("; ");
  }

  select(step) {
    this.step = step;
    this.plot.setAttribute("aria-valuenow", step);
    this.plot.setAttribute("aria-valuetext", this.say(step));
    this.onMoved(step);
    const rows = this.rows(step).map(({ label, value, series }) => make("tr", {},
      make("td", {}, seriesKey(series), label), make("td", { text: this.show(value) })));
    this.tip.replaceChildren(make("p", { text: `step ${exact(step)}` }), make("table", {}, ...rows),
      ...this.marksAt(step).map((mark) => make("div", { class: "said", text: mark.text })));
    placeTip(this.tip, this.x(step), this.widthPx);
    return step;
  }
}

function seriesKey(series) {
  return make("span", { class: `key series-${series % SERIES}`, "aria-hidden": "true" });
}

/** The lowest and the highest value, with a margin of a twentieth of their difference. */
function padded(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low) / 20 || Math.abs(high) / 20 || 1;
  return [low - room, high + room];
}

/** Ticks of steps below a plot. */
function stepAxis([first, last], x, y) {
  const step = Math.max(1, niceStep(last - first || 1, Math.max(1, (x(last) - x(first)) / 90)));
  const ticks = [];
  for (let at = Math.ceil(first / step) * step; at <= last; at += step) {
    ticks.push(draw("line", { class: "grid", x1: x(at), x2: x(at), y1: y, y2: y + 4 }), draw("text", {
      x: x(at), y: y + 17, "text-anchor": x(at) > x(last) - 20 ? "end" : "middle", text: exact(at) }));
  }
  return ticks;
}
