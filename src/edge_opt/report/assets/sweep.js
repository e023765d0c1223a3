"use strict";
// A sweep: candidates between two figures with their frontier, as a table, by precision, and those that failed.
// Every point is one candidate: nothing is averaged.

const STATES = { accepted: ["green", "circle"], rejected: ["red", "x"] };

function figureText(row, axis) {
  const value = row[axis.name];
  if (value === null || value === undefined) return DASH;
  if (axis.name === "accuracy") return axis.is_share ? percent(value) : plain(value);
  if (axis.name === "macs" || axis.name === "params") return count(value);
  if (axis.name === "energy_j") return `${energy(value)} (${row.energy_source})`;
  if (axis.unit === "ms") return duration(value / 1e3);
  if (axis.unit === "MiB") return size(value * 2 ** 20);
  return `${plain(value)} ${axis.unit}`;
}

function hoverText(row, sweep, violations) {
  const lines = sweep.axes.filter((axis) => row[axis.name] !== null).map((axis) => {
    const between = axis.low && row[axis.low] !== null ? ` (${figureText({ ...row, [axis.name]: row[axis.low] }, axis)} to ${figureText({ ...row, [axis.name]: row[axis.high] }, axis)})` : "";
    return `${axis.title}: ${chartText(figureText(row, axis) + between, 90)}`;
  });
  if (row.effective_precision && row.effective_precision !== row.precision) lines.push(`precision in use: ${chartText(row.effective_precision)}`);
  for (const broken of violations ?? []) lines.push(`violates ${chartText(broken.constraint)}`);
  return `<b>${chartText(row.label, 80)}</b><br>${lines.join("<br>")}`;
}

function paretoFigure(sweep) {
  const state = { x: chosenLatency(sweep.rows), y: "accuracy" };
  const axis = (name) => sweep.axes.find((item) => item.name === name);
  const known = sweep.axes.filter((item) => [...sweep.rows, sweep.baseline].some((row) => row[item.name] !== null));
  if (known.length && !known.some((item) => item.name === state.x)) state.x = known.at(-1).name;
  const options = known.map((item) => [item.name, item.title]);
  return figure({
    id: "pareto", title: "Candidates and Pareto frontier", provenance: kindOfTimes(sweep.rows),
    controls: (chart) => [
      choice("X axis", options, state.x, (value) => { state.x = value; chart.update(); }),
      choice("Y axis", options, state.y, (value) => { state.y = value; chart.update(); }),
    ],
    draw: () => drawPareto(sweep, axis(state.x), axis(state.y)),
  });
}

/** Decimals of percentages that tell ticks apart: plotly draws at most ten over the span. */
function shareDigits(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const span = 100 * (Math.max(...known) - Math.min(...known));
  return span > 0 ? Math.min(4, Math.max(1, Math.ceil(-Math.log10(span / 10)))) : 1;
}

/** The axis of a figure, logarithmic where its candidates span a wide range. */
function figureAxis(axis, rows) {
  const isCount = axis.name === "macs" || axis.name === "params";
  const short = (text) => text.replace(/\.0+ /, " ");
  const ticks = { ms: (value) => short(duration(value / 1e3)), MiB: (value) => short(size(value * 2 ** 20)) }[axis.unit];
  const scale = axis.is_log ? wideAxis(rows.map((row) => row[axis.name]), ticks ?? (isCount ? count : plain))
    : { tickformat: isCount ? "~s" : axis.is_share ? `.${shareDigits(rows.map((row) => row[axis.name]))}%` : "" };
  // Ticks with their own unit need none in the title.
  return { title: { text: axis.unit && !(axis.is_log && ticks) ? `${axis.title} (${axis.unit})` : axis.title }, ...scale };
}

function logarithmic(axes) {
  const names = axes.filter((axis) => axis.is_log).map((axis) => axis.title);
  return names.length ? ` ${names.join(" and ")} on a logarithmic scale.` : "";
}

