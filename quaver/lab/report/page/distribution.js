const DISTRIBUTION = { left: 44, right: 8, top: 12, bottom: 24, height: 210 };

/** For each run, a histogram of a tensor's magnitudes before and after the cast at a step. */
class Distributions {
  /** runs: {label, cells, histograms: {samples, rows: [[tensor, step, exponent of the first bin, before, after]]}}. */
  constructor(runs) {
    this.runs = runs.map((run) => ({ ...run, byTensor: groupedByTensor(run) }));
    const names = new Map(this.runs.flatMap(({ byTensor }) => [...byTensor].map(([key, { name }]) => [key, name])));
    const option = ([value, text]) => make("option", { value, text });
    this.tensor = make("select", { id: "distribution-tensor", onchange: () => this.offerSteps() }, ...[...names].map(option));
    this.step = make("select", { id: "distribution-step", onchange: () => this.render() });
    this.places = make("div", { class: this.runs.length > 1 ? "beside-runs" : "" });
    this.element = make("div", {}, make("div", { class: "controls" }, make("label", { for: "distribution-tensor", text: "Tensor" }),
      this.tensor, make("label", { for: "distribution-step", text: "Step" }), this.step), this.places);
    this.offerSteps();
  }

  /** The steps at which a run has the chosen tensor's histogram. */
  steps() {
    const steps = this.runs.flatMap(({ byTensor }) => (byTensor.get(this.tensor.value)?.steps || []).map(({ step }) => step));
    return [...new Set(steps)].sort((a, b) => a - b);
  }

  offerSteps(wanted = Infinity) {
    const steps = this.steps();
    this.step.replaceChildren(...steps.map((step) => make("option", { value: step, text: exact(step) })));
    this.step.value = nearestOf(steps, wanted);
    this.render();
  }

  /** Shows the histogram of a row of the heat maps at the nearest step. Returns whether there is one. */
  show(row, step) {
    const tensor = row.tensors.find(({ key }) => this.runs.some(({ byTensor }) => byTensor.has(key)));
    if (!tensor) return false;
    this.tensor.value = tensor.key;
    this.offerSteps(step);
    return true;
  }

  render() {
    const step = Number(this.step.value);
    this.places.replaceChildren(...this.runs.map((run) => {
      const steps = run.byTensor.get(this.tensor.value)?.steps || [];
      const nearest = nearestOf(steps.map((histogram) => histogram.step), step);
      const shown = steps.find((histogram) => histogram.step === nearest);
      return shown ? histogramFigure(run.label, shown) : make("p", { class: "about", text: `${run.label}: no histogram of this tensor` });
    }));
  }
}

function groupedByTensor({ cells, histograms }) {
  const byTensor = new Map();
  for (const [tensor, step, low, before, after] of histograms.rows) {
    const { key, name, form } = cells.tensors[tensor];
    if (!byTensor.has(key)) byTensor.set(key, { name, steps: [] });
    byTensor.get(key).steps.push({ step, low, form, before: countsOf(before), after: countsOf(after) });
  }
  return byTensor;
}

/** A byte is 8 log2(1 + count). */
function countsOf(base64) {
  return [...bytesOf(base64)].map((byte) => 2 ** (byte / 8) - 1);
}

function nearestOf(steps, wanted) {
  return steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps.at(-1));
}

function histogramFigure(label, histogram) {
  const { step, form, before } = histogram;
  const caption = make("figcaption", {}, make("strong", { text: label }), ` step ${exact(step)}${form && `, ${form}`}: `,
    make("span", { class: "key before", "aria-hidden": "true" }), "before and ",
    make("span", { class: "key after", "aria-hidden": "true" }), "after the cast");
  const plot = make("div", { class: "plot distribution", role: "img", "aria-label": `Magnitudes before and after the cast, from 2^${
    histogram.low} to 2^${histogram.low + before.length}` });
  new ResizeObserver(() => plot.replaceChildren(histogramSvg(histogram, plot.clientWidth))).observe(plot);
  return make("figure", {}, caption, plot);
}

function histogramSvg({ low, before, after }, width) {
  const { left, right, top, bottom, height } = DISTRIBUTION;
  const highest = Math.log2(1 + Math.max(1, ...before, ...after));
  const binPx = (width - left - right) / before.length;
  const y = (count) => height - bottom - (Math.log2(1 + count) / highest) * (height - top - bottom);
  const powers = [];
  for (let power = 0; power <= highest; power += Math.max(1, Math.ceil(highest / 5))) {
    powers.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(2 ** power - 1), y2: y(2 ** power - 1) }),
      draw("text", { x: left - 5, y: y(2 ** power - 1) + 4, "text-anchor": "end", text: power ? `2^${power}` : "0" }));
  }
  const every = Math.ceil(44 / binPx);
  const bins = before.flatMap((count, at) => [
    draw("rect", { class: "after", x: left + at * binPx + 0.5, width: Math.max(0.5, binPx - 1), y: y(after[at]), height: height - bottom - y(after[at]) },
      draw("title", { text: `2^${low + at} to 2^${low + at + 1}: ${exact(Math.round(count))} before, ${exact(Math.round(after[at]))} after` })),
    draw("path", { class: "before", d: `M${left + at * binPx},${y(count)}h${binPx}` }),
    at % every === 0 ? draw("text", { x: left + at * binPx, y: height - bottom + 15, "text-anchor": "middle", text: `2^${low + at}` }) : null,
  ]);
  return draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" }, ...powers, ...bins);
}
