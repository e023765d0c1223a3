"use strict";
// A sweep: candidates between two figures with their frontier, as a table, by precision, and those that failed.

const STATES = { accepted: ["green", "circle"], rejected: ["red", "x"] };

function figureText(row, axis) {
  const value = row[axis.name];
  if (value === null || value === undefined) return DASH;
  if (axis.name === "accuracy") return axis.is_share ? percent(value) : plain(value);
  if (axis.name === "macs" || axis.name === "params") return count(value);
  if (axis.name === "energy_j") return `${energy(value)} (${row.energy_source})`;
  return `${plain(value)} ${axis.unit}`;
}

function hoverText(row, sweep, violations) {
  const lines = sweep.axes.filter((axis) => row[axis.name] !== null).map((axis) => {
    const between = axis.low && row[axis.low] !== null ? ` (${figureText({ ...row, [axis.name]: row[axis.low] }, axis)} to ${figureText({ ...row, [axis.name]: row[axis.high] }, axis)})` : "";
    return `${axis.title}: ${chartText(figureText(row, axis) + between, 90)}`;
  });
  if (row.effective_precision && row.effective_precision !== row.precision) lines.push(`runs as ${chartText(row.effective_precision)}`);
  for (const broken of violations ?? []) lines.push(`breaks ${chartText(broken.constraint)}`);
  return `<b>${chartText(row.label, 80)}</b><br>${lines.join("<br>")}`;
}

function paretoFigure(sweep) {
  const isDeployed = sweep.rows.some((row) => row.deploy_latency_ms !== null && row.deploy_latency_ms !== undefined);
  const state = { x: isDeployed ? "deploy_latency_ms" : "latency_ms", y: "accuracy" };
  const axis = (name) => sweep.axes.find((item) => item.name === name);
  const known = sweep.axes.filter((item) => [...sweep.rows, sweep.baseline].some((row) => row[item.name] !== null));
  if (known.length && !known.some((item) => item.name === state.x)) state.x = known.at(-1).name;
  const options = known.map((item) => [item.name, item.title]);
  return figure({
    id: "pareto", title: "Candidates and their frontier", provenance: "measured",
    controls: (chart) => [
      choice("Across", options, state.x, (value) => { state.x = value; chart.update(); }),
      choice("Up", options, state.y, (value) => { state.y = value; chart.update(); }),
    ],
    draw: () => drawPareto(sweep, axis(state.x), axis(state.y)),
  });
}

function drawPareto(sweep, x, y) {
  const both = (row) => row[x.name] !== null && row[y.name] !== null;
  const spread = (rows, axis) => (axis.low ? {
    type: "data", symmetric: false, array: rows.map((row) => Math.max(0, row[axis.high] - row[axis.name])),
    arrayminus: rows.map((row) => Math.max(0, row[axis.name] - row[axis.low])), color: color("grey"), thickness: 1.2, width: 3,
  } : undefined);
  const cloud = (name, rows, marker) => ({
    type: "scatter", mode: "markers", name, x: rows.map((row) => row[x.name]), y: rows.map((row) => row[y.name]), error_x: spread(rows, x), error_y: spread(rows, y),
    marker: { size: 11, line: { width: 1.5, color: color("card") }, ...marker }, text: rows.map((row) => hoverText(row, sweep, sweep.violations[sweep.rows.indexOf(row)])), hovertemplate: "%{text}<extra></extra>",
  });
  const done = sweep.rows.filter((row) => row.status === "done" && both(row));
  const data = [];
  const names = sweep.axes.map((axis) => axis.name);
  const key = names.indexOf(x.name) < names.indexOf(y.name) ? `${x.name}|${y.name}` : `${y.name}|${x.name}`;
  const front = (sweep.frontiers[key] ?? []).map((place) => sweep.rows[place]).filter(both).sort((a, b) => a[x.name] - b[x.name]);
  if (front.length) data.push({ type: "scatter", mode: "lines", name: "frontier", x: front.map((row) => row[x.name]), y: front.map((row) => row[y.name]), line: { color: color("green"), width: 2 }, hoverinfo: "skip" });
  for (const [state, [tone, symbol]] of Object.entries(STATES)) {
    const rows = done.filter((row) => row.accepted === (state === "accepted"));
    if (rows.length) data.push(cloud(state, rows, { color: color(tone), symbol }));
  }
  if (both(sweep.baseline)) data.push(cloud("baseline", [sweep.baseline], { color: color("ink"), symbol: "diamond-open", size: 13, line: { width: 2 } }));
  const best = sweep.rows.filter((row) => row.key === sweep.best && both(row));
  if (best.length) data.push({ ...cloud("best", best, { color: "rgba(0,0,0,0)", symbol: "circle", size: 22, line: { width: 2, color: color("accent") } }), error_x: undefined, error_y: undefined });
  const tally = (state) => done.filter((row) => row.accepted === (state === "accepted")).length;
  const scale = (axis) => (axis.name === "macs" || axis.name === "params" ? "~s" : axis.name === "accuracy" && axis.is_share ? ".1%" : "");
  const failed = sweep.rows.filter((row) => row.status === "failed").length;
  return {
    data,
    layout: { height: 460, xaxis: { title: { text: x.unit ? `${x.title}, ${x.unit}` : x.title }, tickformat: scale(x) }, yaxis: { title: { text: y.unit ? `${y.title}, ${y.unit}` : y.title }, tickformat: scale(y) } },
    caption: `${tally("accepted")} accepted and ${tally("rejected")} rejected candidates${failed ? `, ${failed} failed and have no point` : ""}; ${front.length} on the frontier${front.length ? `: ${front.slice(0, 4).map((row) => row.label).join("; ")}${front.length > 4 ? "; …" : ""}` : ""}. ${x.is_better_high ? "Right" : "Left"} and ${y.is_better_high ? "up" : "down"} is better. Bars are 95 % intervals.`,
    rows: { headers: ["Candidate", x.title, y.title, "Accepted", "On the frontier"], kinds: ["text", "number", "number", "flag", "flag"], rows: done.map((row) => [row.label, row[x.name], row[y.name], row.accepted, front.includes(row)]) },
  };
}

