/** A bar to the left for less or to the right for more, and its size as text. */
function signedBar(bytes, most) {
  const bar = make("span", { class: `bar ${bytes < 0 ? "less" : "more-bytes"}` });
  const half = most ? (50 * Math.abs(bytes)) / most : 0;
  bar.style.width = `${half}%`;
  bar.style.left = `${bytes < 0 ? 50 - half : 50}%`;
  return [make("span", { class: "bars", "aria-hidden": "true" }, bar), sized(bytes, signed(bytes))];
}

function differenceColumn(rows, read) {
  const most = Math.max(...rows.map((row) => Math.abs(read(row))));
  return { label: "difference", kind: "number difference", read, show: (row) => signedBar(read(row), most) };
}

function ratio(a, b) {
  return a ? b / a : "";
}

function ratioColumn(read) {
  return { label: "ratio", kind: "number", read, show: (row) => [read(row) === "" ? "" : read(row).toFixed(3)] };
}

/** The bytes of two runs by category at their peaks, and their other sums. */
function sumsOf(a, b, names) {
  const rows = names.filter((name) => a.by_category[name] || b.by_category[name]).map((name) => ({
    category: name, name: words(name), a: a.by_category[name] || 0, b: b.by_category[name] || 0,
  }));
  const sums = [["sum at the peak", "peak_bytes"], ["between steps", "resident_bytes"],
    ["saved by the first forward", "saved_by_forward_bytes"], ["most saved for backward", "saved_bytes"]];
  return [...rows, ...sums.filter(([, key]) => isNumber(a[key]) && isNumber(b[key]))
    .map(([name, key]) => ({ category: "", name, a: a[key], b: b[key] }))];
}

function sumsTable(name, caption, [a, b], labels, colors, ofRatio) {
  const rows = sumsOf(a, b, Object.keys(colors));
  const first = {
    label: "what", read: (row) => row.name,
    show: (row) => [row.category ? swatch(colors[row.category]) : null, row.name],
  };
  const columns = [first, bytesColumn(labels[0], (row) => row.a), bytesColumn(labels[1], (row) => row.b),
    differenceColumn(rows, (row) => row.b - row.a), ratioColumn(ofRatio)];
  return new SortedTable({ name, caption, columns, rows, filtered: false }).element;
}

const MOST_DIFFERENCES = 15;
const CAPTIONS = { saved: "Saved for backward: what differs", peak: "Alive at the peak: what differs" };

/** The ranked differences of one table. */
function differenceTable(table, rows, comparison, colors) {
  const columns = [
    differenceColumn(rows, (row) => row.difference_bytes),
    bytesColumn(comparison.label_a, (row) => row.bytes_a), bytesColumn(comparison.label_b, (row) => row.bytes_b),
    categoryColumn(colors),
    { label: "module", kind: "name", read: (row) => moduleName(row.module) },
    { label: "in words", kind: "sentence", read: (row) => row.sentence || "" },
    { label: "count", kind: "shape", read: (row) => countsOf(row) },
    { label: "layers", kind: "number", read: (row) => row.num_layers ?? "" },
  ];
  const caption = CAPTIONS[table] || "What differs";
  return new SortedTable({ name: `compare-${table || "rows"}`, caption, columns, rows, most: MOST_DIFFERENCES }).element;
}

function countsOf(row) {
  return isNumber(row.count_a) && isNumber(row.count_b) ? `${exact(row.count_a)} \u2192 ${exact(row.count_b)}` : "";
}

function showComparison(runs, comparison, colors) {
  const labels = runs.map((run) => run.label);
  byId("compare-categories").append(
    sumsTable("categories", "By what it is for", runs, labels, colors, (row) => ratio(row.a, row.b)));
  if (!comparison) return;
  for (const table of new Set(comparison.rows.map((row) => row.table || ""))) {
    const rows = comparison.rows.filter((row) => (row.table || "") === table);
    byId("compare-rows").append(differenceTable(table, rows, comparison, colors));
  }
}

function flops(number) {
  const [unit, name] = [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]]
    .find(([each]) => number >= each) || [1, "FLOP"];
  return `${Number((number / unit).toPrecision(4))} ${name}`;
}

function showAdvice(advice) {
  const { rows, fit_bytes: fit, fastest_index: fastest } = advice;
  const again = {
    label: "computed again", kind: "number", read: (row) => row.recomputed_flops ?? "",
    show: ({ recomputed_flops: more, step_flops: step }) => (isNumber(more)
      ? [make("span", { title: `${exact(more)} FLOP`, text: flops(more) }), step ? ` (+${share(more, step)})` : ""] : []),
  };
  const columns = [
    { label: "change", kind: "sentence", read: (row) => row.change || "" },
    bytesColumn("peak", (row) => row.peak_bytes),
    differenceColumn(rows, (row) => row.difference_bytes), again,
    { label: "fits", read: (row) => (fit === null || fit === undefined ? "" : row.fits ? "yes" : "no") },
    { label: "settings", kind: "code", read: (row) => (row.flags || ""),
      show: (row) => [make("code", { text: row.flags || "" })] },
    { label: "note", kind: "sentence", read: (row) => row.note || "" },
  ];
  const chosen = isNumber(fastest) ? rows[fastest] : null;
  const about = [isNumber(fit) ? `It is to fit into ${size(fit)}.` : "", chosen ? `Best is the marked row: ${chosen.change}.`
    : isNumber(fit) ? "No row fits." : ""];
  byId("advice-about").textContent = about.filter(Boolean).join(" ");
  const marked = (row) => row === chosen;
  byId("advice-rows").append(new SortedTable({
    name: "advice", caption: "Changes, and what each takes", columns, rows, marked, filtered: false }).element);
}

function showMeasured(run, measured, colors) {
  const labels = ["predicted", "measured"];
  byId("measured-about").textContent = measured.note ? `Of the measurement: ${measured.note}.` : "The ratio is predicted over measured.";
  byId("measured-rows").append(
    sumsTable("measured", "By what it is for", [run, measured], labels, colors, (row) => ratio(row.b, row.a)));
}
