const MARGIN = { left: 62, right: 12, top: 34, bottom: 34 };
const STRIP_PX = 9;
const NARROWEST_LABEL_PX = 62;

function totals(timeline) {
  const sums = new Array(timeline.events.length).fill(0);
  for (const values of Object.values(timeline.series)) values.forEach((value, at) => (sums[at] += value));
  return sums;
}

function phaseAt(run, event) {
  const span = run.spans.find(([, begin, end]) => begin < event && event <= end);
  return event === 0 ? "before" : span ? span[0] : "other";
}

/** The spans with recomputations merged into backward, and neighbours of one phase merged. */
function joinedSpans(spans) {
  const joined = [];
  for (const [name, begin, end] of spans) {
    const phase = name === "recompute" ? "backward" : name;
    const before = joined.at(-1);
    if (before && before[0] === phase) before[2] = end;
    else joined.push([phase, begin, end]);
  }
  return joined;
}

/** The plot of one run's timeline: an ARIA slider, whose cursor the pointer and the arrow keys move. */
class Timeline {
  constructor(run, colors, highestBytes, heightPx) {
    Object.assign(this, { run, colors, highestBytes, heightPx, at: null });
    this.sums = totals(run.timeline);
    this.last = Math.max(1, run.timeline.events.at(-1));
    this.tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.plot = make("div", {
      class: "plot", role: "slider", tabindex: 0, "aria-label": `Events of ${run.label}`, "aria-valuemin": 0,
      "aria-valuemax": run.timeline.events.at(-1), "aria-valuenow": run.peak_event,
      onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event),
      onpointerleave: () => this.leave(), onblur: () => this.leave(),
      onkeydown: (event) => this.key(event), onfocus: () => this.select(this.at ?? this.peakAt()),
    });
    this.plot.setAttribute("aria-valuetext", this.say(this.peakAt()));
    this.element = make("figure", { class: "timeline" },
      make("figcaption", {}, make("strong", { text: run.label }), ` peak ${size(run.peak_bytes)}`), this.plot);
    new ResizeObserver(() => this.render()).observe(this.plot);
  }

  peakAt() {
    return this.run.timeline.events.indexOf(this.run.peak_event);
  }

  x(event) {
    return MARGIN.left + (event / this.last) * (this.widthPx - MARGIN.left - MARGIN.right);
  }

  y(bytes) {
    const inner = this.heightPx - MARGIN.top - MARGIN.bottom;
    return this.heightPx - MARGIN.bottom - (bytes / this.highestBytes) * inner;
  }

  render() {
    this.widthPx = this.plot.clientWidth;
    if (this.widthPx <= MARGIN.left + MARGIN.right) return;
    this.cursor = draw("line", { class: "cursor", y1: MARGIN.top, y2: this.heightPx - MARGIN.bottom, visibility: "hidden" });
    const measures = { width: this.widthPx, height: this.heightPx, viewBox: `0 0 ${this.widthPx} ${this.heightPx}` };
    const svg = draw("svg", { ...measures, "aria-hidden": "true", focusable: "false" },
      ...this.phases(), ...this.grid(), ...this.areas(), ...this.peak(), ...this.labels(), this.cursor);
    this.plot.replaceChildren(svg, this.tip);
    if (!this.tip.hidden) this.select(this.at);
  }

  /** The highest of the events that share a pixel, so that a short peak is one pixel wide. */
  columns() {
    const highest = new Map();
    this.run.timeline.events.forEach((event, at) => {
      const pixel = Math.floor(this.x(event));
      if (!highest.has(pixel) || this.sums[at] > this.sums[highest.get(pixel)]) highest.set(pixel, at);
    });
    return [...highest];
  }

  areas() {
    const columns = this.columns();
    const below = new Array(columns.length).fill(0);
    return Object.entries(this.run.timeline.series).map(([name, values]) => {
      const above = below.map((bytes, index) => bytes + values[columns[index][1]]);
      const path = `M${this.steps(columns, above)}L${this.steps(columns, below, true)}Z`;
      above.forEach((bytes, at) => (below[at] = bytes));
      return draw("path", { class: "area", "data-category": name, fill: this.colors[name], d: path });
    });
  }

  /** The outline of `heights`, each held until the next column. */
  steps(columns, heights, backwards = false) {
    const points = [];
    columns.forEach(([pixel], index) => {
      const y = this.y(heights[index]).toFixed(1);
      points.push(`${pixel},${y}`, `${columns[index + 1]?.[0] ?? pixel + 1},${y}`);
    });
    return (backwards ? points.reverse() : points).join("L");
  }

  grid() {
    const [unitBytes, unit] = unitOf(this.highestBytes);
    const step = niceStep(this.highestBytes / unitBytes, this.heightPx > 200 ? 5 : 3);
    const lines = [];
    for (let value = 0; value * unitBytes <= this.highestBytes; value += step) {
      const y = this.y(value * unitBytes);
      const text = `${Number(value.toFixed(6))} ${unit}`;
      lines.push(draw("line", { class: "grid", x1: MARGIN.left, x2: this.widthPx - MARGIN.right, y1: y, y2: y }));
      lines.push(draw("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end", text }));
    }
    return lines;
  }

  phases() {
    const top = this.heightPx - MARGIN.bottom;
    const shades = joinedSpans(this.run.spans).map(([phase, begin, end]) => draw("rect", {
      class: `shade ${phase}`, x: this.x(begin), width: this.x(end) - this.x(begin), y: MARGIN.top - 16,
      height: top - MARGIN.top + 16,
    }));
    const strip = this.run.spans.map(([phase, begin, end]) => draw("rect", {
      class: `phase ${phase}`, x: this.x(begin), width: this.x(end) - this.x(begin), y: top + 2, height: STRIP_PX,
    }));
    return [...shades, ...strip];
  }

  labels() {
    const wide = joinedSpans(this.run.spans).filter(([, begin, end]) => this.x(end) - this.x(begin) > NARROWEST_LABEL_PX);
    const names = wide.map(([phase, begin, end]) => draw("text", {
      class: "name", x: (this.x(begin) + this.x(end)) / 2, y: MARGIN.top - 4, "text-anchor": "middle", text: phase,
    }));
    const bottom = this.heightPx - 6;
    const right = { x: this.widthPx - MARGIN.right, y: bottom, "text-anchor": "end" };
    return [...names, draw("text", { x: MARGIN.left, y: bottom, text: "event 0" }),
      draw("text", { ...right, text: exact(this.run.timeline.events.at(-1)) })];
  }

  peak() {
    const x = this.x(this.run.peak_event);
    const y = this.y(this.run.peak_bytes);
    const isLeft = x < this.widthPx / 2;
    const text = draw("text", {
      class: "peak", x: isLeft ? Math.max(0, x - 6) : Math.min(this.widthPx, x + 6), y: 12,
      "text-anchor": isLeft ? "start" : "end", text: `peak ${size(this.run.peak_bytes)}`,
    });
    const line = draw("line", { class: "peak", x1: x, x2: x, y1: 16, y2: y });
    return [line, draw("path", { class: "peak", d: `M${x - 5},${y - 9}h10l-5,9z` }), text];
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const part = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    const wanted = part * this.last;
    const { events } = this.run.timeline;
    let [low, high] = [0, events.length - 1];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (events[middle] <= wanted) low = middle;
      else high = middle - 1;
    }
    // the peak's pixel selects the peak, however many events share it
    const isPeak = Math.abs(this.x(events[low]) - this.x(this.run.peak_event)) < 2;
    this.select(isPeak ? this.peakAt() : low);
  }

  key(event) {
    const most = this.run.timeline.events.length - 1;
    const page = Math.ceil(most / 20);
    const at = this.at ?? this.peakAt();
    const places = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - page,
      PageUp: at + page, Home: 0, End: most, p: this.peakAt(),
    };
    if (event.key === "Escape") this.leave();
    if (!(event.key in places) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(Math.min(most, Math.max(0, places[event.key])));
  }

  leave() {
    this.tip.hidden = true;
    this.cursor?.setAttribute("visibility", "hidden");
  }

  say(at) {
    const event = this.run.timeline.events[at];
    const peak = event === this.run.peak_event ? ", the peak" : "";
    return `event ${exact(event)}${peak}, ${phaseAt(this.run, event)}: ${size(this.sums[at])}`;
  }

  select(at) {
    this.at = at;
    const event = this.run.timeline.events[at];
    const x = this.x(event);
    this.plot.setAttribute("aria-valuenow", event);
    this.plot.setAttribute("aria-valuetext", this.say(at));
    fill(this.cursor, { x1: x, x2: x, visibility: "visible" }, []);
    const rows = Object.entries(this.run.timeline.series).reverse().filter(([, values]) => values[at]);
    this.tip.replaceChildren(make("p", { text: this.say(at) }), make("table", {}, ...rows.map(([name, values]) =>
      make("tr", {}, make("td", {}, swatch(this.colors[name]), words(name)), make("td", { text: size(values[at]) }),
        make("td", { text: exact(values[at]) })))));
    placeTip(this.tip, x, this.widthPx);
  }
}

