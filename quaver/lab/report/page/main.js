const CURVES = [
  ["loss", "Loss", "nats per token", short4], ["grad_norm", "Gradient norm", "", short4],
  ["tokens_per_s", "Tokens per second", "", (value) => exact(Math.round(value))], ["memory", "Memory", "", (value) => `${short4(value)} GiB`],
];

const FROM_ZERO = ["tokens_per_s", "memory"];

function short4(value) {
  return String(Number(value.toPrecision(4)));
}

/** Shows the headline and the facts of each run. */
function showSummary(runs) {
  for (const run of runs) {
    byId("headlines").append(make("p", { class: `headline ${run.is_healthy === null ? "unknown" : run.is_healthy ? "good" : "bad"}` },
      runs.length > 1 ? make("strong", { text: `${run.label}: ` }) : null, run.headline));
  }
  const notes = runs.flatMap((run) => run.notes.map((text) => make("li", { text: runs.length > 1 ? `${run.label}: ${text}` : text })));
  byId("notes").append(...notes);
  byId("notes").hidden = !notes.length;
  if (runs.length > 1) byId("facts-table").append(factsTable(runs));
  else byId("facts").append(...runs[0].facts.map(fact));
}

function fact([label, value]) {
  return make("div", {}, make("dt", { text: label }), make("dd", {}, ...breakable(value)));
}

function factsTable(runs) {
  const names = [...new Set(runs.flatMap((run) => run.facts.map(([label]) => label)))];
  const facts = runs.map((run) => new Map(run.facts));
  const heads = runs.map(({ label }) => make("th", { scope: "col", text: label }));
  return make("table", { class: "facts", "aria-label": "Runs side by side" },
    make("thead", {}, make("tr", {}, make("td"), ...heads)),
    make("tbody", {}, ...names.map((name) => make("tr", {}, make("th", { scope: "row", text: name }),
      ...facts.map((values) => make("td", {}, ...breakable(values.get(name) ?? "")))))));
}

/** The lines of a chart: one for each model of each run, and a dashed one for its validation. */
function linesOf(runs, key) {
  const names = [...new Set(runs.flatMap((run) => Object.values(run.curves).flat().map(({ model }) => `${run.label}\n${model}`)))];
  const several = (run) => new Set(Object.values(run.curves).flat().map(({ model }) => model)).size > 1;
  const label = (run, model, isDashed) => {
    const isSaid = runs.length === 1 || (several(run) && model !== run.label);
    return [runs.length > 1 && run.label, isSaid && model, isDashed && "validation"].filter(Boolean).join(" ") || "value";
  };
  const line = (run, { model, steps, values }, isDashed) => ({
    steps, isDashed, label: label(run, model, isDashed), series: names.indexOf(`${run.label}\n${model}`),
    values: key === "memory" ? values.map((bytes) => bytes / 2 ** 30) : values,
  });
  return runs.flatMap((run) => [...run.curves[key].map((curve) => line(run, curve, false)),
    ...(key === "loss" ? run.curves.validation_loss.map((curve) => line(run, curve, true)) : [])]);
}

function marksOf(runs) {
  const whose = (run) => (runs.length > 1 ? `${run.label}: ` : "");
  return runs.flatMap((run) => [
    ...run.events.map(([step, text]) => ({ step, kind: "event", text: `${whose(run)}${text}` })),
    ...run.alarms.map((alarm) => ({ step: alarm.since, kind: "alarm", text: `${whose(run)}alarm: ${alarm.message}` })),
  ]);
}

function showCurves(runs, onChosen) {
  const curves = CURVES.map(([key, ...about]) => [key, about, linesOf(runs, key)]).filter(([, , lines]) => lines.length);
  if (!curves.length) return;
  byId("curves").hidden = false;
  const ends = curves.flatMap(([, , lines]) => lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]));
  const steps = [...ends, ...runs.flatMap((run) => run.events.map(([step]) => step))];
  const span = [Math.min(...steps), Math.max(...steps)];
  const marks = marksOf(runs).filter(({ step }) => step >= span[0] && step <= span[1]);
  const charts = curves.map(([name, [title, about, show], lines]) => new Chart({
    name, title, about: name === "memory" ? runs[0].memory_label : about, lines, marks, show, span, onChosen, isFromZero: FROM_ZERO.includes(name),
    onMoved: (step) => charts.forEach((chart) => chart.point(step)) }));
  byId("curves-plots").append(...charts.map((chart) => chart.element));
  const keys = new Map(curves.flatMap(([, , lines]) => lines.filter((line) => !line.isDashed)).map(({ label, series }) => [series, label]));
  byId("curves-key").append(...[...keys].map(([series, label]) => make("span", {}, seriesKey(series), label)),
    ...(linesOf(runs, "loss").some((line) => line.isDashed) ? [make("span", { text: "dashed: validation" })] : []),
    ...markKey(marks, "alarm", " an alarm's cause began"), ...markKey(marks, "event", " step skipped or not finite, or loss spike"));
}