const kindOfTimes = (rows) => rows.find((row) => row.target_latency_kind === "predicted")?.target_latency_kind ?? "measured";
const LATENCIES = ["target_latency_ms", "deploy_latency_ms", "latency_ms"];
const chosenLatency = (rows) => LATENCIES.find((name) => rows.some((row) => (row[name] ?? null) !== null)) ?? "latency_ms";

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
    // A cross is all outline: it has no open form.
    const mark = (row) => (row.disturbed && symbol !== "x" ? `${symbol}-open` : symbol);
    if (rows.length) data.push(cloud(state, rows, { color: color(tone), symbol: rows.map(mark) }));
  }
  if (both(sweep.baseline)) data.push(cloud("baseline", [sweep.baseline], { color: color("ink"), symbol: "diamond-open", size: 13, line: { width: 2 } }));
  const best = sweep.rows.filter((row) => row.key === sweep.best && both(row));
  if (best.length) data.push({ ...cloud("best", best, { color: color("accent"), symbol: "circle-open", size: 22, line: { width: 2 } }), error_x: undefined, error_y: undefined });
  const tally = (state) => done.filter((row) => row.accepted === (state === "accepted")).length;
  const failed = sweep.rows.filter((row) => row.status === "failed").length;
  return {
    data,
    layout: { height: 460, xaxis: figureAxis(x, [...done, sweep.baseline]), yaxis: figureAxis(y, [...done, sweep.baseline]) },
    caption: `${tally("accepted")} accepted and ${tally("rejected")} rejected candidates${failed ? `, ${failed} failed and have no point` : ""}; ${front.length} on the frontier${front.length ? `: ${front.slice(0, 4).map((row) => row.label).join("; ")}${front.length > 4 ? "; …" : ""}` : ""}. ${x.is_better_high ? "Right" : "Left"} and ${y.is_better_high ? "up" : "down"} is better. Error bars: 95 % CI${kindOfTimes(done) === "predicted" ? ", 90 % intervals of predictions" : ""}.${logarithmic([x, y])}${done.some((row) => row.disturbed) ? " Open marks: the measurement was disturbed by other programs or noise." : ""}`,
    rows: { headers: ["Candidate", x.title, y.title, "Accepted", "On the frontier"], kinds: ["text", "number", "number", "flag", "flag"], rows: done.map((row) => [row.label, row[x.name], row[y.name], row.accepted, front.includes(row)]) },
  };
}

function candidateTable(sweep) {
  const isBaseline = (row) => row.key === sweep.baseline.key;
  const every = sweep.rows.some(isBaseline) ? sweep.rows : [...sweep.rows, sweep.baseline];
  const state = (row) => (row.key === sweep.best ? "winner" : row.status === "failed" ? "failed" : isBaseline(row) ? "baseline" : row.accepted ? "accepted" : "rejected");
  const rows = every.map((row) => ({ ...row, state: state(row) })).sort((a, b) => (b.state === "winner") - (a.state === "winner"));
  const columns = sweep.columns.filter(({ name }) => rows.some((row) => row[name] !== null && row[name] !== ""));
  return new DataTable({
    id: "candidates-table", caption: "Candidates", label: "label", filter: "state",
    columns, values: columns.map(({ name }) => rows.map((row) => row[name])),
    // One latency: that of the batch that is deployed, where it was timed.
    visible: ["state", ...(window.innerWidth < 1000 ? [] : ["test_accuracy"]), "accuracy", chosenLatency(rows), "speedup", "size_mb"],
    onPhone: ["state", "test_accuracy", "accuracy", chosenLatency(rows), "speedup", "size_mb"],
    cells: {
      state: (state, place) => statusCell(state, rows[place]),
      speedup: (value, place) => factorCell(value, rows[place].speedup_ci95_low, rows[place].speedup_ci95_high),
    },
  });
}

/** The status in a word, the reason of a rejection below it, and a mark for a ranking latency that was disturbed. */
function statusCell(state, row) {
  // Why candidates failed is in a table of its own.
  const reason = state === "failed" ? null : row.verdict.match(/\((.*)\)$/s)?.[1];
  return el("td", { class: "state", title: [row.verdict, row.disturbed_times].filter(Boolean).join("; disturbed: ") },
    el("span", {}, badge(state), row.disturbed ? [" ", badge("disturbed")] : null, reason ? el("small", { class: "below" }, reason) : null));
}

/** A speedup from interleaved measurements, never without its interval. */
function factorCell(value, low, high) {
  return el("td", { class: "number", title: value ?? "not among the finalists" },
    value === null ? DASH : low === high ? shown(value, "factor") : el("span", {}, shown(value, "factor"), el("small", {}, ` (${times(low)}–${times(high)})`)));
}

/** The candidate to ship to each target, where there are several. */
function winners({ winners: table }) {
  if (!table) return null;
  return el("div", { class: "panel", id: "winners" }, el("h3", {}, "The winner of each target"), scrollBox("Winners",
    el("table", { class: "worded" }, el("thead", {}, el("tr", {}, table.headers.map((header) => el("th", { scope: "col", class: "plain" }, header)))),
      el("tbody", {}, table.rows.map((row) => el("tr", {}, row.map((cell) => el("td", { class: "text" }, cell)))))), "short"));
}

function failures(sweep) {
  const failed = sweep.rows.filter((row) => row.status === "failed");
  if (!failed.length) return null;
  return el("div", { class: "panel", id: "failures" }, el("h3", {}, `Failed: ${failed.length}`), scrollBox("Failed candidates",
    el("table", { class: "worded reasons" }, el("thead", {}, el("tr", {}, ["Candidate", "Failure", "Reason"].map((header) => el("th", { scope: "col", class: "plain" }, header)))),
      el("tbody", {}, failed.map((row) => el("tr", {}, el("td", { class: "text" }, row.label), el("td", {}, row.failure ?? DASH), el("td", { class: "wrapped" }, el("bdi", {}, row.reason)))))), "short"));
}

