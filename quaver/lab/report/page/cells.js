const [MISSING, BEST, WORST, INFINITE, NOT_A_NUMBER] = [0, 1, 253, 254, 255];

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** A non-negative number with three digits. */
function short(value) {
  if (value === 0) return "0";
  return value >= 1e-3 && value < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

function percent(part) {
  return part >= 1e-4 ? `${Number((100 * part).toPrecision(3))}%` : short(part);
}

/** The value that a byte of a heat map stands for, as text. */
function valueText(statistic, byte) {
  if (byte === MISSING) return "no value";
  if (byte === NOT_A_NUMBER) return "not finite";
  if (byte === INFINITE) return statistic.is_low_worse ? "no signal" : "infinite";
  if (byte === BEST) return statistic.is_low_worse ? "no error" : "0";
  return scaledText(statistic, scaledOf(statistic, byte));
}

function scaledOf(statistic, byte) {
  const [low, high] = statistic.limits;
  const badness = (byte - 2) / (WORST - 2);
  return low + (statistic.is_low_worse ? 1 - badness : badness) * (high - low);
}

function scaledText(statistic, scaled) {
  if (statistic.scale === "log2") return `${short(2 ** scaled)} = 2^${scaled.toFixed(1)}`;
  return statistic.scale === "log10" ? percent(10 ** scaled) : `${scaled.toFixed(1)} ${statistic.unit}`;
}

/** The last position of a sorted list whose value is at most `wanted`; -1 before the first. */
function lastUpTo(sorted, wanted) {
  let [low, high] = [-1, sorted.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (sorted[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The tensors, rows, columns and bytes of a run's heat maps. A row is one tensor, or several of one kind. */
class Cells {
  constructor(numerics) {
    const { names, rows } = numerics.tensors;
    this.tensors = rows.map((row) => {
      const [layer, operand, cast, form] = row.map((at) => names[at]);
      return { layer, operand, cast, form, key: `${layer} ${operand} ${cast}`, name: tensorName(layer, operand, cast) };
    });
    this.rows = (numerics.rows || this.tensors.map((_, at) => [at])).map((row) => rowOf(row.map((at) => this.tensors[at])));
    [this.firsts, this.lasts] = numerics.columns;
    this.end = this.lasts.at(-1) + Math.max(1, numerics.every);
    this.maps = Object.fromEntries(Object.entries(numerics.maps).map(([name, map]) => [name, this.unpacked(map)]));
  }

  /** The bytes of each row by its key. */
  unpacked(map) {
    const bytes = bytesOf(map.bytes);
    const width = this.firsts.length;
    return new Map(map.rows.map((row, at) => [this.rows[row].key, bytes.subarray(at * width, (at + 1) * width)]));
  }

  /** The bytes of a row, or of the cast for both directions if only other runs have a cast for each direction. */
  line(statistic, key) {
    const map = this.maps[statistic];
    return map?.get(key) ?? map?.get(bothOf(key));
  }

  worst(statistic, key) {
    return (this.line(statistic, key) || []).reduce((a, b) => Math.max(a, b), MISSING);
  }

  columnAt(step) {
    return step >= this.end ? -1 : lastUpTo(this.firsts, step);
  }

  /** The byte of a row at a step. */
  at(statistic, key, step) {
    const line = this.line(statistic, key);
    const column = this.columnAt(step);
    return line && column >= 0 ? line[column] : MISSING;
  }

  stepsText(step) {
    const column = this.columnAt(step);
    if (column < 0) return "no sample";
    const [first, last] = [this.firsts[column], this.lasts[column]];
    return first === last ? `step ${exact(first)}` : `the worst of steps ${exact(first)} to ${exact(last)}`;
  }
}

/** The key of a row with the cast for both directions. */
function bothOf(key) {
  return key.replace(/ (row|column)$/gm, " both");
}

/** The rows of all runs, in the order of the run with the most. Casts for each direction replace the cast for both. */
function joinedRows(runs) {
  const lists = runs.map(({ cells }) => cells.rows).sort((a, b) => b.length - a.length);
  const rows = new Map(lists.flat().map((row) => [row.key, row]));
  for (const key of [...rows.keys()]) if (bothOf(key) !== key) rows.delete(bothOf(key));
  return [...rows.values()];
}

/** The name of a tensor, with its cast if the operand has one for each direction. */
function tensorName(layer, operand, cast) {
  return `${layer} ${words(operand)}${cast === "row" || cast === "column" ? ` (${cast})` : ""}`;
}

/** A name from its block's number on. */
function numbered(name) {
  return name.replace(/^[^\d\s]*\.(?=\d+\.)/, "");
}

function rowOf(tensors) {
  const { operand, cast, form, name } = tensors[0];
  const isOne = tensors.length === 1;
  return {
    tensors, operand, cast, form, key: tensors.map((tensor) => tensor.key).join("\n"),
    name: isOne ? name : `${name}, to ${tensors.at(-1).layer}: the worst of ${tensors.length}`,
    label: numbered(isOne ? name : `${tensors[0].layer} \u2026 ${words(operand)}`),
  };
}
