"use strict";
// The page over several runs: a line per run, their candidates in one chart, and what changed from run to run.

const RUN_COLUMNS = [
  ["name", "Run", "text"], ["written", "Written, UTC", "text"], ["model", "Model", "text"], ["best", "Winner", "text"], ["score", "Score", "share"], ["best_s", "Latency", "time"],
  ["speedup", "Speedup", "factor"], ["size_bytes", "Size", "bytes"], ["accepted", "Accepted", "number"], ["tried", "Candidates", "number"], ["failed", "Failed", "number"], ["macs", "MACs", "count"],
  ["params", "Parameters", "count"], ["peak_bytes", "Peak activations", "bytes"], ["latency_s", "Latency of the original", "time"], ["machine", "Machine", "text"],
];
const RUN_TONES = ["blue", "orange", "green", "violet", "red", "ink"];
const RUN_SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];

function runsTable(runs) {
  const metrics = [...new Set(runs.map((run) => run.metric).filter(Boolean))];
  const columns = RUN_COLUMNS.filter(([name]) => runs.some((run) => run[name] !== null && run[name] !== ""));
  const scored = metrics.length === 1 ? (metrics[0] === "accuracy" ? "Accuracy" : metrics[0]) : "Score";
  const interval = (run, value, low, high, kind) => el("td", { class: "number", title: run[value] ?? "not known" }, run[value] === null ? DASH
    : el("span", {}, shown(run[value], kind), run[low] === null ? null : el("small", { class: "below" }, between(run[low], run[high], kind))));
  // Of several metrics, each score says which it is.
  const named = (run, cell) => { if (metrics.length > 1 && run.metric) cell.firstElementChild?.prepend(`${run.metric} `); return cell; };
  const marked = (cell, isMarked) => { if (isMarked) cell.firstElementChild?.prepend(badge("disturbed"), " "); return cell; };
  return new DataTable({
    id: "runs-table", caption: "Runs", label: "name",
    columns: columns.map(([name, header, kind]) => ({ name, header: name === "score" ? scored : header, kind })), values: columns.map(([name]) => runs.map((run) => run[name])),
    visible: ["best", "score", "best_s", "speedup", "size_bytes", "macs", "latency_s", "written"],
    onPhone: ["best", "score", "best_s", "speedup", "size_bytes", "macs", "latency_s"],
    cells: {
      name: (name, row) => el("td", { class: "name", title: name }, runs[row].link ? el("a", { href: runs[row].link }, el("bdi", {}, name)) : el("bdi", {}, name)),
      score: (_, row) => named(runs[row], interval(runs[row], "score", "score_low", "score_high", runs[row].is_share ? "share" : "number")),
      best_s: (_, row) => marked(interval(runs[row], "best_s", "best_low_s", "best_high_s", "time"), runs[row].is_disturbed),
      speedup: (value, row) => factorCell(value, runs[row].speedup_low, runs[row].speedup_high),
      latency_s: (value, row) => marked(el("td", { class: "number", title: value ?? "not measured" }, el("span", {}, shown(value, "time"))), runs[row].is_noisy),
    },
  });
}

function runsFigure() {
  const rows = data.points.flatMap((run) => run.rows);
  const known = data.axes.filter((axis) => rows.some((row) => row[axis.name] !== null));
  if (!rows.length || !known.length) return null;
  const axis = (name) => data.axes.find((item) => item.name === name);
  const state = { x: chosenLatency(rows), y: "accuracy" };
  const options = known.map((item) => [item.name, item.title]);
  return figure({
    id: "runs-chart", title: "Candidates of all runs", provenance: "measured",
    controls: (chart) => [choice("X axis", options, state.x, (value) => { state.x = value; chart.update(); }), choice("Y axis", options, state.y, (value) => { state.y = value; chart.update(); })],
    draw: () => drawRuns(axis(state.x), axis(state.y)),
  });
}

function drawRuns(x, y) {
  const both = (row) => row[x.name] !== null && row[y.name] !== null;
  const traces = data.points.map((run, place) => {
    const rows = run.rows.filter(both);
    return {
      type: "scatter", mode: "markers", name: chartText(run.name, 40), x: rows.map((row) => row[x.name]), y: rows.map((row) => row[y.name]),
      marker: {
        color: color(RUN_TONES[place % RUN_TONES.length]), symbol: RUN_SYMBOLS[place % RUN_SYMBOLS.length], opacity: 0.9,
        size: rows.map((row) => (row.key === run.best ? 16 : 9)), line: { width: rows.map((row) => (row.key === run.best ? 2 : 1)), color: rows.map((row) => color(row.key === run.best ? "ink" : "card")) },
      },
      text: rows.map((row) => `<b>${chartText(run.name, 40)}</b><br>${chartText(row.label, 80)}<br>${x.title}: ${chartText(figureText(row, x))}<br>${y.title}: ${chartText(figureText(row, y))}`), hovertemplate: "%{text}<extra></extra>",
    };
  });
  const rows = data.points.flatMap((run) => run.rows).filter(both);
  const left = data.runs.length - data.points.length;
  return {
    data: traces,
    layout: { height: 460, xaxis: figureAxis(x, rows), yaxis: figureAxis(y, rows) },
    caption: `${rows.length} candidates of ${data.points.length} runs; the winner of each is larger. ${x.is_better_high ? "Right" : "Left"} and ${y.is_better_high ? "up" : "down"} is better.${logarithmic([x, y])}${left ? ` ${left} without candidates, or with another metric, ${left === 1 ? "is" : "are"} not drawn.` : ""}`,
    rows: { headers: ["Run", "Candidate", x.title, y.title, "Accepted"], kinds: ["text", "text", "number", "number", "flag"], rows: data.points.flatMap((run) => run.rows.filter(both).map((row) => [run.name, row.label, row[x.name], row[y.name], row.accepted])) },
  };
}

function changesSection() {
  const panels = data.changes.map(({ before, after, items }) => el("div", { class: "panel" },
    el("h3", {}, el("bdi", {}, after), " vs ", el("bdi", {}, before)),
    items.length ? scrollBox(`${after} vs ${before}`, simpleTable({ headers: ["Setting", before, after], kinds: ["text", "text", "text"], rows: items, style: "worded" }), "short")
      : el("p", { class: "note" }, "No recorded difference: same settings, versions, machine, data and counts.")));
  const same = data.same.length ? el("details", { class: "same" }, el("summary", {}, `Same in all runs: ${data.same.length}`),
    scrollBox("The same in all runs", simpleTable({ headers: ["Setting", "Value"], kinds: ["text", "text"], rows: data.same, style: "worded" }), "short")) : null;
  return section("changes", "What changed", "Each run compared with the one before it: settings, versions, machine, data, and counts of the model.", el("div", { class: "grid" }, panels), same);
}

function assembleRuns() {
  const main = document.getElementById("main");
  main.append(el("header", { class: "hero" }, el("h1", {}, el("bdi", {}, data.title)), el("p", { class: "kind" }, data.runs.map((run) => run.model).filter((name, place, all) => name && all.indexOf(name) === place).join(", "))));
  main.append(section("runs", "Runs", "A name leads to the page of its run.", runsTable(data.runs).node, data.verdict.length ? verdict() : null));
  const chart = runsFigure();
  if (chart) main.append(section("candidates", "Candidates", null, chart));
  if (data.changes.length) main.append(changesSection());
  main.append(section("environment", "Environment", null, el("div", { class: "panel", id: "written" }, el("h3", {}, "This page was written with"), facts(data.written))));
}
