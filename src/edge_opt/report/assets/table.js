"use strict";
// A table that can be sorted, searched, filtered, folded and copied. Values are exact; only cells are rounded.

// On a phone a row is a card, and the page itself scrolls.
const ROWS_AT_ONCE = isNarrow() ? 20 : 500;
const RISKY_CELL = /^[=+\-@\t\r\n]/;

/** One CSV cell; text that a spreadsheet would run is quoted first. */
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return value === true ? "True" : value === false ? "False" : String(value);
  const text = RISKY_CELL.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

class DataTable {
  /**
   * columns: [{name, header, kind}]; values: one list per column; visible: names shown at first;
   * onPhone: names shown at first on a narrow screen, where each row is a card; label: the column that names a row;
   * filter: a text column to choose from; depths: for a tree, each row's depth.
   */
  constructor({ id, caption, columns, values, visible, onPhone, label, filter, depths, cells }) {
    Object.assign(this, { id, caption, columns, values, label, filter, depths, cells: cells ?? {} });
    this.rows = values[0]?.length ?? 0;
    this.visible = new Set((isNarrow() && onPhone ? onPhone : visible).filter((name) => columns.some((column) => column.name === name)));
    this.place = new Map(columns.map((column, place) => [column.name, place]));
    this.sort = null;
    this.query = "";
    this.only = "";
    this.limit = ROWS_AT_ONCE;
    this.folded = new Set();
    if (depths) this.growTree();
    this.build();
  }

  value(row, name) { return this.values[this.place.get(name)][row]; }

  growTree() {
    const above = [];
    this.children = this.depths.map(() => []);
    this.parents = this.depths.map((depth, row) => {
      above.length = depth;
      const parent = depth ? above[depth - 1] : -1;
      above[depth] = row;
      if (parent >= 0) this.children[parent].push(row);
      return parent;
    });
    // Open as deep as fits on a screen or two.
    const deepest = Math.max(0, ...this.depths);
    let open = deepest;
    while (open > 1 && this.depths.filter((depth) => depth <= open).length > 60) open -= 1;
    this.depths.forEach((depth, row) => { if (depth >= open && this.children[row].length) this.folded.add(row); });
  }

  build() {
    const search = el("input", { type: "search", placeholder: "Search", "aria-label": `Search ${this.caption}`,
      oninput: () => { this.query = search.value.toLowerCase(); this.limit = ROWS_AT_ONCE; this.render(); } });
    const named = this.columns[this.place.get(this.filter)];
    const kinds = this.filter ? [...new Set(this.values[this.place.get(this.filter)])].filter(Boolean).sort() : [];
    const filter = kinds.length > 1
      ? el("select", { "aria-label": `Filter by ${named.header}`, onchange: () => { this.only = filter.value; this.render(); } },
        el("option", { value: "" }, `Any ${named.header.toLowerCase()}`), kinds.map((kind) => el("option", { value: kind }, short(kind, 40))))
      : null;
    const copy = el("button", { type: "button", class: "copy", onclick: () => this.copy(copy) }, "Copy as CSV");
    const folds = this.depths && this.children.filter((list) => list.length).length > 1
      ? [el("button", { type: "button", class: "unfold", onclick: () => { this.folded.clear(); this.render(); } }, "Expand all"),
        el("button", { type: "button", class: "foldall", onclick: () => {
          this.children.forEach((list, row) => { if (list.length && this.depths[row] > 0) this.folded.add(row); });
          this.render();
        } }, "Collapse all")]
      : [];
    this.status = el("span", { class: "status", role: "status" });
    this.head = el("tr");
    this.body = el("tbody");
    this.more = el("button", { type: "button", class: "more", onclick: () => { this.limit += ROWS_AT_ONCE; this.render(); } });
    this.sorter = el("select", { class: "sorter", "aria-label": `Sort ${this.caption}`, onchange: () => {
      const column = this.columns[this.place.get(this.sorter.value)];
      this.sort = column ? { name: column.name, isDescending: !isText(column) } : null;
      this.renderHead();
      this.render();
    } });
    this.node = el("div", { class: "panel stack", id: this.id },
      el("div", { class: "toolbar" }, search, filter, this.sorter, folds, this.picker(), copy, this.status),
      scrollBox(this.caption, el("table", {}, el("caption", { class: "hidden-text" }, this.caption), el("thead", {}, this.head), this.body)),
      this.more);
    this.renderHead();
    this.render();
  }

