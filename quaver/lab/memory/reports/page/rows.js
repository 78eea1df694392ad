/** The rows of a table as objects. */
function unpack(table) {
  return table.rows.map((values) => Object.fromEntries(table.columns.map((name, at) => [name, values[at]])));
}

/** The rows with "*" for a layer's number in module names, equal ones merged, the largest first. */
function fold(rows) {
  const merged = new Map();
  for (const row of rows) {
    const folded = { ...row, module: star(row.module || "") };
    for (const name of ["of", "saved_in"]) if (typeof row[name] === "string") folded[name] = star(row[name]);
    if (row.first_use) folded.first_use = { ...row.first_use, module: star(row.first_use.module || "") };
    const key = JSON.stringify({ ...folded, bytes: 0, count: 0 });
    const there = merged.get(key);
    if (there) {
      there.bytes += row.bytes;
      there.count += row.count;
    } else {
      merged.set(key, folded);
    }
  }
  return [...merged.values()].sort((a, b) => b.bytes - a.bytes);
}

function star(module) {
  return module.replace(/(?<=\.)\d+(?=\.|$)/g, "*");
}

function useName(use) {
  if (!use) return "";
  return [operatorName(use.operator), use.module && `in ${use.module}`, use.source && `(${use.source})`].filter(Boolean).join(" ");
}

/** The fields of a row with their texts; a missing field is "". */
const FIELDS = [
  ["operator", "operator", (row) => operatorName(row.operator)],
  ["of", "of", (row) => operatorName(textOf(row.of))],
  ["module", "module", (row) => moduleName(row.module)],
  ["shape", "shape", (row) => shapeName(row.shape)],
  ["dtype", "dtype", (row) => row.dtype || ""],
  ["phase", "made in", (row) => row.phase || ""],
  ["source", "source", (row) => row.source || ""],
  ["saved_by", "saved by", (row) => row.saved_by || ""],
  ["saved_in", "saved in", (row) => row.saved_in || ""],
  ["first_use", "first use", (row) => useName(row.first_use)],
];

function textOf(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : Array.isArray(value) ? value.map(textOf).join(", ") : JSON.stringify(value);
}

function categoryColumn(colors) {
  return {
    label: "category", kind: "category", read: (row) => row.category || "",
    show: (row) => (row.category ? [swatch(colors[row.category]), words(row.category)] : []),
  };
}

const KINDS = {
  shape: "shape", operator: "name", of: "name", module: "name", source: "name", saved_in: "name", first_use: "name",
};

/** The table of a run's tensors at the peak or saved for backward. */
function tensorTable(name, caption, packed, colors) {
  const rows = unpack(packed);
  const fields = FIELDS.map(([key, label, read]) => ({ key, label, read, kind: KINDS[key] || "" }));
  const columns = [categoryColumn(colors), bytesColumn("size", (row) => row.bytes),
    { label: "count", kind: "number", read: (row) => row.count, show: (row) => [exact(row.count)] }, ...fields];
  return new SortedTable({ name, caption, columns, rows, folded: fold(rows), bytes: (row) => row.bytes });
}
