const HEAT = { right: 10, top: 10, bottom: 24, row: 15, least: 90, most: 540, label: 13, drag: 6 };

/** The heat map of one run: drag, +, - and Ctrl with the wheel zoom; a click or the arrow keys choose a cell. */
class HeatMap {
  /** maps: the HeatMaps that it belongs to; run: {label, samples, cells, alarms}. */
  constructor(maps, run) {
    Object.assign(this, { maps, run });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.hover = make("div", { class: "cell-box hover", hidden: true });
    this.chosen = make("div", { class: "cell-box", hidden: true });
    this.box = make("div", { class: "zoom-box", hidden: true });
    this.plot = make("div", {
      class: "plot heat", role: "application", tabindex: 0, "aria-label": `Heat map of ${run.label}`,
      "aria-describedby": "maps-about", onpointerdown: (event) => this.press(event), onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.release(event), onpointercancel: () => this.drop(), onpointerleave: () => this.leave(),
      ondblclick: () => maps.showAll(), onkeydown: (event) => maps.onKey(event),
    });
    this.plot.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.element = make("figure", {}, make("figcaption", {}, make("strong", { text: run.label }),
      ` ${plural(run.samples, "sample")} of ${plural(run.cells.tensors.length, "tensor")}`), this.plot);
    new ResizeObserver(() => this.render()).observe(this.plot);
  }

  x(step) {
    const [first, end] = this.maps.span;
    return this.left + ((step - first) / (end - first)) * this.innerWidth;
  }

  y(row) {
    return HEAT.top + ((row - this.maps.from) / (this.maps.to - this.maps.from)) * this.innerHeight;
  }

