function signed(bytes) {
  return bytes === 0 ? "0" : `${bytes > 0 ? "+" : "\u2212"}${size(Math.abs(bytes))}`;
}

function moduleName(name) {
  return name || "(no module)";
}

/** An operator without the float8 phase around it. */
function operatorName(name) {
  const found = /^\S+ \((.*)\)$/.exec(name || "");
  return found ? found[1] : name || "";
}

function shapeName(shape) {
  return Array.isArray(shape) && shape.length ? shape.join(" \u00d7 ") : "";
}

function channels(color) {
  return [1, 3, 5].map((at) => Number.parseInt(color.slice(at, at + 2), 16));
}

/** Mixes `color` with white: 0 is the color, 1 is white. */
function lighter(color, part) {
  const mixed = channels(color).map((value) => Math.round(value + (255 - value) * part));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

/** Black or white, the one with more contrast to `color`: at least 4.58. */
function inkOn(color) {
  const linear = channels(color).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff";
}