const LEVEL_TONES = ["blue", "orange", "green", "violet", "red", "ink"];
const LEVEL_SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
const levelOf = (row) => (row.layer_pruning ? "pruned by layer" : row.pruning ? `pruned ${Number((100 * row.pruning).toPrecision(2))} %` : "unpruned");

/** One line per precision and runtime, one point per candidate: the effect of each at the same pruning ratio. */
function variantsFigure(sweep) {
  const done = sweep.rows.filter((row) => row.status === "done");
  if (!done.length) return null;
  const axis = (name) => sweep.axes.find((item) => item.name === name);
  const known = sweep.axes.filter((item) => done.some((row) => row[item.name] !== null));
  const state = { shown: chosenLatency(done) };
  return figure({
    id: "precision-chart", title: "Candidates by precision and runtime", provenance: kindOfTimes(done), isFixed: true,
    controls: (chart) => [choice("Figure", known.map((item) => [item.name, item.title]), state.shown, (value) => { state.shown = value; chart.update(); })],
    draw: () => drawVariants(sweep, done.filter((row) => row[state.shown] !== null), axis(state.shown)),
  });
}

function drawVariants(sweep, done, axis) {
  const sign = axis.is_better_high ? -1 : 1;
  const ranked = [...done].sort((a, b) => sign * (a[axis.name] - b[axis.name]));
  const named = (row) => `${row.precision}<br>${row.runtime}`;
  const groups = [...new Set(ranked.map(named))];
  const levels = [...new Set([...done].sort((a, b) => a.pruning - b.pruning).map(levelOf))];
  // Of many levels, as random search tries them, only the point itself says which it is.
  const traces = levels.length > LEVEL_TONES.length ? [["candidates", done]] : levels.map((level) => [level, done.filter((row) => levelOf(row) === level)]);
  const spread = (rows) => (axis.low ? { type: "data", symmetric: false, array: rows.map((row) => Math.max(0, row[axis.high] - row[axis.name])), arrayminus: rows.map((row) => Math.max(0, row[axis.name] - row[axis.low])), color: color("grey"), thickness: 1.2, width: 3 } : undefined);
  return {
    data: traces.map(([level, rows], place) => ({
      type: "scatter", mode: "markers", name: level, x: rows.map((row) => row[axis.name]), y: rows.map(named), error_x: spread(rows),
      marker: { size: 11, color: color(LEVEL_TONES[place]), symbol: rows.map((row) => `${LEVEL_SYMBOLS[place]}${row.disturbed ? "-open" : ""}`), line: { width: 1.5, color: color("card") } },
      text: rows.map((row) => hoverText(row, sweep, [])), hovertemplate: "%{text}<extra></extra>",
    })),
    layout: {
      height: 140 + 50 * groups.length, margin: { l: 96, r: 16, t: 6, b: 44 }, xaxis: { ...figureAxis(axis, done), fixedrange: true },
      yaxis: { type: "category", categoryarray: groups, categoryorder: "array", range: [groups.length - 0.5, -0.5], fixedrange: true, tickfont: { color: color("ink") } },
    },
    caption: `Each point is one candidate; nothing is averaged. ${axis.is_better_high ? "Highest" : "Lowest"}: ${ranked[0].label}, ${figureText(ranked[0], axis)}.${logarithmic([axis])}`,
    rows: { headers: ["Precision", "Runtime", "Pruning", axis.title, "Low", "High", "Accepted", "Disturbed"], kinds: ["text", "text", "text", "number", "number", "number", "flag", "flag"],
      rows: ranked.map((row) => [row.precision, row.runtime, levelOf(row), row[axis.name], axis.low ? row[axis.low] : null, axis.high ? row[axis.high] : null, row.accepted, row.disturbed]) },
  };
}

function sweepSections(sweep) {
  const lead = sweep.constraints.length ? `Constraints: ${sweep.constraints.join(", ")}.` : "No constraints.";
  const ran = sweep.rows.some((row) => row.status === "done");
  const found = [section("candidates", "Candidates", lead,
    !sweep.rows.length ? hint("The sweep is empty: no candidate was tried.") : null,
    sweep.rows.length && !ran ? hint("All candidates failed; the reasons are below.") : null,
    sweep.rows.length ? candidateTable(sweep).node : null, winners(sweep), failures(sweep), ran ? paretoFigure(sweep) : null)];
  const variants = variantsFigure(sweep);
  if (variants) found.push(section("precisions", "Precisions", "Effect of precision and runtime at the same pruning ratio.", variants));
  return found;
}
