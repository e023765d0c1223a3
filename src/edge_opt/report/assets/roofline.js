"use strict";
// Every layer under the rooflines of a device, which can be switched, and so can the precision.

function rooflineFigure(found) {
  const state = { device: found.devices[0].name, precision: found.devices[0].roofs[0].precision };
  const device = () => found.devices.find((item) => item.name === state.device);
  const roof = () => device().roofs.find((item) => item.precision === state.precision);

  return figure({
    id: "roofline-chart", title: "Roofline", provenance: "estimated",
    controls(chart) {
      const precisions = el("span", {});
      const offer = () => precisions.replaceChildren(choice("Precision", device().roofs.map((item) => [item.precision, item.precision]), state.precision, (value) => {
        state.precision = value;
        chart.update();
      }));
      offer();
      return [choice("Device", found.devices.map((item) => [item.name, item.title]), state.device, (value) => {
        state.device = value;
        if (!roof()) state.precision = device().roofs[0].precision;
        offer();
        chart.update();
      }), precisions];
    },
    draw: () => drawRoofline(found, device(), roof()),
  });
}

function drawRoofline(found, device, roof) {
  const bytes = found.bytes[roof.precision];
  const shownRows = found.flops.map((_, row) => row).filter((row) => found.flops[row] > 0 && bytes[row] > 0 && roof.seconds[row] > 0);
  const intensity = (row) => found.flops[row] / bytes[row];
  const rate = (row) => found.flops[row] / roof.seconds[row];
  const total = roof.total;
  const knees = device.roofs.map((item) => item.knee);
  const left = Math.min(...shownRows.map(intensity), ...knees) / 3;
  const right = Math.max(...shownRows.map(intensity), ...knees) * 3;
  const bandwidth = device.bandwidth.bytes_per_s;
  const longest = Math.max(...shownRows.map((row) => roof.seconds[row]), 0);
  const tones = { memory: color("blue"), compute: color("orange"), overhead: color("violet"), unknown: color("grey") };

  const roofs = device.roofs.map((item) => ({
    type: "scatter", mode: "lines", name: `${item.precision} roof`, x: [left, item.knee, right],
    y: [left * bandwidth, item.peak.value, item.peak.value], hoverinfo: "skip", showlegend: device.roofs.length > 1,
    line: { color: color("ink"), width: item === roof ? 2 : 1, dash: item === roof ? "solid" : "dot" }, opacity: item === roof ? 0.9 : 0.5,
  }));
  const groups = ["memory", "compute", "overhead"].map((bound) => [bound, shownRows.filter((row) => roof.bounds[row] === bound)]);
  const layers = groups.filter(([, rows]) => rows.length).map(([bound, rows]) => ({
    type: "scatter", mode: "markers", name: `${bound}-bound`, x: rows.map(intensity), y: rows.map(rate),
    marker: { color: tones[bound], opacity: 0.75, line: { width: 1, color: color("card") }, size: rows.map((row) => 7 + 19 * Math.sqrt(roof.seconds[row] / longest)) },
    text: rows.map((row) => `<b>${chartText(found.names[row], 80)}</b><br>${chartText(found.kinds[row])}<br>${ratio(intensity(row))} FLOPs per byte<br>${count(found.flops[row])} FLOPs, ${size(bytes[row])}<br>at least ${duration(roof.seconds[row])}, ${bound}-bound`),
    hovertemplate: "%{text}<extra></extra>",
  }));
  const measured = found.measured_s ? shownRows.filter((row) => found.measured_s[row] > 0) : [];
  const own = measured.length ? [{
    type: "scatter", mode: "markers", name: "measured here", visible: "legendonly", x: measured.map(intensity),
    y: measured.map((row) => found.flops[row] / found.measured_s[row]), marker: { symbol: "x-thin", size: 8, line: { width: 1.5, color: color("green") } },
    text: measured.map((row) => `<b>${chartText(found.names[row], 80)}</b><br>${duration(found.measured_s[row])} measured on this machine, not on the device`), hovertemplate: "%{text}<extra></extra>",
  }] : [];
  const moved = total.bytes_read + total.bytes_written;
  const whole = total.seconds && total.flops && moved ? [{
    type: "scatter", mode: "markers", name: "whole model", x: [total.flops / moved], y: [total.flops / total.seconds],
    marker: { symbol: "diamond", size: 13, color: color("red"), line: { width: 1.5, color: color("card") } },
    text: [`<b>The whole model</b><br>${ratio(total.flops / moved)} FLOPs per byte<br>at least ${duration(total.seconds)}`], hovertemplate: "%{text}<extra></extra>",
  }] : [];

  const share = (bound) => roof.seconds.reduce((sum, seconds, row) => sum + (roof.bounds[row] === bound ? seconds : 0), 0);
  const absent = found.flops.length - shownRows.length;
  const few = found.layers > found.flops.length ? ` Of ${found.layers} layers the ${found.flops.length} largest are shown.` : "";
  const time = total.seconds ? `At least ${duration(total.seconds)}, ${percent(share("memory") / (total.seconds || 1))} of it in memory-bound layers${roof.fused_s === null ? "" : `; fused, ${duration(roof.fused_s)}`}.` : "";
  return {
    data: [...roofs, ...layers, ...own, ...whole],
    layout: {
      height: 480,
      xaxis: { type: "log", title: { text: "FLOPs per byte" }, tickformat: "~g", dtick: 1, range: [Math.log10(left), Math.log10(right)] },
      yaxis: { type: "log", title: { text: "FLOP/s" }, tickformat: "~s", dtick: 1 },
      annotations: [{
        x: Math.log10(roof.knee), y: Math.log10(roof.peak.value), text: `knee ${ratio(roof.knee)} FLOPs/byte<br>${count(roof.peak.value)}FLOP/s`, showarrow: true,
        arrowcolor: color("soft"), arrowhead: 0, ax: isNarrow() ? -30 : -70, ay: -34, font: { color: color("ink"), size: 12 },
      }],
    },
    caption: `${device.title}, ${device.engine}, ${roof.precision}: ${count(bandwidth)}B/s (${device.bandwidth.reading}) and ${count(roof.peak.value)}FLOP/s (${roof.peak.kind}). ${time} Larger points take longer.${absent ? ` ${absent} layers that compute nothing have no point.` : ""}${few}${roof.remarks.length ? ` Note: ${roof.remarks.join("; ")}.` : ""}`,
    rows: { headers: ["Layer", "Type", "FLOPs", "Bytes", "FLOPs/byte", "Lower bound", "Bound by"], kinds: ["text", "text", "count", "bytes", "ratio", "time", "text"],
      rows: found.names.map((name, row) => [name, found.kinds[row], found.flops[row], bytes[row], bytes[row] ? intensity(row) : null, roof.seconds[row], roof.bounds[row]]) },
  };
}