  render() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const { from, to } = this.maps;
    this.left = Math.round(Math.min(230, Math.max(92, width * 0.27)));
    this.innerWidth = width - this.left - HEAT.right;
    this.innerHeight = Math.min(HEAT.most, Math.max(HEAT.least, (to - from) * HEAT.row));
    const height = this.innerHeight + HEAT.top + HEAT.bottom;
    Object.assign(this.canvas.style, {
      left: `${this.left}px`, top: `${HEAT.top}px`, width: `${this.innerWidth}px`, height: `${this.innerHeight}px` });
    this.paint();
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" },
      ...this.labels(), ...this.axis(), ...this.alarms());
    this.plot.replaceChildren(this.canvas, svg, this.hover, this.chosen, this.box, this.tip);
    this.show();
  }

  axis() {
    const [first, end] = this.maps.span;
    return stepAxis([first, end], (step) => this.x(step), HEAT.top + this.innerHeight);
  }

  labels() {
    const { from, to, rows } = this.maps;
    const every = Math.ceil(HEAT.label / (this.innerHeight / (to - from)));
    const most = Math.floor((this.left - 8) / 6.3);
    const labels = [];
    for (let row = from; row < to; row += every) {
      const { label } = rows[row];
      const text = label.length > most ? `${label.slice(0, 3)}\u2026${label.slice(4 - most)}` : label;
      const y = (this.y(row) + this.y(row + 1)) / 2 + 4;
      labels.push(draw("text", { class: "label", x: this.left - 6, y: Math.max(y, HEAT.top + 8), "text-anchor": "end", text }));
    }
    return labels;
  }

  alarms() {
    const [first, end] = this.maps.span;
    return this.run.alarms.flatMap((alarm) => {
      const row = this.maps.rowOf(alarm);
      if (row < this.maps.from || row >= this.maps.to || alarm.since < first || alarm.since >= end) return [];
      const [x, y] = [this.x(alarm.since), (this.y(row) + this.y(row + 1)) / 2];
      return [draw("path", { class: "alarm-mark", d: `M${x},${y - 6}l6,11h-12z` })];
    });
  }

  /** Each pixel has the worst of its cells, so that a single bad cell is seen at any size. */
  paint() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.max(1, Math.round(this.innerWidth * ratio)), Math.max(1, Math.round(this.innerHeight * ratio))];
    Object.assign(this.canvas, { width, height });
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    const { from, to, rows, statistic, inks } = this.maps;
    const [firsts, lasts] = this.columns(width);
    const lines = rows.map((row) => this.run.cells.line(statistic.name, row.key));
    let before = "";
    for (let y = 0; y < height; y += 1) {
      const row = Math.floor(from + (y / height) * (to - from));
      const end = Math.max(row + 1, Math.floor(from + ((y + 1) / height) * (to - from)));
      const start = y * width;
      if (before === `${row} ${end}`) pixels.copyWithin(start, start - width, start);
      else this.paintLine(pixels.subarray(start, start + width), lines.slice(row, end).filter(Boolean), firsts, lasts, inks);
      before = `${row} ${end}`;
    }
    context.putImageData(image, 0, 0);
  }

  paintLine(pixels, lines, firsts, lasts, inks) {
    for (let x = 0; x < pixels.length; x += 1) {
      let worst = MISSING;
      for (const line of lines) {
        for (let column = firsts[x]; column <= lasts[x]; column += 1) if (line[column] > worst) worst = line[column];
      }
      pixels[x] = inks[worst];
    }
  }

  /** The first and the last column of each pixel; where there is none, the last is before the first. */
  columns(width) {
    const { cells } = this.run;
    const [first, end] = this.maps.span;
    const [firsts, lasts] = [new Int32Array(width), new Int32Array(width)];
    for (let x = 0; x < width; x += 1) {
      const step = first + (x / width) * (end - first);
      const next = first + ((x + 1) / width) * (end - first);
      firsts[x] = Math.max(0, lastUpTo(cells.firsts, step));
      lasts[x] = step >= cells.end ? -1 : lastUpTo(cells.firsts, next - 1e-9);
    }
    return [firsts, lasts];
  }

  /** The row and the step at a point of the page, clamped to the map. */
  place(event) {
    const box = this.plot.getBoundingClientRect();
    const { from, to, span: [first, end] } = this.maps;
    const inside = (part) => Math.min(1 - 1e-9, Math.max(0, part));
    const row = from + inside((event.clientY - box.top - HEAT.top) / this.innerHeight) * (to - from);
    const step = first + inside((event.clientX - box.left - this.left) / this.innerWidth) * (end - first);
    return { row: Math.floor(row), step };
  }

  press(event) {
    if (event.button !== 0 || !this.maps.rows.length) return;
    this.start = { x: event.clientX, y: event.clientY, place: this.place(event) };
    this.plot.setPointerCapture(event.pointerId);
  }

  isDrag(event) {
    return this.start && Math.hypot(event.clientX - this.start.x, event.clientY - this.start.y) > HEAT.drag;
  }

  move(event) {
    if (!this.maps.rows.length) return;
    if (!this.isDrag(event)) {
      this.maps.point(this, this.place(event));
      return;
    }
    this.maps.point(this, null);
    const box = this.plot.getBoundingClientRect();
    const [xs, ys] = [[event.clientX, this.start.x], [event.clientY, this.start.y]];
    this.box.hidden = false;
    Object.assign(this.box.style, {
      left: `${Math.min(...xs) - box.left}px`, top: `${Math.min(...ys) - box.top}px`,
      width: `${Math.abs(xs[0] - xs[1])}px`, height: `${Math.abs(ys[0] - ys[1])}px` });
  }

  release(event) {
    const place = this.start && this.place(event);
    const { start } = this;
    const isZoom = this.isDrag(event);
    this.drop();
    if (isZoom) this.maps.zoomTo(start.place, place);
    else if (start) this.maps.choose(place);
  }

  drop() {
    this.start = null;
    this.box.hidden = true;
  }

  leave() {
    if (!this.start) this.maps.point(this, null);
  }

  wheel(event) {
    if (!event.ctrlKey || !this.maps.rows.length) return;
    event.preventDefault();
    this.maps.zoom(event.deltaY < 0 ? 0.7 : 1 / 0.7, this.place(event));
  }

  /** Outlines the cell of a place, which may be outside of the zoomed part. */
  outline(box, place) {
    const { from, to, span: [first, end], rows } = this.maps;
    const column = place ? this.run.cells.columnAt(place.step) : -1;
    const isShown = column >= 0 && place.row >= from && place.row < to && rows[place.row];
    const { firsts } = this.run.cells;
    const [left, right] = [Math.max(first, firsts[column]), Math.min(end, firsts[column + 1] ?? this.run.cells.end)];
    box.hidden = !isShown || right <= left;
    if (box.hidden) return;
    const [x, y] = [this.x(left), this.y(place.row)];
    Object.assign(box.style, { left: `${x}px`, top: `${y}px`, width: `${Math.max(5, this.x(right) - x)}px`,
      height: `${Math.max(5, this.y(place.row + 1) - y)}px` });
  }

  show() {
    this.outline(this.chosen, this.maps.placeOfChosen());
    this.outline(this.hover, this.maps.pointed?.place);
    const { pointed } = this.maps;
    if (pointed?.map !== this) {
      this.tip.hidden = true;
      return;
    }
    this.tip.replaceChildren(...this.maps.about(pointed.place));
    placeTip(this.tip, this.x(pointed.place.step), this.plot.clientWidth);
    const y = this.y(pointed.place.row + 0.5);
    this.tip.style.top = `${y > this.innerHeight / 2 ? y - this.tip.offsetHeight - 14 : y + 14}px`;
  }
}
