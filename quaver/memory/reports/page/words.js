"use strict";

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "bytes"]];
const SVG = document.getElementById("svg").namespaceURI;
const byId = (id) => document.getElementById(id);

function exact(number) {
  return number.toLocaleString("en-US");
}

function unitOf(bytes) {
  return UNITS.find(([size]) => Math.abs(bytes) >= size || size === 1);
}

/** A size with about four digits, in the largest unit that is at most the size. */
function size(bytes) {
  const [unitBytes, unit] = unitOf(bytes);
  const value = bytes / unitBytes;
  const digits = unitBytes === 1 ? 0 : Math.max(0, 3 - Math.floor(Math.log10(Math.max(1, Math.abs(value)))));
  return `${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

function signed(bytes) {
  return bytes === 0 ? "0" : `${bytes > 0 ? "+" : "\u2212"}${size(Math.abs(bytes))}`;
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : "";
}

function plural(number, word) {
  return `${exact(number)} ${word}${number === 1 ? "" : "s"}`;
}

function words(name) {
  return name.replaceAll("_", " ");
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

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An element; strings among `children` and `text` become text, never markup. */
function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function draw(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function sized(bytes, text = size(bytes)) {
  return make("data", { value: bytes, title: `${exact(bytes)} bytes`, text });
}

/** A name with line breaks allowed after dots, underscores and slashes. */
function breakable(text) {
  return text.split(/(?<=[._/])/).flatMap((part, at) => (at ? [make("wbr"), part] : [part]));
}

function swatch(color) {
  const box = make("span", { class: "swatch", "aria-hidden": "true" });
  box.style.backgroundColor = color;
  return box;
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
