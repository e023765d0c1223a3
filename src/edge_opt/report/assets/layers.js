"use strict";
// The model's layers: a tree of modules, and a list of every call.

// Shown at first, in this order; what was measured or predicted must not lie behind the edge.
const FIRST_COLUMNS = ["type", "out_shape", "params", "macs", "macs_share", "measured_s", "predicted_s", "bytes_read", "bytes_written", "activation_bytes"];
const PHONE_COLUMNS = ["macs_share", "macs", "measured_s", "predicted_s"];

function layerTables(profile) {
  const { modules, leaves } = profile.tables;
  const column = (table, name) => table.values[table.columns.findIndex((item) => item.name === name)];
  const make = (id, caption, table, depths) => new DataTable({
    id, caption, depths, ...withoutColumns(table, ["depth", "is_leaf"]), label: "path", filter: "type", visible: FIRST_COLUMNS, onPhone: PHONE_COLUMNS,
  });
  const tree = make("tree", "Modules, each with everything below it", modules, column(modules, "depth"));
  const list = make("list", "Calls in order of execution, each with its own work", leaves, null);
  list.node.hidden = true;
  const pick = (chosen) => {
    for (const [button, table] of [[first, tree], [second, list]]) {
      button.setAttribute("aria-pressed", String(table === chosen));
      table.node.hidden = table !== chosen;
    }
  };
  const first = el("button", { type: "button", id: "as-tree", "aria-pressed": "true", onclick: () => pick(tree) }, "Tree of modules");
  const second = el("button", { type: "button", id: "as-list", "aria-pressed": "false", onclick: () => pick(list) }, "List of calls");
  const notes = [...profile.notes];
  if (profile.unpriced.length) {
    const names = profile.unpriced.map((item) => `${item.op} ×${item.count} in ${item.module || "the model"}`);
    notes.unshift(`Operators without a cost rule (totals are lower bounds): ${names.slice(0, 12).join("; ")}${names.length > 12 ? "; …" : ""}.`);
  }
  return section("layers", "Layers", "Click a heading to sort. Cells are rounded; copied values and tooltips are exact.",
    el("div", { class: "segments controls", role: "group", "aria-label": "View" }, first, second),
    el("div", {}, tree.node, list.node),
    notes.length ? el("ul", { class: "lead" }, notes.map((note) => el("li", {}, note))) : null);
}

/** The table without some columns: its name first, then the usual columns, then the others. */
function withoutColumns(table, names) {
  const place = (name) => table.columns.findIndex((column) => column.name === name);
  const kept = table.columns.map((column) => column.name).filter((name) => !names.includes(name));
  const first = ["path", ...FIRST_COLUMNS].filter((name) => kept.includes(name));
  const order = [...first, ...kept.filter((name) => !first.includes(name))];
  return { columns: order.map((name) => table.columns[place(name)]), values: order.map((name) => table.values[place(name)]) };
}