/** The legend, which is also the table of categories at the peak. */
function legend(runs, colors) {
  const isThere = (name) => runs.some((run) => run.by_category[name] || run.resident[name] || run.timeline.series[name]);
  const names = Object.keys(colors).filter(isThere);
  const heads = runs.length === 1 ? ["at the peak", "share", "between steps"] : runs.map((run) => run.label);
  const body = names.reverse().map((name) => make("tr", {}, make("th", { scope: "row" }, swatch(colors[name]), words(name)),
    ...(runs.length === 1 ? alone(runs[0], name) : runs.map((run) => make("td", {}, sized(run.by_category[name] || 0))))));
  const last = runs.length === 1
    ? [make("td", {}, sized(runs[0].peak_bytes)), make("td", { text: "100%" }), make("td", {}, sized(runs[0].resident_bytes))]
    : runs.map((run) => make("td", {}, sized(run.peak_bytes)));
  return make("table", { class: "legend" },
    make("caption", { text: runs.length === 1 ? "By what it is for" : "At the peak" }),
    make("thead", {}, make("tr", {}, make("td"), ...heads.map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...body),
    make("tfoot", {}, make("tr", {}, make("th", { scope: "row", text: "sum" }), ...last)));
}

function alone(run, name) {
  const bytes = run.by_category[name] || 0;
  return [make("td", {}, sized(bytes)), make("td", { text: share(bytes, run.peak_bytes) }),
    make("td", {}, sized(run.resident[name] || 0))];
}

function phaseKey(runs) {
  const there = new Set(runs.flatMap((run) => run.spans.map(([phase]) => phase)));
  const names = ["forward", "backward", "recompute", "optimizer", "other"].filter((name) => there.has(name));
  return make("p", { class: "phase-key" }, "Below the plot: ",
    ...names.map((name) => make("span", {}, make("span", { class: `swatch ${name}`, "aria-hidden": "true" }), name)));
}
