const CELL_PX = 26;
const NARROWEST_PX = 3;
const PALEST = 0.55;

/** The rows as a tree: all, category, the segments of the module's name, kinds of tensors. */
function treeOf(rows, colors) {
  const root = { name: "all", parent: null, bytes: 0, count: 0, kinds: 0, children: new Map(), color: "#d8dee4" };
  for (const row of rows) {
    let node = grow(root, row);
    node = grow(child(node, `category ${row.category}`, words(row.category), colors[row.category]), row);
    const segments = row.module ? row.module.split(".") : [moduleName("")];
    for (const segment of segments) node = grow(child(node, `module ${segment}`, segment), row);
    const leaf = child(node, `row ${JSON.stringify({ ...row, bytes: 0, count: 0 })}`, leafName(row));
    grow(leaf, row).row = row;
  }
  return root;
}

function child(parent, key, name, color) {
  if (!parent.children.has(key)) {
    const depth = (parent.depth || 0) + 1;
    const own = color || parent.base;
    const shown = lighter(own, Math.min(PALEST, 0.09 * (depth - 1)));
    parent.children.set(key, { name, parent, bytes: 0, count: 0, kinds: 0, children: new Map(), base: own, color: shown, depth });
  }
  return parent.children.get(key);
}

function grow(node, row) {
  node.bytes += row.bytes;
  node.count += row.count;
  node.kinds += 1;
  return node;
}

function leafName(row) {
  const what = [operatorName(row.operator), shapeName(row.shape), row.dtype].filter(Boolean).join(" ");
  return what || "(nothing known of it)";
}

function pathOf(node) {
  return node.parent ? [...pathOf(node.parent), node] : [node];
}

/** The breakdown at the peak: an ARIA tree, whose focus the arrow keys move. */
class Icicle {
  constructor(run, colors) {
    Object.assign(this, { colors, cells: new Map() });
    this.crumbs = make("ol");
    this.tree = make("div", { class: "icicle", role: "tree", "aria-label": `Alive at the peak of ${run.label}` });
    this.tree.addEventListener("keydown", (event) => this.key(event));
    this.tree.addEventListener("pointerleave", () => this.describe(this.top));
    this.panel = make("div", { class: "panel", "aria-live": "polite" });
    const switched = (event) => this.show(event.target.checked);
    this.box = make("input", { type: "checkbox", checked: true, onchange: switched });
    this.element = make("div", {}, make("div", { class: "controls" },
      make("label", {}, this.box, " layers that are alike as one, *")),
    make("nav", { class: "crumbs", "aria-label": "Where in the breakdown" }, this.crumbs), this.tree, this.panel);
    this.rows = unpack(run.at_peak);
    this.show(true);
    new ResizeObserver(() => this.resized()).observe(this.tree);
  }

  show(folded) {
    this.root = treeOf(folded ? fold(this.rows) : this.rows, this.colors);
    this.zoom(this.root);
  }

  resized() {
    if (this.tree.clientWidth !== this.widthPx) this.render();
  }

  zoom(node, focus = false) {
    this.top = node;
    this.crumbs.replaceChildren(...pathOf(node).map((each) => make("li", {}, each === node
      ? make("span", { "aria-current": "location", text: each.name })
      : make("button", { type: "button", text: each.name, onclick: () => this.zoom(each, true) }))));
    this.render();
    this.describe(node);
    if (focus) this.cells.get(node).focus();
  }

  render() {
    const focused = [...this.cells].find(([, cell]) => cell === document.activeElement);
    this.widthPx = this.tree.clientWidth;
    this.cells = new Map();
    this.depth = 0;
    this.tree.replaceChildren();
    this.place(this.top, 0, 1, 0);
    this.tree.style.height = `${(this.depth + 1) * CELL_PX}px`;
    const current = (focused && this.cells.get(focused[0])) || this.cells.get(this.top);
    current.tabIndex = 0;
    if (focused) current.focus();
  }

