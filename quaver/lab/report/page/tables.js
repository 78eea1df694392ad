const text = (label, read, kind = "") => ({ label, kind, read });
const number = (label, read) => ({ label, kind: "number", read, show: (row) => [read(row) === "" ? "" : exact(read(row))] });

/** The column with the run of a row, if there are several runs. */
function runColumn(runs) {
  return runs.length > 1 ? [text("run", (row) => row.run, "name")] : [];
}

function alarmTable(runs, goTo) {
  const rows = runs.flatMap(({ label, alarms }) => alarms.map((alarm) => ({ ...alarm, run: label })));
  return new SortedTable({
    name: "alarms", caption: plural(rows.length, "alarm"), rows, filtered: rows.length > 10, columns: [
      ...runColumn(runs), number("step", (row) => row.step), number("since step", (row) => row.since),
      number("ended at step", (row) => row.until ?? ""), text("rule", (row) => words(row.rule)),
      { ...text("what", (row) => row.message, "sentence"), show: (row) => [...breakable(row.message), ...showButton(row, goTo)] },
      { ...text("what would help", (row) => row.remedies.join("; "), "sentence"), show: (row) => row.remedies.map((remedy) => make("div", { text: remedy })) },
      text("rank", (row) => row.rank ?? ""), text("action", (row) => row.action ?? ""),
    ],
  });
}

function showButton({ layer, operand, since }, goTo) {
  if (!layer || !operand || !goTo) return [];
  const label = `Show ${layer} ${words(operand)} at step ${since} on the heat map`;
  return [" ", make("button", { type: "button", class: "link", "aria-label": label, text: "show", onclick: () => goTo(layer, operand, since) })];
}

/** The worst sample of the worst tensors by a statistic, with exact numbers. */
function worstTable(run, statistic, goTo) {
  const rows = (run.numerics.worst[statistic.name] || []).map(([tensor, step, value]) => ({ ...run.cells.tensors[tensor], step, value }));
  return new SortedTable({
    name: "worst", caption: `${statistic.is_low_worse ? "Lowest" : "Highest"} ${statistic.title} of ${run.label}, by tensor`,
    rows, filtered: false, most: 10, columns: [
      { ...text("layer", (row) => row.layer, "name"), show: (row) => [...breakable(row.layer), ...showButton({ ...row, since: row.step }, goTo)] },
      text("operand", (row) => words(row.operand)), text("cast", (row) => (row.cast === "result" ? "" : row.cast)),
      text("format", (row) => row.form), text(statistic.title, (row) => row.value, "number"), number("at step", (row) => row.step),
    ],
  });
}

/** The SQNR of the worst casts under each recipe that the run tried on the same tensors. */
function whatIfTable(run) {
  const { recipes, rows } = run.numerics.whatif;
  const shown = (value) => (isNumber(value) ? `${value.toFixed(1)} dB` : "");
  const decibels = (label, at) => ({ label, kind: "number", read: (row) => row[at] ?? "", show: (row) => [shown(row[at])] });
  return new SortedTable({ name: "whatif", caption: `SQNR of the casts of ${run.label} under other recipes`, rows, most: 10, columns: [
    text("tensor", (row) => run.cells.tensors[row[0]].name, "name"), number("at step", (row) => row[1]), decibels("in the run", 2),
    ...recipes.map((recipe, at) => decibels(recipe, at + 3))] });
}

/** The worst value of a statistic of each tensor that all runs have, and the differences of the later runs to the first. */
function besideTable(runs, statistic) {
  const rows = joinedRows(runs).map((row) => ({ row, worst: runs.map(({ cells }) => cells.worst(statistic.name, row.key)) }))
    .filter(({ worst }) => worst.every((byte) => byte !== MISSING));
  rows.sort((a, b) => Math.max(...b.worst) - Math.max(...a.worst));
  const columns = runs.map(({ label }, at) => ({ label, kind: "number", read: ({ worst }) => -worst[at],
    show: ({ worst }) => [valueText(statistic, worst[at])] }));
  const differences = statistic.scale === "linear" ? runs.slice(1).map(({ label }, at) => ({
    label: `${label} against ${runs[0].label}`, kind: "number", read: ({ worst }) => difference(statistic, worst[at + 1], worst[0]),
    show: (row) => [differenceText(statistic, difference(statistic, row.worst[at + 1], row.worst[0]))] })) : [];
  return new SortedTable({
    name: "beside", caption: `${statistic.is_low_worse ? "Lowest" : "Highest"} ${statistic.title} of a sample, to a step of the colors`,
    rows, most: 10, columns: [text("tensor", ({ row }) => row.name, "name"), ...columns, ...differences] });
}

function difference(statistic, a, b) {
  return [a, b].every((byte) => byte >= 2 && byte <= WORST) ? scaledOf(statistic, a) - scaledOf(statistic, b) : "";
}

function differenceText(statistic, value) {
  return value === "" ? "" : `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(1)} ${statistic.unit}`;
}

function conversionTable(run) {
  const { layers, config, float8_flops_fraction: fraction, notes } = run.conversion;
  const converted = layers.filter((layer) => layer.converted).length;
  const table = new SortedTable({
    name: "conversion", caption: `Matmul weights of ${run.label}`, rows: layers, marked: (row) => !row.converted, columns: [
      text("weight", (row) => row.name, "name"), number("in", (row) => row.in_features), number("out", (row) => row.out_features),
      text("float8", (row) => (row.converted ? "yes" : "no")), text("reason", (row) => row.reason, "sentence"),
      text("backend", (row) => row.backend ?? "")],
  });
  const summary = `${exact(converted)} of ${plural(layers.length, "weight")} in float8, ${(100 * fraction).toFixed(1)}% of their FLOPs.`;
  return { element: make("div", {}, make("p", { class: "about", text: summary }), ...notes.map((note) => make("p", { class: "about", text: note })),
    table.element, make("details", {}, make("summary", { text: "The recipe" }), make("pre", { text: config }))) };
}

/** Names and values of each start of each run; those that differ are marked. */
function environmentTable(runs) {
  const starts = runs.flatMap((run) => run.starts.map((start, at) => ({
    label: runs.length > 1 || run.starts.length > 1 ? `${run.label}${run.starts.length > 1 ? `, start ${at + 1}` : ""}` : "value",
    values: new Map(flat(start)) })));
  const names = [...new Set(starts.flatMap(({ values }) => [...values.keys()]))];
  const rows = names.map((name) => ({ name, values: starts.map(({ values }) => values.get(name) ?? "") }));
  const columns = starts.map(({ label }, at) => text(label, (row) => row.values[at], "code"));
  return new SortedTable({ name: "environment", caption: plural(starts.length, "start"), rows, most: 100, filtered: rows.length > 20,
    marked: (row) => new Set(row.values).size > 1 && row.name !== "started_at", columns: [text("what", (row) => words(row.name), "name"), ...columns] });
}

/** The values of an object by dotted names, as texts. */
function flat(value, name = "") {
  if (value === null || value === undefined) return [];
  if (Array.isArray(value)) return value.length ? [[name, value.every((item) => typeof item !== "object") ? value.join(" ") : JSON.stringify(value)]] : [];
  if (typeof value !== "object") return [[name, String(value)]];
  return Object.entries(value).flatMap(([key, member]) => flat(member, name ? `${name}.${key}` : key));
}
