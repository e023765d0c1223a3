"use strict";
// Charts of one model: bars by layer, memory over the tape, prediction vs measurement, sensitivity.

function barFigure(bars) {
  return figure({
    id: `bars-${bars.metric.replace(/[^a-z0-9]+/gi, "-")}`, title: bars.title, provenance: bars.provenance, isFixed: true,
    isDisturbed: bars.metric === "time" && data.profile.is_disturbed,
    draw() {
      const largest = Math.max(0, ...bars.values);
      const [divisor, unit] = axisScale(largest, bars.unit);
      const kind = bars.unit;
      const others = bars.others === 1 ? "1 other" : `${bars.others} others`;
      const entries = bars.names.map((name, place) => ({ name, value: bars.values[place], tone: color("blue") }));
      // As a bar, a long rest would dwarf every layer; the caption has it in any case.
      if (bars.others && bars.others_value <= 3 * largest) {
        entries.push({ name: others, value: bars.others_value, tone: color("grey") });
      }
      const names = entries.map((entry) => short(entry.name, isNarrow() ? 20 : 30));
      return {
        data: [{
          type: "bar", orientation: "h",
          x: entries.map((entry) => entry.value / divisor), y: entries.map((_, place) => place),
          marker: { color: entries.map((entry) => entry.tone) }, textposition: "none",
          text: entries.map((entry) => `<b>${chartText(entry.name, 90)}</b><br>${shown(entry.value, kind)}, ${percent(bars.total ? entry.value / bars.total : 0)}`),
          hovertemplate: "%{text}<extra></extra>",
        }],
        layout: {
          height: 78 + 21 * Math.max(2, entries.length), bargap: 0.3, showlegend: false, margin: { l: 30, r: 16, t: 4, b: 44 },
          xaxis: { title: { text: bars.metric === "macs" ? `${unit} MACs` : unit }, rangemode: "tozero", fixedrange: true, nticks: isNarrow() ? 4 : 6 },
          yaxis: { autorange: "reversed", tickvals: entries.map((_, place) => place), ticktext: names.map((name) => chartText(name)),
            showgrid: false, fixedrange: true, tickfont: { color: color("ink"), size: 12 } },
        },
        caption: bars.caption,
        rows: { headers: ["Layer", bars.title], kinds: ["text", kind],
          rows: [...bars.names.map((name, place) => [name, bars.values[place]]), ...(bars.others ? [[others, bars.others_value]] : [])] },
      };
    },
  });
}

function memoryFigure(line) {
  return figure({
    id: "memory-timeline", title: "Activations in memory, by operator", provenance: "estimated",
    draw() {
      const [divisor, unit] = axisScale(line.peak_bytes, "bytes");
      const at = line.steps.indexOf(line.peak_step);
      const ends = [line.steps[0], line.steps.at(-1)];
      const where = line.peak_module || "the model's own forward";
      const text = line.steps.map((step, place) =>
        `<b>${chartText(line.modules[place] || "the model's own forward", 80)}</b><br>operator ${step}: ${chartText(line.operators[place])}<br>${size(line.live_bytes[place])} in memory`);
      return {
        data: [
          { type: "scatter", mode: "lines", name: "activations", x: line.steps, y: line.live_bytes.map((value) => value / divisor), text,
            line: { shape: "hv", width: 1.5, color: color("blue") }, fill: "tozeroy", hovertemplate: "%{text}<extra></extra>" },
          { type: "scatter", mode: "markers+text", name: "peak", x: [line.peak_step], y: [line.peak_bytes / divisor],
            marker: { color: color("red"), size: 10 }, hoverinfo: "skip", cliponaxis: false,
            text: [`peak ${size(line.peak_bytes)}`], textposition: at / line.steps.length > 0.7 ? "top left" : "top right", textfont: { color: color("ink") } },
          { type: "scatter", mode: "lines", name: "planner bound", x: ends, y: Array(2).fill(line.planner_bytes / divisor),
            line: { dash: "dot", color: color("green"), width: 1.5 }, hovertemplate: `a memory planner could reach ${size(line.planner_bytes)}<extra></extra>` },
          { type: "scatter", mode: "lines", name: "with weights and inputs", visible: "legendonly", x: line.steps,
            y: line.live_bytes.map((value) => (value + line.resident_bytes) / divisor), line: { shape: "hv", width: 1, color: color("orange") },
            hovertemplate: `%{y:.4g} ${unit} in all<extra></extra>` },
          ...[["allocated", line.cuda_allocated_bytes, "violet"], ["reserved", line.cuda_reserved_bytes, "grey"]].map(([what, values, tone]) => (
            { type: "scatter", mode: "lines", name: `CUDA ${what} (simulated)`, visible: "legendonly", x: line.steps, y: values.map((value) => value / divisor),
              line: { shape: "hv", width: 1, color: color(tone) }, hovertemplate: `%{y:.4g} ${unit} ${what} by CUDA's caching allocator (simulated)<extra></extra>` })),
        ],
        layout: { height: 380, xaxis: { title: { text: "operator" }, showgrid: false }, yaxis: { title: { text: unit }, rangemode: "tozero", autorangeoptions: { include: (1.15 * line.peak_bytes) / divisor } } },
        caption: `Peak: ${size(line.peak_bytes)} at ${short(where, 60)}, operator ${line.peak_step}. A runtime with a memory planner needs ${size(line.planner_bytes)}. Weights, buffers and inputs (${size(line.resident_bytes)}) are not included. CUDA curves are simulated (${line.cuda_note}).${line.stride > 1 ? ` Each point is the highest of ${line.stride} operators.` : ""}`,
        rows: { headers: ["Operator", "Name", "Module", "Alive", "CUDA allocated (simulated)", "CUDA reserved (simulated)"], kinds: ["number", "text", "text", "bytes", "bytes", "bytes"],
          rows: line.steps.slice(0, 2000).map((step, place) => [step, line.operators[place], line.modules[place], line.live_bytes[place], line.cuda_allocated_bytes[place], line.cuda_reserved_bytes[place]]) },
      };
    },
  });
}

