"use strict";
// Elements, figures and colours. Text from a model only ever enters as text.

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const badge = (kind) => el("span", { class: `badge ${kind}` }, kind);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const isNarrow = () => window.innerWidth < 640;

/** The two ends of a long text; the twin of text.shorten. */
function short(text, most) {
  const signs = Array.from(text);
  const before = Math.max(Math.floor((most - 1) / 4), 1);
  return signs.length <= most ? text : `${signs.slice(0, before).join("")}…${signs.slice(before + 1 - most).join("")}`;
}

/** Text for a chart, whose library reads a little HTML: shown literally, and kept apart from text of other direction. */
function chartText(text, most = 44) {
  const safe = short(text.replace(/[\u0000-\u001f\u007f]/g, " "), most)
    .replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  return `\u2068${safe}\u2069`;
}

const sections = [];

/** A section with its heading, listed in the navigation. */
function section(id, title, lead, ...children) {
  const node = el("section", { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), lead ? el("p", { class: "lead" }, lead) : null, children);
  sections.push({ id, title, node });
  return node;
}

const hint = (sentence, command) => el("p", { class: "hint" }, sentence, command ? " " : null, command ? el("code", {}, command) : null);

/** A box that scrolls, and shows it: where columns or rows are out of sight, that edge fades, and a button leads on. */
function scrollBox(label, content, kind = "") {
  const box = el("div", { class: `scroll ${kind}`, tabindex: "0", role: "region", "aria-label": label }, content);
  const cue = el("button", { type: "button", class: "cue", title: "More columns", "aria-label": `More columns of ${label}`,
    onclick: () => box.scrollBy({ left: 0.8 * box.clientWidth, behavior: "smooth" }) }, "›");
  const frame = el("div", { class: "frame" }, box, cue);
  const look = () => {
    frame.classList.toggle("cut-right", box.scrollWidth - box.clientWidth - box.scrollLeft > 1);
    frame.classList.toggle("cut-below", box.scrollHeight - box.clientHeight - box.scrollTop > 1);
  };
  box.addEventListener("scroll", look, { passive: true });
  const watcher = new ResizeObserver(look);
  watcher.observe(box);
  watcher.observe(content);
  return frame;
}

function choice(label, options, value, onchange) {
  const select = el("select", { "aria-label": label, onchange: () => onchange(select.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", {}, label, select);
}

const charts = [];

/**
 * A chart with its words: a title, a caption, and its data as a table.
 * `draw` returns {data, layout, caption, rows: {headers, kinds, rows}}; it is called when the chart comes into view.
 */
function figure({ id, title, provenance, isDisturbed, controls, isFixed, draw }) {
  const node = el("div", { class: "chart", id, role: "img", "aria-label": title });
  const caption = el("figcaption", {});
  const holder = el("div", {});
  const details = el("details", { class: "data", ontoggle: () => details.open && fill() }, el("summary", {}, "Data as a table"), holder);
  let last = null;
  const fill = () => holder.replaceChildren(scrollBox(title, simpleTable(last.rows), "short"));
  const chart = {
    node,
    isDrawn: false,
    describe() {
      last = draw();
      caption.textContent = last.caption;
      node.setAttribute("aria-label", `${title}. ${last.caption}`);
      node.style.minHeight = `${last.layout.height ?? 360}px`;
      if (details.open) fill();
    },
    draw() {
      this.describe();
      this.isDrawn = true;
      return Plotly.react(node, last.data, themed(last.layout), {
        responsive: true, displaylogo: false, displayModeBar: isFixed || isNarrow() ? false : "hover",
        // A list of our own: the library's has a button that sends the chart to its maker.
        modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
      });
    },
    update() {
      if (this.isDrawn) this.draw();
      else this.describe();
    },
  };
  charts.push(chart);
  const box = el("figure", {},
    el("div", { class: "head" }, el("h3", {}, title), provenance ? badge(provenance) : null, isDisturbed ? badge("disturbed") : null,
      controls ? el("div", { class: "controls" }, controls(chart)) : null),
    node, caption, details);
  chart.describe();
  return box;
}

/** An axis over a wide span: logarithmic, with ticks at 1, 2 and 5 where there is room for them. */
function wideAxis(values, text = plain) {
  const known = values.filter((value) => value > 0);
  const [low, high] = [Math.min(...known) / 1.25, Math.max(...known) * 1.25];
  const decades = Math.log10(high / low);
  const steps = decades > (isNarrow() ? 1.6 : 3) ? [1] : isNarrow() && decades > 1 ? [1, 3] : decades < 0.6 ? (isNarrow() ? [1, 2, 3, 5] : [1, 1.5, 2, 3, 4, 5, 7]) : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) ticks.push(...steps.map((step) => step * 10 ** power));
  return { type: "log", range: [Math.log10(low), Math.log10(high)], tickvals: ticks, ticktext: ticks.map(text) };
}

function themed(layout) {
  const axis = {
    gridcolor: color("line"), linecolor: color("line"), zerolinecolor: color("line"), tickcolor: color("line"),
    automargin: true, title: { standoff: 10 },
  };
  const merged = { ...layout };
  for (const name of ["xaxis", "yaxis"]) {
    const own = layout[name] ?? {};
    merged[name] = { ...axis, ...own, title: { ...axis.title, ...(own.title ?? {}) } };
  }
  return {
    autosize: true, height: 360, margin: { l: 60, r: isNarrow() ? 20 : 34, t: 12, b: 48 }, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: color("sans"), size: 12.5, color: color("soft") },
    hoverlabel: { align: "left", bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12.5 } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemsizing: "constant" },
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: color("grey"), activecolor: color("accent") },
    dragmode: isNarrow() ? false : "zoom",
    ...merged,
  };
}

function simpleTable({ headers, kinds, rows, style }) {
  return el("table", { class: style },
    el("thead", {}, el("tr", {}, headers.map((header, place) =>
      el("th", { scope: "col", class: `plain${kinds[place] === "text" ? "" : " number"}` }, header)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, place) =>
      kinds[place] === "text"
        ? el("td", { class: "text", title: value ?? "", "data-label": headers[place] }, el("bdi", {}, value ?? DASH))
        : el("td", { class: "number", title: value ?? "" }, shown(value, kinds[place])))))));
}
