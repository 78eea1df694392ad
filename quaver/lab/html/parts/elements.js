"use strict";

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "bytes"]];
const SVG = document.getElementById("svg").namespaceURI;
const byId = (id) => document.getElementById(id);

function isNumber(value) {
  return typeof value === "number";
}

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

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)}%` : "";
}

function plural(number, word) {
  return `${exact(number)} ${word}${number === 1 ? "" : "s"}`;
}

function words(name) {
  return name.replaceAll("_", " ");
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

/** Makes an element. `text` and the strings among `children` become text, never markup. */
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

/** The distance, 1, 2 or 5 times a power of ten, of about `number` lines up to `highest`. */
function niceStep(highest, number) {
  const rough = highest / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
}

/** Shows the tip of a plot beside `x`, inside the plot. */
function placeTip(tip, x, widthPx) {
  tip.hidden = false;
  const left = x > widthPx / 2 ? x - tip.offsetWidth - 10 : x + 10;
  tip.style.left = `${Math.max(0, Math.min(widthPx - tip.offsetWidth, left))}px`;
}

/** The element that `build` makes for a run, with a choice of the run if there are several. */
function ofRuns(name, runs, build) {
  const place = make("div");
  const show = (at) => place.replaceChildren(build(runs[at]).element);
  show(0);
  if (runs.length === 1) return [place];
  const choices = runs.map((run, at) => make("label", {}, make("input", {
    type: "radio", name, value: at, checked: at === 0, onchange: () => show(at) }), ` ${run.label}`));
  return [make("fieldset", { class: "choice" }, make("legend", { text: "Of" }), ...choices), place];
}

function showContents() {
  for (const section of document.querySelectorAll("main > section:not([hidden])")) {
    byId("contents").append(make("li", {}, make("a", { href: `#${section.id}`, text: section.querySelector("h2").textContent })));
  }
}