  /** Draws `node` from `left` on (both as shares of the width), and its children below. */
  place(node, left, width, level) {
    this.depth = Math.max(this.depth, level);
    this.tree.append(this.cell(node, left, width, level));
    const children = [...node.children.values()].sort((a, b) => b.bytes - a.bytes);
    const wide = children.filter((each) => (each.bytes / this.top.bytes) * this.widthPx >= NARROWEST_PX);
    let from = left;
    for (const each of wide) {
      const part = each.bytes / this.top.bytes;
      this.place(each, from, part, level + 1);
      from += part;
    }
    this.rest(children.slice(wide.length), from, level + 1);
  }

  cell(node, left, width, level) {
    const cell = make("button", {
      type: "button", class: "cell", role: "treeitem", tabindex: -1, "aria-level": level + 1,
      "aria-expanded": node.children.size ? "true" : null, text: node.name,
      "aria-label": `${node.name}, ${size(node.bytes)}, ${share(node.bytes, this.root.bytes)}`,
      onclick: () => this.enter(node), onpointerenter: () => this.describe(node), onfocus: () => this.focused(node),
    });
    this.put(cell, left, width, level);
    cell.style.backgroundColor = node.color;
    cell.style.color = inkOn(node.color);
    this.cells.set(node, cell);
    return cell;
  }

  /** Merges children that are too narrow to see or click. */
  rest(nodes, left, level) {
    const bytes = nodes.reduce((sum, node) => sum + node.bytes, 0);
    if ((bytes / this.top.bytes) * this.widthPx < 1) return;
    this.depth = Math.max(this.depth, level);
    const text = `${plural(nodes.length, "smaller part")}, ${size(bytes)}`;
    const cell = make("span", { class: "rest", role: "presentation", title: text });
    this.put(cell, left, bytes / this.top.bytes, level);
    this.tree.append(cell);
  }

  put(cell, left, width, level) {
    cell.style.left = `${100 * left}%`;
    cell.style.width = `${100 * width}%`;
    cell.style.top = `${level * CELL_PX}px`;
  }

  /** Zooms into a node, or out of the topmost one; a kind of tensor has no children. */
  enter(node) {
    if (node === this.top) this.zoom(node.parent || node, true);
    else if (node.children.size) this.zoom(node, true);
    else this.describe(node);
  }

  focused(node) {
    for (const cell of this.cells.values()) cell.tabIndex = -1;
    this.cells.get(node).tabIndex = 0;
    this.describe(node);
  }

  key(event) {
    const node = [...this.cells].find(([, cell]) => cell === event.target)?.[0];
    if (!node) return;
    const shown = (each) => each && this.cells.get(each);
    const siblings = node === this.top ? [node] : this.inOrder(node.parent).filter(shown);
    const at = siblings.indexOf(node);
    const next = {
      ArrowLeft: siblings[at - 1], ArrowRight: siblings[at + 1], ArrowUp: node === this.top ? null : node.parent,
      ArrowDown: this.inOrder(node).find(shown), Home: siblings[0], End: siblings.at(-1),
    };
    if (event.key === "Escape" || event.key === "Backspace") this.zoom(this.top.parent || this.top, true);
    else if (!(event.key in next)) return;
    else if (shown(next[event.key])) this.cells.get(next[event.key]).focus();
    event.preventDefault();
  }

  inOrder(node) {
    return [...node.children.values()].sort((a, b) => b.bytes - a.bytes);
  }

  describe(node) {
    const facts = [["bytes", `${exact(node.bytes)} = ${size(node.bytes)}`], ["share", share(node.bytes, this.root.bytes)]];
    const { row } = node;
    if (row) facts.push(["category", words(row.category)]);
    facts.push(["tensors", exact(node.count)]);
    if (row) facts.push(...FIELDS.map(([, label, read]) => [label, read(row)]).filter(([, text]) => text));
    else facts.push(["kinds", exact(node.kinds)]);
    this.panel.replaceChildren(make("p", { text: pathOf(node).map((each) => each.name).join(" \u203a ") }),
      make("dl", {}, ...facts.map(([label, text]) => make("div", {}, make("dt", { text: label }), make("dd", { text })))));
  }
}
