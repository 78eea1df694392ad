const MOST_ROWS = 50;

/**
 * A table that can be sorted by each column, and filtered.
 *
 * columns: {label, kind, read, show}. `read(row)` returns a number or a text, which is sorted and searched; `show(row)`
 * returns the cell's children, by default that text. Numbers, of kind "number", stand right and sort highest first.
 * rows: objects. folded: the same rows with similar layers merged, or null. most: the rows to show until all are asked
 * for.
 */
class SortedTable {
  constructor({ name, caption, columns, rows, folded = null, bytes = null, marked = null, filtered = true, most = MOST_ROWS }) {
    Object.assign(this, { bytes, marked, folded, unfolded: rows, limit: most, text: "", category: "" });
    this.columns = columns.filter((column) => rows.some((row) => column.read(row) !== ""));
    this.rows = folded || rows;
    this.order = null;
    this.status = make("p", { class: "status", role: "status" });
    this.body = make("tbody", { role: "rowgroup" });
    this.more = make("button", { type: "button", class: "more", onclick: () => this.showAll() });
    this.heads = this.columns.map((column) => this.head(column));
    const title = make("h3", { id: `${name}-caption`, text: caption });
    const table = make("table", { class: "rows", role: "table", id: `${name}-table`, "aria-labelledby": title.id },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...this.heads)), this.body);
    const region = { class: "scroll", role: "region", tabindex: 0, "aria-label": `${caption}, scrolls sideways` };
    this.element = make("div", { class: filtered ? "table" : "table unfiltered" }, title, filtered ? this.controls(name) : null, make("div", region, table), this.more);
    this.render();
  }

  controls(name) {
    const parts = [make("label", { for: `${name}-filter`, text: "Filter" }), make("input", {
      type: "search", id: `${name}-filter`, placeholder: "words that a row must have", autocomplete: "off",
      oninput: (event) => this.changeFilter({ text: event.target.value.toLowerCase() }),
    })];
    const names = [...new Set(this.unfolded.map((row) => row.category).filter(Boolean))];
    if (names.length > 1) {
      const options = [["", "all"], ...names.map((category) => [category, words(category)])];
      parts.push(make("label", { for: `${name}-category`, text: "Category" }), make("select", {
        id: `${name}-category`, onchange: (event) => this.changeFilter({ category: event.target.value }),
      }, ...options.map(([value, text]) => make("option", { value, text }))));
    }
    if (this.folded) {
      const switched = (event) => this.changeFilter({ rows: event.target.checked ? this.folded : this.unfolded });
      parts.push(make("label", {}, make("input", { type: "checkbox", checked: true, onchange: switched }),
        " layers that are alike as one, *"));
    }
    return make("div", { class: "controls" }, ...parts, this.status);
  }

  head(column) {
    return make("th", { scope: "col", role: "columnheader", class: column.kind || "" }, make("button", {
      type: "button", onclick: () => this.sort(column),
    }, ...breakable(column.label)));
  }

  changeFilter(changes) {
    Object.assign(this, changes);
    this.render();
  }

  showAll() {
    this.limit = Infinity;
    this.render();
    this.body.parentElement.parentElement.focus();
  }

  sort(column) {
    const first = column.kind === "number" ? -1 : 1;
    this.order = { column, sign: this.order?.column === column ? -this.order.sign : first };
    this.render();
  }

  chosenRows() {
    const wanted = this.text.split(/\s+/).filter(Boolean);
    const rows = this.rows.filter((row) => (!this.category || row.category === this.category)
      && wanted.every((word) => this.textOf(row).includes(word)));
    if (!this.order) return rows;
    const { column, sign } = this.order;
    return rows.sort((a, b) => sign * compare(column.read(a), column.read(b)));
  }

  textOf(row) {
    return this.columns.map((column) => String(column.read(row))).join("\n").toLowerCase();
  }

  render() {
    const rows = this.chosenRows();
    this.heads.forEach((head, at) => {
      const sign = this.order?.column === this.columns[at] ? this.order.sign : 0;
      if (sign) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    this.body.replaceChildren(...rows.slice(0, this.limit).map((row) => this.line(row)));
    this.more.hidden = rows.length <= this.limit;
    this.more.textContent = `Show all ${exact(rows.length)} rows`;
    const sum = (of) => of.reduce((bytes, row) => bytes + this.bytes(row), 0);
    const sums = this.bytes ? `, ${size(sum(rows))} of ${size(sum(this.rows))}` : "";
    this.status.textContent = `${exact(rows.length)} of ${plural(this.rows.length, "row")}${sums}`;
  }

  line(row) {
    const cells = this.columns.map((column) => make("td", {
      role: "cell", class: column.kind || "", "data-label": column.label,
      "data-empty": column.read(row) === "",
    }, ...(column.show ? column.show(row) : breakable(String(column.read(row))))));
    return make("tr", { role: "row", class: this.marked?.(row) ? "marked" : null }, ...cells);
  }
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");
}

function bytesColumn(label, read) {
  return { label, kind: "number", read, show: (row) => [sized(read(row))] };
}