function agreementFigure(found, place) {
  return figure({
    id: `agreement-${place}`, title: `Predicted for ${found.target} (${found.precision}, ${found.basis}) vs measured here`, provenance: "predicted",
    draw() {
      const all = [...found.layer_measured_s, ...found.layer_predicted_s].filter((value) => value > 0);
      const ends = all.length ? [Math.min(...all) / 1.5, Math.max(...all) * 1.5] : [1e-6, 1e-3];
      const timeAxis = (values) => wideAxis(values, (value) => duration(value).replace(/\.0+ /, " "));
      const spread = (bound, sign) => found.layer_predicted_s.map((value, row) => (found[bound][row] === null ? 0 : Math.max(0, sign * (found[bound][row] - value))));
      return {
        data: [
          { type: "scatter", mode: "lines", name: "equal", x: ends, y: ends, line: { color: color("grey"), dash: "dot", width: 1.5 }, hoverinfo: "skip" },
          { type: "scatter", mode: "markers", name: "layers", x: found.layer_measured_s, y: found.layer_predicted_s,
            error_y: { type: "data", symmetric: false, array: spread("layer_high_s", 1), arrayminus: spread("layer_low_s", -1), color: color("grey"), thickness: 1, width: 0 },
            marker: { color: color("violet"), size: 8, opacity: 0.85 },
            text: found.names.map((name, row) => `<b>${chartText(name, 80)}</b><br>measured ${duration(found.layer_measured_s[row])}<br>predicted ${duration(found.layer_predicted_s[row])}`),
            hovertemplate: "%{text}<extra></extra>" },
        ],
        layout: { height: 420, xaxis: { title: { text: "measured" }, ...timeAxis(ends) }, yaxis: { title: { text: "predicted" }, ...timeAxis(ends) } },
        caption: `The whole model: predicted ${duration(found.predicted_s)}${found.low_s === null ? "" : ` (${duration(found.low_s)} to ${found.high_s === null ? "unknown" : duration(found.high_s)})`}, measured here ${duration(found.measured_s)}, a ratio of ${ratio(found.ratio)}. On the dotted line both are equal; another machine than the target may be far from it.`,
        rows: { headers: ["Layer", "Measured", "Predicted", "Low", "High"], kinds: ["text", "time", "time", "time", "time"],
          rows: found.names.map((name, row) => [name, found.layer_measured_s[row], found.layer_predicted_s[row], found.layer_low_s[row], found.layer_high_s[row]]) },
      };
    },
  });
}

function sensitivityFigure(found) {
  return figure({
    id: "sensitivity-map", title: found.measure, provenance: "measured", isFixed: true,
    draw() {
      const rows = found.layers.map((_, place) => place);
      const known = found.losses.flat().filter((loss) => loss !== null);
      return {
        data: [{
          type: "heatmap", x: found.changes.map((change) => chartText(change, 24)), y: rows, z: found.losses, zmin: Math.min(0, ...known), zmax: Math.max(...known, 0) || 1, xgap: 2, ygap: 2,
          colorscale: "Cividis", reversescale: document.documentElement.dataset.theme !== "dark", hoverongaps: false, colorbar: { thickness: 12, outlinewidth: 0 },
          text: found.layers.map((layer, row) => found.changes.map((change, place) => `<b>${chartText(layer, 80)}</b><br>${chartText(change)}: ${shown(found.losses[row][place], "number")}`)),
          hovertemplate: "%{text}<extra></extra>",
        }],
        layout: {
          height: 110 + 24 * Math.max(2, rows.length), margin: { l: 30, r: 10, t: 6, b: 40 },
          xaxis: { type: "category", side: "bottom", showgrid: false, fixedrange: true },
          yaxis: { autorange: "reversed", tickvals: rows, ticktext: found.layers.map((name) => chartText(short(name, isNarrow() ? 20 : 40))), showgrid: false, fixedrange: true, tickfont: { color: color("ink") } },
        },
        caption: found.caption,
        rows: { headers: ["Layer", ...found.changes], kinds: ["text", ...found.changes.map(() => "number")], rows: found.layers.map((layer, row) => [layer, ...found.losses[row]]) },
      };
    },
  });
}
