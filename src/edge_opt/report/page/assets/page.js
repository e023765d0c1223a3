"use strict";
// The page, put together from its data: parts without data are left out, or say what would fill them.

const data = JSON.parse(document.getElementById("data").textContent);

function hero() {
  const profile = data.profile;
  const kind = profile
    ? [`${profile.mode} mode`, profile.convention === "edge_opt" ? null : `counted as ${profile.convention} does`,
      profile.coverage < 1 ? `${percent(profile.coverage)} of operators priced` : "every operator priced"].filter(Boolean).join(" · ")
    : data.sweep ? "sweep" : "run";
  return el("header", { class: "hero" }, el("h1", {}, el("bdi", {}, data.title)), el("p", { class: "kind" }, kind),
    el("div", { class: "verdict", id: "verdict" }, data.verdict.map((text) => el("p", {}, text))));
}

function summary() {
  const cards = data.cards.map((card) => {
    const [, number, unit] = shown(card.value, card.format).match(/^(\S+?)\s*([^\d.\s].*)?$/) ?? [null, shown(card.value, card.format), ""];
    return [card.group, el("li", { class: "card" },
      el("div", { class: "label" }, card.label),
      el("div", { class: "head" },
        el("div", { class: "figure", title: String(card.value) }, card.is_lower_bound ? "≥ " : null, number, unit ? el("small", {}, unit) : null),
        badge(card.provenance)),
      card.note ? el("div", { class: "note" }, card.note) : null)];
  });
  const groups = [...new Set(cards.map(([group]) => group))].map((group) =>
    el("div", {}, el("h3", { class: "group" }, group), el("ul", { class: "cards" }, cards.filter((card) => card[0] === group).map((card) => card[1]))));
  const advice = data.advice.map(([title, text]) => el("li", {}, el("b", {}, title), el("span", {}, text)));
  return section("summary", "Summary", null, groups,
    advice.length ? el("ul", { class: "advice" }, advice) : null);
}

function profileSections(profile) {
  const bars = profile.bars.filter((item) => item.values.length);
  const hasTime = bars.some((item) => item.unit === "time");
  const found = [layerTables(profile), section("costs", "Where it goes", "Layers by what they cost; of many layers the largest.",
    el("div", { class: "grid" }, bars.map(barFigure)),
    hasTime ? null : hint("Time per layer was not measured here; this does:", "edge-opt profile MODEL --measure -o profile.json"))];
  if (profile.roofline) found.push(section("roofline", "On a device", "What limits each layer: left of the knee memory, right of it arithmetic. Times are the best that the device's figures allow, not predictions.", rooflineFigure(profile.roofline)));
  if (profile.timeline) found.push(section("memory", "Memory", "What is alive while the model runs.", memoryFigure(profile.timeline)));
  if (profile.agreements.length) found.push(section("agreement", "Predicted against measured", "How well the prediction held.", profile.agreements.map(agreementFigure)));
  return found;
}

function othersSection(others) {
  const rows = others.map((item) => [item.name, item.totals.params, item.totals.macs, item.totals.bytes_read + item.totals.bytes_written, item.peak.live_bytes, item.latency_s]);
  return section("profiles", "Profiles side by side", null, el("div", { class: "panel" }, el("div", { class: "scroll" },
    simpleTable({ headers: ["Model", "Params", "MACs", "Traffic", "Peak activations", "Latency, measured"], kinds: ["text", "count", "count", "bytes", "bytes", "time"], rows }))));
}

const FACTS = { cpu: "Processor", cores: "Cores", threads: "Threads", governor: "Governor", memory_bytes: "Memory", system: "System", python: "Python", torch: "PyTorch", device: "Device", load_1min: "Load before" };

function facts(object, names) {
  const entries = Object.entries(object).filter(([, value]) => value !== null && typeof value !== "object");
  return el("dl", { class: "facts" }, entries.slice(0, 24).map(([name, value]) =>
    el("div", {}, el("dt", {}, names?.[name] ?? name.replaceAll("_", " ")), el("dd", {}, el("bdi", {}, name.endsWith("_bytes") ? size(value) : String(value))))));
}

/** The plain values of a record, those one level down under their joined names. */
function flat(object) {
  return Object.fromEntries(Object.entries(object).flatMap(([name, value]) =>
    value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).map(([inner, item]) => [`${name}: ${inner}`, item]) : [[name, Array.isArray(value) ? value.join(", ") : value]]));
}

const json = (title, value) => el("details", {}, el("summary", {}, title), el("pre", {}, JSON.stringify(value, null, 2)));

function environmentSection() {
  const { environment, reproducibility, summary: outcome } = data;
  if (!environment && !reproducibility && !outcome) return null;
  return section("environment", "Environment and reproducibility", null,
    environment ? el("div", { class: "panel" }, el("h3", {}, "Measured on"), facts(environment, FACTS)) : null,
    reproducibility ? el("div", { class: "panel", id: "reproducibility" }, el("h3", {}, "To run it again"), facts(flat(reproducibility)), json("reproducibility.json", reproducibility)) : null,
    outcome ? el("div", { class: "panel" }, json("summary.json", outcome)) : null);
}

function assemble() {
  const main = document.getElementById("main");
  main.append(hero(), summary());
  if (data.sweep) main.append(...sweepSections(data.sweep));
  if (data.sensitivity) main.append(section("sensitivity", "Sensitivity", "What the model loses when only one layer is changed.", sensitivityFigure(data.sensitivity)));
  if (data.profile) main.append(...profileSections(data.profile));
  if (data.others.length) main.append(othersSection(data.others));
  main.append(environmentSection() ?? "");
  const titles = { costs: "Costs", roofline: "Device", agreement: "Prediction", environment: "Environment", profiles: "Profiles" };
  document.getElementById("nav").append(...sections.map(({ id, title }) => el("a", { href: `#${id}` }, titles[id] ?? title)));
  document.getElementById("footer").append(`Made by edge-opt ${data.edge_opt}. Counted: exact, from shapes. Estimated: from shapes, under the stated assumptions. Measured: on the machine named above. Proxy: power times time, no meter. Predicted: from a calibration or a device's figures.`);
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

function watchCharts() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      charts.find((chart) => chart.node === entry.target).draw();
    }
  }, { rootMargin: "300px" });
  for (const chart of charts) watcher.observe(chart.node);
}

/** On paper every chart is there, in light colours and as wide as a sheet. */
function layOutForPaper(isPrinting) {
  if (isPrinting) {
    layOutForPaper.theme = chosenTheme;
    chosenTheme = "light";
    for (const chart of charts) if (!chart.isDrawn) chart.draw();
    applyTheme();
    for (const chart of charts) Plotly.relayout(chart.node, { width: 660, autosize: false });
  } else {
    chosenTheme = layOutForPaper.theme;
    applyTheme();
    for (const chart of charts) Plotly.Plots.resize(chart.node);
  }
}

assemble();
applyTheme();
dark.addEventListener("change", applyTheme);
document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme();
});
window.addEventListener("load", watchCharts);
window.addEventListener("beforeprint", () => layOutForPaper(true));
window.addEventListener("afterprint", () => layOutForPaper(false));
performance.mark("interactive");