function markKey(marks, kind, text) {
  if (!marks.some((mark) => mark.kind === kind)) return [];
  return [make("span", {}, make("span", { class: `${kind}-key`, text: "\u25bc" }), text)];
}

/** Shows the heat maps and the sections that depend on them. Returns the maps, and a function that goes to a cell. */
function showNumerics(runs, { statistics, colors, special }) {
  const measured = runs.filter((run) => run.numerics).map((run) => ({
    ...run, cells: new Cells(run.numerics), samples: run.numerics.samples, histograms: run.numerics.histograms,
    alarms: run.alarms.map((alarm) => ({ ...alarm, until: alarm.until ?? Infinity })) }));
  byId("maps").hidden = false;
  byId("distribution").hidden = false;
  const hasHistograms = measured.some((run) => run.histograms.rows.length);
  const distributions = hasHistograms ? new Distributions(measured) : null;
  const sentence = byId("distribution-about");
  if (distributions) byId("distribution-place").append(distributions.element);
  else sentence.textContent = "The record has no histograms.";
  const onChosen = (row, step) => {
    if (!distributions) return;
    sentence.textContent = distributions.show(row, step) ? DISTRIBUTION_ABOUT
      : `There is no histogram of ${row.name} on this page. The one below is of another tensor.`;
  };
  if (distributions) sentence.textContent = DISTRIBUTION_ABOUT;
  const maps = new HeatMaps({ statistics, colors, special, runs: measured, onChosen });
  byId("maps-place").append(maps.element);
  const goTo = (layer, operand, step) => {
    maps.goTo(layer, operand, step);
    byId("maps").scrollIntoView({ block: "start" });
    maps.maps[0].plot.focus({ preventScroll: true });
  };
  showWorst(measured, statistics, goTo);
  const tried = measured.filter((run) => run.numerics.whatif.rows.length);
  byId("whatif").hidden = !tried.length;
  if (tried.length) byId("whatif-place").append(...ofRuns("whatif-run", tried, whatIfTable));
  return { goTo, maps };
}

const DISTRIBUTION_ABOUT = "How many elements have a magnitude between two powers of two, before and after the cast, of the cell that is"
  + " chosen on a heat map or here, at the nearest step that has a histogram. Both axes are logarithmic.";

function showWorst(runs, statistics, goTo) {
  const build = (statistic) => (runs.length > 1 ? besideTable(runs, statistic) : worstTable(runs[0], statistic, goTo)).element;
  const place = make("div", {}, build(statistics[0]));
  const options = statistics.map(({ name, title }) => make("option", { value: name, text: title }));
  const change = (event) => place.replaceChildren(build(statistics.find(({ name }) => name === event.target.value)));
  const choice = make("select", { id: "worst-statistic", onchange: change }, ...options);
  byId("worst-place").append(make("div", { class: "controls" }, make("label", { for: "worst-statistic", text: "By" }), choice), place);
  byId("worst").hidden = false;
}

function main() {
  const { runs, statistics, colors, special } = JSON.parse(byId("data").textContent);
  showSummary(runs);
  const numerics = statistics.length ? showNumerics(runs, { statistics, colors, special }) : null;
  showCurves(runs, (step) => numerics?.maps.goToStep(step));
  if (runs.some((run) => run.alarms.length)) {
    byId("alarms").hidden = false;
    byId("alarms-rows").append(alarmTable(runs, numerics?.goTo).element);
  }
  const converted = runs.filter((run) => run.conversion);
  if (converted.length) {
    byId("conversion").hidden = false;
    byId("conversion-rows").append(...ofRuns("conversion-run", converted, conversionTable));
  }
  if (runs.some((run) => run.starts.length)) {
    byId("environment").hidden = false;
    byId("environment-rows").append(environmentTable(runs).element);
  }
  showContents();
}

main();
