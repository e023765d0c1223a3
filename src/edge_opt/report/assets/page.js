"use strict";
// The page, put together from its data: parts without data are left out, or say what would fill them.

const data = JSON.parse(document.getElementById("data").textContent);

function hero() {
  const profile = data.profile;
  const kind = data.sweep
    ? `sweep of ${data.sweep.rows.length} candidates`
    : profile ? [`${profile.mode} mode`, profile.convention === "edge_opt" ? null : `counted as ${profile.convention} does`,
      profile.coverage < 1 ? `${percent(profile.coverage)} of operators have a cost rule` : "all operators counted"].filter(Boolean).join(" · ")
    : "run";
  return el("header", { class: "hero" }, el("h1", {}, el("bdi", {}, data.title)), el("p", { class: "kind" }, kind));
}

/** Text whose parts between backticks are code. */
const worded = (text) => text.split("`").map((part, place) => (place % 2 ? el("code", {}, part) : part));

const verdict = () => el("div", { class: "verdict", id: "verdict" }, data.verdict.map((text) => el("p", {}, worded(text.replace(/(\d) %/g, "$1\u00a0%")))));

function cardNode(card) {
  const [, number, unit] = shown(card.value, card.format).match(/^(\S+?)\s*([^\d.\s].*)?$/) ?? [null, shown(card.value, card.format), ""];
  return el("li", { class: "card" },
    el("div", { class: "label" }, card.label),
    el("div", { class: "head" },
      el("div", { class: "figure", title: String(card.value) }, card.is_lower_bound ? "≥ " : null, number, unit ? el("small", {}, unit) : null),
      el("span", {}, badge(card.provenance), card.is_disturbed ? [" ", badge("disturbed")] : null)),
    card.low === null ? null : el("div", { class: "between" }, card.provenance === "predicted" ? "90 % interval " : "95 % CI ", between(card.low, card.high, card.format)),
    card.note ? el("div", { class: "note", title: card.note }, card.note) : null);
}

function cardGroups(isShown) {
  const cards = data.cards.filter(isShown);
  const groups = [...new Set(cards.map((card) => card.group))];
  return el("div", { class: "groups" }, groups.map((group) =>
    el("div", {}, groups.length > 1 ? el("h3", { class: "group" }, group) : null, el("ul", { class: "cards" }, cards.filter((card) => card.group === group).map(cardNode)))));
}

function advice() {
  const items = data.advice.map(([title, text]) => el("li", {}, el("b", {}, title), el("span", {}, text)));
  return items.length ? el("ul", { class: "advice" }, items) : null;
}

const isDecisive = (card) => !data.sweep || card.group === "Winner";

/** The answer and the figures it rests on; on the page of a sweep the model comes after the candidates. */
const summary = () => section("summary", "Summary", null, verdict(), cardGroups(isDecisive), data.sweep ? null : advice());

const modelSection = () => section("model", "Model", data.model, cardGroups((card) => !isDecisive(card)), advice());

function profileSections(profile) {
  const bars = profile.bars.filter((item) => item.values.length);
  const hasTime = bars.some((item) => item.unit === "time");
  const found = [layerTables(profile), section("costs", "Cost by layer", "In order of execution; of many layers the largest first.",
    el("div", { class: bars.length === 3 || bars.length > 4 ? "grid thirds" : "grid" }, bars.map(barFigure)),
    hasTime ? null : hint("Time per layer was not measured. To measure it on this machine:", "edge-opt profile MODEL --measure -o page.html"))];
  if (profile.roofline) found.push(section("roofline", "Roofline", "Left of the knee a layer is limited by memory bandwidth, right of it by arithmetic. Times are lower bounds from the device's data sheet, not predictions.", rooflineFigure(profile.roofline)));
  if (profile.timeline) found.push(section("memory", "Memory", "Activations in memory during one forward pass.", memoryFigure(profile.timeline)));
  if (profile.agreements.length) found.push(section("agreement", "Predicted vs measured", "The prediction for the target and the measurement on this machine, layer by layer.", profile.agreements.map(agreementFigure)));
  return found;
}

function othersSection(others) {
  const rows = others.map((item) => [item.name, item.totals.params, item.totals.macs, item.totals.bytes_read + item.totals.bytes_written, item.peak.live_bytes, item.latency_s]);
  return section("profiles", "Profiles side by side", null, el("div", { class: "panel" }, scrollBox("Profiles side by side",
    simpleTable({ headers: ["Model", "Params", "MACs", "Memory traffic", "Peak activations", "Latency (measured)"], kinds: ["text", "count", "count", "bytes", "bytes", "time"], rows }))));
}

function explanationSection({ target, headline, notes, rows }) {
  return section("why", `Why not faster on ${target}?`, headline,
    el("ul", { class: "advice" }, notes.map(([title, text]) => el("li", {}, el("b", {}, title), el("span", {}, text)))),
    el("div", { class: "panel" }, scrollBox("Layers on the target",
      simpleTable({ headers: ["Layer", "Before (predicted)", "After (predicted)", "Precision", "Limited by"], kinds: ["text", "time", "time", "text", "text"], rows }))));
}

const FACTS = { cpu: "Processor", cores: "Cores", threads: "Threads", governor: "Governor", memory_bytes: "Memory", system: "System", python: "Python", torch: "PyTorch", device: "Device", load_1min: "Load before" };