  picker() {
    const boxes = this.columns.filter((column) => column.name !== this.label).map((column) => {
      const box = el("input", { type: "checkbox", name: column.name, checked: this.visible.has(column.name), onchange: () => {
        if (box.checked) this.visible.add(column.name); else this.visible.delete(column.name);
        this.renderHead();
        this.render();
      } });
      return el("label", {}, box, column.header);
    });
    const node = el("details", { class: "picker" }, el("summary", {}, "Columns"), el("div", { class: "menu" }, boxes));
    document.addEventListener("click", (event) => { if (!node.contains(event.target)) node.open = false; });
    node.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { node.open = false; node.firstChild.focus(); }
    });
    return node;
  }

  shownColumns() {
    return this.columns.filter((column) => column.name === this.label || this.visible.has(column.name));
  }

  renderHead() {
    this.head.replaceChildren(...this.shownColumns().map((column) => {
      const isSorted = this.sort?.name === column.name;
      return el("th", { scope: "col", "data-column": column.name, class: isText(column) ? "" : "number",
        "aria-sort": isSorted ? (this.sort.isDescending ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => this.sortBy(column) }, column.header));
    }));
    this.sorter.replaceChildren(el("option", { value: "" }, "In order"), ...this.shownColumns().map((column) =>
      el("option", { value: column.name, selected: this.sort?.name === column.name }, `By ${column.header}`)));
  }

  /** Numbers largest first, text from A; a third press restores the order of execution. */
  sortBy(column) {
    const first = !isText(column);
    if (this.sort?.name !== column.name) this.sort = { name: column.name, isDescending: first };
    else if (this.sort.isDescending === first) this.sort = { name: column.name, isDescending: !first };
    else this.sort = null;
    const [x, y] = [this.body.closest(".scroll")?.scrollLeft ?? 0, document.activeElement?.closest("th")?.dataset.column];
    this.renderHead();
    this.render();
    this.body.closest(".scroll").scrollLeft = x;
    if (y) this.head.querySelector(`[data-column="${CSS.escape(y)}"] button`)?.focus();
  }

  sorted(rows) {
    if (!this.sort) return rows;
    const values = this.values[this.place.get(this.sort.name)];
    const way = this.sort.isDescending ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [left, right] = [values[a], values[b]];
      if (left === null || right === null) return (left === null) - (right === null);
      const order = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
      return way * order || a - b;
    });
  }

  matches() {
    const texts = this.columns.map((column, place) => (isText(column) ? this.values[place] : null)).filter(Boolean);
    const found = [];
    for (let row = 0; row < this.rows; row += 1) {
      if (this.only && this.value(row, this.filter) !== this.only) continue;
      if (this.query && !texts.some((values) => String(values[row] ?? "").toLowerCase().includes(this.query))) continue;
      found.push(row);
    }
    return found;
  }

  /** The rows to show, in order. A search in a tree shows what is found with everything above it. */
  order() {
    const found = this.matches();
    if (!this.depths) return this.sorted(found);
    const isSearch = Boolean(this.query || this.only);
    const kept = new Set(found);
    if (isSearch) for (const row of found) for (let up = this.parents[row]; up >= 0 && !kept.has(up); up = this.parents[up]) kept.add(up);
    const out = [];
    const visit = (row) => {
      if (!kept.has(row)) return;
      out.push(row);
      if (isSearch || !this.folded.has(row)) this.sorted(this.children[row]).forEach(visit);
    };
    this.sorted(this.parents.flatMap((parent, row) => (parent < 0 ? [row] : []))).forEach(visit);
    return out;
  }

  render() {
    const order = this.order();
    const columns = this.shownColumns();
    const part = document.createDocumentFragment();
    for (const row of order.slice(0, this.limit)) part.append(this.line(row, columns));
    this.body.replaceChildren(part);
    const hidden = Math.max(0, order.length - this.limit);
    this.more.hidden = !hidden;
    this.more.textContent = `Show more (${hidden} hidden)`;
    this.status.textContent = order.length === this.rows ? `${this.rows} rows` : `${order.length} of ${this.rows} rows`;
  }

  line(row, columns) {
    const line = this.cellsOf(row, columns);
    // On a phone, where there are no headings, each cell says what it is.
    columns.forEach((column, place) => line.cells[place].setAttribute("data-label", column.header));
    return line;
  }

  cellsOf(row, columns) {
    const isContainer = this.depths && this.children[row].length > 0;
    return el("tr", { class: isContainer ? "container" : null, "data-row": String(row) }, columns.map((column) => {
      const value = this.value(row, column.name);
      if (this.cells[column.name]) return this.cells[column.name](value, row);
      if (column.name === this.label) return this.name(row, value);
      if (isText(column)) {
        const kind = column.name.endsWith("shape") ? "text shape" : "text";
        const text = shown(value, column.kind);
        return el("td", { class: kind, title: value ?? "" }, el("bdi", {}, column.name.endsWith("shape") ? text.replaceAll("x", "×") : text));
      }
      const hasBar = column.name.endsWith("_share") && value > 0;
      const cell = el("td", { class: `number${hasBar ? " share" : ""}${value === 0 ? " zero" : ""}`, title: value ?? "not known" }, shown(value, column.kind));
      if (hasBar) cell.style.setProperty("--share", String(100 * value));
      return cell;
    }));
  }

  name(row, path) {
    if (!this.depths) return el("td", { class: "name", title: path }, el("bdi", {}, path || "(the model itself)"));
    const above = this.parents[row] >= 0 ? this.value(this.parents[row], this.label) : "";
    const own = (above && path.startsWith(`${above}.`) ? path.slice(above.length + 1) : path) || "(the model)";
    const isOpen = !this.folded.has(row) || Boolean(this.query || this.only);
    const fold = this.children[row].length
      ? el("button", { type: "button", class: "fold", "aria-expanded": String(isOpen), "aria-label": `${isOpen ? "Fold" : "Unfold"} ${own}`,
        onclick: () => this.toggle(row) }, isOpen ? "▾" : "▸")
      : el("span", { class: "fold none" });
    const cell = el("td", { class: "name", title: path }, fold, el("bdi", {}, own));
    cell.style.paddingLeft = `${0.3 + 1.1 * this.depths[row]}rem`;
    return cell;
  }

  toggle(row) {
    if (!this.folded.delete(row)) this.folded.add(row);
    this.render();
    this.body.querySelector(`[data-row="${row}"] .fold`)?.focus();
  }

  csv() {
    const columns = this.shownColumns();
    const lines = [columns.map((column) => csvCell(column.name))];
    for (const row of this.order()) lines.push(columns.map((column) => csvCell(this.value(row, column.name))));
    return `${lines.map((line) => line.join(",")).join("\n")}\n`;
  }

  async copy(button) {
    const text = this.csv();
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Pages opened from a file may not use the clipboard's own interface everywhere.
      const area = el("textarea", { class: "hidden-text" });
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    button.textContent = "Copied";
    button.classList.add("copied");
    setTimeout(() => { button.textContent = "Copy as CSV"; button.classList.remove("copied"); }, 1600);
  }
}

const isText = (column) => column.kind === "text" || column.kind === "flag";