const CANDIDATE_COLUMNS = [
  ["label", "Candidate", "text"], ["state", "Verdict", "text"], ["accuracy", "Accuracy", "share"], ["accuracy_drop", "Lost", "share"], ["test_accuracy", "On test", "share"],
  ["deploy_latency_ms", "Latency as deployed, ms", "number"], ["deploy_batch", "Deployed batch", "number"], ["speedup", "Times as fast", "number"], ["disturbed", "Disturbed", "flag"], ["latency_ms", "Latency, ms", "number"], ["batch_size", "Batch", "number"], ["latency_p95_ms", "p95, ms", "number"], ["throughput_sps", "Samples/s", "number"], ["peak_memory_mb", "Peak memory, estimated, MiB", "number"], ["measured_memory_mb", "Memory, measured, MiB", "number"], ["train_flops", "FLOPs of a fine-tuning step", "number"], ["train_peak_memory_mb", "Peak of a fine-tuning step, MiB", "number"], ["memory_mb", "Weights, MiB", "number"],
  ["size_mb", "Size, MiB", "number"], ["energy_j", "Energy", "energy"], ["energy_source", "Energy from", "text"], ["macs", "MACs", "count"], ["params", "Params", "count"],
  ["effective_precision", "Runs as", "text"], ["violations", "Breaks", "text"], ["remarks", "Remarks", "text"], ["key", "Key", "text"],
];

function candidateTable(sweep) {
  const rows = sweep.rows.map((row) => ({ ...row, state: row.status === "failed" ? "failed" : row.accepted ? "accepted" : "rejected" }));
  const titled = CANDIDATE_COLUMNS.map(([name, header, kind]) => [name, name === "accuracy" ? sweep.metric.title : header, kind === "share" && !sweep.metric.is_share ? "number" : kind]);
  const columns = titled.filter(([name]) => rows.some((row) => row[name] !== null && row[name] !== ""));
  return new DataTable({
    id: "candidates-table", caption: "Candidates", label: "label", filter: "state",
    columns: columns.map(([name, header, kind]) => ({ name, header, kind })), values: columns.map(([name]) => rows.map((row) => row[name])),
    visible: ["state", "accuracy", "deploy_latency_ms", "speedup", "disturbed", "latency_ms", "throughput_sps", "peak_memory_mb", "size_mb", "energy_j", "macs", "violations"],
    cells: { state: (state) => el("td", {}, badge(state)) },
  });
}