function facts(object, names) {
  const entries = Object.entries(object).filter(([, value], place, all) => value !== null && value !== "" && !isGroup(value)
    // Some records hold the same under an older name, too.
    && !(String(value).length > 12 && all.slice(0, place).some(([, earlier]) => earlier === value)));
  return el("dl", { class: "facts" }, entries.map(([name, value]) =>
    el("div", { class: name === "command" ? "command" : null }, el("dt", {}, names?.[name] ?? name.replaceAll("_", " ")), el("dd", {}, el("bdi", {}, name.endsWith("_bytes") ? size(value) : Array.isArray(value) ? (name === "command" ? value.map(shellWord) : value).join(" ") : String(value))))));
}

/** A word as a shell takes it. */
const shellWord = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

const isGroup = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const json = (title, value) => el("details", {}, el("summary", {}, title), el("pre", {}, JSON.stringify(value, null, 2)));

/** What it takes to run it again: single values at once, each group of them behind its name. */
function again(record) {
  const groups = Object.entries(record).filter(([name, value]) => isGroup(value) && name !== "machine");
  return el("div", { class: "panel", id: "reproducibility" }, el("h3", {}, "Reproducibility"), facts(record),
    groups.map(([name, value]) => json(name, value)));
}

/** The machine comes from the measurement, or from the run; the page's own writer is always known. */
function environmentSection() {
  const { environment, reproducibility, summary: outcome } = data;
  const machine = environment ?? reproducibility?.machine;
  return section("environment", "Environment", null,
    isGroup(machine) ? el("div", { class: "panel", id: "machine" }, el("h3", {}, "Measured on"), facts(machine, FACTS)) : null,
    !machine && data.sweep ? hint("The machine is not recorded in this file; reproducibility.json in the folder of the run names it.") : null,
    el("div", { class: "panel", id: "written" }, el("h3", {}, "This page was written with"), facts(data.written)),
    reproducibility ? again(reproducibility) : null,
    outcome ? el("div", { class: "panel" }, json("summary.json", outcome)) : null);
}

function assemble() {
  const main = document.getElementById("main");
  main.append(hero(), summary());
  if (data.sweep) main.append(...sweepSections(data.sweep));
  if (data.explanation) main.append(explanationSection(data.explanation));
  if (data.sensitivity) main.append(section("sensitivity", "Sensitivity", "Drop in quality when only one layer is changed.", sensitivityFigure(data.sensitivity)));
  if (data.profile && data.sweep) main.append(modelSection());
  if (data.profile) main.append(...profileSections(data.profile));
  if (data.others.length) main.append(othersSection(data.others));
  main.append(environmentSection());
}

/** The navigation and the footer, when every section is there. */
function nameSections() {
  const titles = { costs: "Costs", agreement: "Prediction", environment: "Environment", why: "Why", profiles: "Profiles" };
  document.getElementById("nav").append(...sections.map(({ id, title }) => el("a", { href: `#${id}` }, titles[id] ?? title)));
  document.getElementById("footer").append(`Made by edge-opt ${data.edge_opt}. Counted: exact, from shapes. Estimated: from shapes. Measured: on the machine named above. Proxy: configured power times latency, without a meter. Predicted: from a calibration or a device's data.`);
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;

function applyTheme() {
  const theme = chosenTheme ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = theme === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  for (const chart of charts) if (chart.isDrawn) chart.draw();
}

/** Draw every chart, from top to bottom, also those out of sight: a screenshot of the whole page shows them all. */
async function drawCharts() {
  for (const chart of charts) {
    if (!chart.isDrawn) await chart.draw();
    // The page answers clicks between two charts.
    await new Promise((next) => setTimeout(next));
  }
}

// The alphabet of Python's base64.b85encode, with "," for "<", which must not stand in a page.
const BASE_85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";

/** Bytes from base 85: five characters for four bytes. */
function fromBase85(text) {
  const digits = new Uint8Array(128);
  [...BASE_85].forEach((character, digit) => { digits[character.charCodeAt(0)] = digit; });
  const words = new DataView(new ArrayBuffer(text.length / 5 * 4));
  for (let from = 0, to = 0; from < text.length; from += 5, to += 4) {
    let word = 0;
    for (let place = from; place < from + 5; place++) word = word * 85 + digits[text.charCodeAt(place)];
    words.setUint32(to, word);
  }
  return words.buffer;
}

/** Unpack the chart library and run it; the policy of the page allows exactly its text. */
async function loadPlotly() {
  const packed = document.getElementById("plotly");
  const bytes = fromBase85(packed.textContent).slice(0, Number(packed.dataset.bytes));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  document.head.append(el("script", {}, text));
  packed.remove();
}

const PAPER = 660;

/** On paper every chart is there, in light colours and as wide as a sheet. */
function layOutForPaper(isPrinting) {
  if (isPrinting) {
    layOutForPaper.theme = chosenTheme;
    chosenTheme = "light";
    for (const chart of charts) if (!chart.isDrawn) chart.draw();
    applyTheme();
    for (const chart of charts) Plotly.relayout(chart.node, { width: PAPER, autosize: false });
  } else {
    chosenTheme = layOutForPaper.theme;
    applyTheme();
    for (const chart of charts) Plotly.Plots.resize(chart.node);
  }
}

if (data.runs) assembleRuns();
else assemble();
nameSections();
applyTheme();
dark.addEventListener("change", applyTheme);
document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
const plotlyReady = loadPlotly();
const chartsReady = plotlyReady.then(drawCharts);
plotlyReady.then(() => {
  window.addEventListener("beforeprint", () => layOutForPaper(true));
  window.addEventListener("afterprint", () => layOutForPaper(false));
});
performance.mark("interactive");