function failures(sweep) {
  const failed = sweep.rows.filter((row) => row.status === "failed");
  if (!failed.length) return null;
  return el("div", { class: "panel", id: "failures" }, el("h3", {}, `Failed: ${failed.length}`), el("div", { class: "scroll short", tabindex: "0", role: "region", "aria-label": "Failed candidates" },
    el("table", {}, el("thead", {}, el("tr", {}, ["Candidate", "What", "Why"].map((header) => el("th", { scope: "col", class: "plain" }, header)))),
      el("tbody", {}, failed.map((row) => el("tr", {}, el("td", { class: "text" }, row.label), el("td", {}, row.failure ?? DASH), el("td", { class: "wrapped" }, el("bdi", {}, row.reason))))))));
}

function precisionFigure(sweep) {
  const known = sweep.precisions.filter((row) => row.latency_ms !== null);
  if (!known.length) return null;
  const named = (row) => `${row.precision} ${row.runtime}`;
  const panel = (name, title, text, tone) => ({ name, title, text, tone });
  const score = (value) => (sweep.metric.is_share ? percent(value) : plain(value));
  const panels = [panel("latency_ms", "Latency", (value) => `${plain(value)} ms`, "blue"), panel("accuracy", sweep.metric.title, score, "green"), panel("size_mb", "Size", (value) => `${plain(value)} MiB`, "orange")];
  return figure({
    id: "precision-chart", title: "Means by precision and runtime", provenance: "measured", isFixed: true,
    draw: () => ({
      data: panels.map((item, place) => ({
        type: "bar", orientation: "h", name: item.title, xaxis: place ? `x${place + 1}` : "x", yaxis: "y", y: known.map((row) => `${row.precision}<br>${row.runtime}`), x: known.map((row) => row[item.name]),
        marker: { color: color(item.tone) }, text: known.map((row) => item.text(row[item.name])), textposition: "auto", textangle: 0, constraintext: "none", hovertemplate: `%{y}: %{text}<extra>${item.title}</extra>`,
      })),
      layout: {
        height: 110 + 42 * known.length, showlegend: false, bargap: 0.35, margin: { l: 90, r: 12, t: 6, b: 44 },
        xaxis: { domain: [0, 0.31], title: { text: panels[0].title }, fixedrange: true, nticks: 4 },
        xaxis2: { domain: [0.345, 0.655], title: { text: panels[1].title }, fixedrange: true, tickformat: sweep.metric.is_share ? ".0%" : "", nticks: 4, gridcolor: color("line"), automargin: true, anchor: "y" },
        xaxis3: { domain: [0.69, 1], title: { text: panels[2].title }, fixedrange: true, nticks: 4, gridcolor: color("line"), automargin: true, anchor: "y" },
        yaxis: { type: "category", autorange: "reversed", fixedrange: true, tickfont: { color: color("ink") } },
      },
      caption: `Fastest on average: ${named(known[0])}, ${plain(known[0].latency_ms)} ms and ${sweep.metric.title === "Accuracy" ? `${percent(known[0].accuracy)} accurate` : `${sweep.metric.title} ${score(known[0].accuracy)}`}. Means over pruning levels that ran.`,
      rows: { headers: ["Precision", "Runtime", "Candidates", "Accepted", "Failed", sweep.metric.title, "Latency, ms", "Memory, MiB", "Size, MiB", "Energy"], kinds: ["text", "text", "number", "number", "number", sweep.metric.is_share ? "share" : "number", "number", "number", "number", "energy"],
        rows: sweep.precisions.map((row) => [row.precision, row.runtime, row.candidates, row.accepted, row.failed, row.accuracy, row.latency_ms, row.peak_memory_mb, row.size_mb, row.energy_j]) },
    }),
  });
}

function sweepSections(sweep) {
  const lead = sweep.constraints.length ? `Asked for: ${sweep.constraints.join(", ")}.` : "No constraint was asked for.";
  const ran = sweep.rows.some((row) => row.status === "done");
  const found = [section("candidates", "Candidates", lead,
    !sweep.rows.length ? hint("The sweep is empty: no candidate was tried.") : null,
    sweep.rows.length && !ran ? hint("Every candidate failed, so there is nothing to plot; the reasons are below.") : null,
    ran ? paretoFigure(sweep) : null, failures(sweep), sweep.rows.length ? candidateTable(sweep).node : null)];
  const precisions = precisionFigure(sweep);
  if (precisions) found.push(section("precisions", "Precisions", "What a lower precision buys, and what it costs.", precisions));
  return found;
}
