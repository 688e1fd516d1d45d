// What is held over time, stacked by what it is for.

const drawHeld = (context, held, kinds, view, { left, top, bottom, width, hidden, most, peak }) => {
  const scale = (width - left) / (view.high - view.low);
  const tall = bottom - top;
  const count = held.start_us.length;
  const xOf = (i) => left + ((i < count ? held.start_us[i] : view.full) - view.low) * scale;
  const first = Math.max(0, held.start_us.findIndex((start) => start > view.low) - 1);
  let last = held.start_us.findIndex((start) => start > view.high);
  if (last < 0) last = count;
  const base = new Float64Array(last - first + 1);
  context.save();
  context.beginPath();
  context.rect(left, 0, width - left, bottom + 1);
  context.clip();
  kinds.forEach((kind, k) => {
    if (hidden.has(kind)) return;
    context.beginPath();
    for (let i = first; i < last; i += 1) {
      const y = bottom - ((base[i - first] + held.num_bytes[k][i]) / most) * tall;
      context.lineTo(xOf(i), y);
      context.lineTo(xOf(i + 1), y);
    }
    for (let i = last - 1; i >= first; i -= 1) {
      const y = bottom - (base[i - first] / most) * tall;
      context.lineTo(xOf(i + 1), y);
      context.lineTo(xOf(i), y);
      base[i - first] += held.num_bytes[k][i];
    }
    context.closePath();
    context.fillStyle = colourOf(kind);
    context.fill();
  });
  if (peak !== null && peak !== undefined) {
    const x = (xOf(peak) + xOf(peak + 1)) / 2;
    context.strokeStyle = themed("text");
    context.lineWidth = 1.5;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, top - 6);
    context.lineTo(x, bottom);
    context.stroke();
  }
  context.restore();
  return peak === null || peak === undefined ? null : (xOf(peak) + xOf(peak + 1)) / 2;
};

const totalAt = (held, i, hidden = new Set(), kinds = []) =>
  held.num_bytes.reduce((sum, column, k) => sum + (hidden.has(kinds[k]) ? 0 : column[i]), 0);

const peakOf = (held) => {
  let peak = null;
  let most = -1;
  held.start_us.forEach((_, i) => {
    const total = totalAt(held, i);
    if (total > most) [peak, most] = [i, total];
  });
  return peak;
};

const memoryChart = (detail, view, { height = 260, wheel = "always", hidden = new Set() } = {}) => {
  const { held, kinds } = detail;
  const peak = peakOf(held);
  const most = Math.max(totalAt(held, peak) * 1.12, 1);
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(most / 3) / Math.log(1024)));
  const draw = (context, width, tall) => {
    drawRuler(context, view, GUTTER, width, tall - 4);
    const [top, bottom] = [34, tall - 6];
    for (const tick of ticks(0, most / unit, 6)) {
      const y = Math.round(bottom - ((tick * unit) / most) * (bottom - top)) + 0.5;
      context.fillStyle = themed("grid");
      context.fillRect(GUTTER, y, width, 1);
      context.fillStyle = themed("muted");
      context.textAlign = "right";
      context.fillText(bytes(tick * unit), GUTTER - 10, y);
    }
    context.textAlign = "left";
    const x = drawHeld(context, held, kinds, view, { left: GUTTER, top, bottom, width, hidden, most, peak });
    if (x !== null && x >= GUTTER && x <= width) {
      const text = `peak ${bytes(totalAt(held, peak))} at ${held.node[peak]}`;
      const room = context.measureText(text).width;
      const from = Math.min(Math.max(x - room / 2, GUTTER + 4), width - room - 4);
      context.fillStyle = themed("card");
      context.fillRect(from - 4, 19, room + 8, 16);
      context.fillStyle = themed("text");
      context.fillText(text, from, 27);
    }
  };
  const { canvas, holder, redraw } = canvasOf(height, "Memory over time: plus and minus zoom, left and right move", draw);
  view.onChange(redraw);
  steer(canvas, view, { left: GUTTER, wheel });
  canvas.addEventListener("pointermove", (event) => {
    const at = view.low + ((event.offsetX - GUTTER) / (canvas.clientWidth - GUTTER)) * (view.high - view.low);
    let i = held.start_us.findIndex((start) => start > at);
    i = (i < 0 ? held.start_us.length : i) - 1;
    if (event.offsetX < GUTTER || i < 0) return tooltip.hide();
    const parts = kinds.map((kind, k) => [kind, held.num_bytes[k][i]]).filter(([kind, held_]) => held_ && !hidden.has(kind));
    return tooltip.show(event, [`${bytes(totalAt(held, i, hidden, kinds))} at ${time(at)}`, `since ${held.node[i]}`, ...parts.reverse().map(([kind, n]) => `${words(kind)}: ${bytes(n)}`)]);
  });
  canvas.addEventListener("pointerleave", tooltip.hide);
  return { holder, redraw };
};

const kindLegend = (detail, schedule, toggle) => {
  const shown = detail.kinds.filter((kind, k) => detail.held.num_bytes[k] && detail.held.num_bytes[k].some(Boolean));
  return el("ul", { class: "legend" }, shown.map((kind) => {
    const text = [swatch(colourOf(kind)), words(kind), el("span", { class: "muted" }, ` ${bytes(schedule.bytes_by_kind[kind] || 0)}`)];
    if (!toggle) return el("li", {}, text);
    const made = button(text, () => {
      made.setAttribute("aria-pressed", String(toggle(kind)));
    }, { class: "toggle", "aria-pressed": "true" });
    return el("li", {}, made);
  }));
};

// What each layer keeps for backward, repeats there and gathers; alike ones are one row.
const layerMemory = (rows) => {
  const numbered = rows.map((row, order) => ({ ...row, order }));
  const some = (name) => numbered.some((row) => row[name]);
  const column = (name, title, show) => ({ title, value: (row) => row[name], right: true, show: (row) => (row[name] ? show(row[name]) : "") });
  const named = (row) => (row.layers.length > 1 ? `${layerName(row.layers[0])} … ${row.layers[row.layers.length - 1]}` : layerName(row.layers[0]));
  return card("By layer", table("Memory by layer", [
    { title: "Layers", value: (row) => row.order, show: (row) => [named(row), " ", row.layers.length > 1 ? el("span", { class: "badge" }, `${row.layers.length} alike`) : null].filter(Boolean) },
    column("kept_bytes", "Kept for backward", bytes),
    ...(some("moved_bytes") ? [column("moved_bytes", "On the host meanwhile", bytes)] : []),
    column("repeated", "Operators repeated", number),
    column("repeated_bytes", "Not kept therefore", bytes),
    column("repeated_us", "Repeating takes", time),
    ...(some("partitioned") ? [column("partitioned_bytes", "Kept in parts", bytes), column("partitioned_us", "Gathering parts takes", time)] : []),
    column("gathered_bytes", "Gathered", bytes),
  ], numbered), hint("Figures are of each layer, in one micro-step."));
};

const memoryPanel = (graph, view, go) => {
  const { detail, schedule } = graph;
  if (!detail || !detail.held.start_us.length) return [noDetail()];
  const hidden = new Set();
  const chart = memoryChart(detail, view, { height: 320, hidden });
  const toggle = (kind) => {
    if (!hidden.delete(kind)) hidden.add(kind);
    chart.redraw();
    return !hidden.has(kind);
  };
  const layerOf = (name) => (detail.byName.get(name) || {}).layer || "";
  const [more, moreBytes] = detail.aliveLeftOut;
  const chosen = el("div", { class: "chosen", "aria-live": "polite" });
  const elsewhere = [["in the host's memory", schedule.host_bytes], ["on disk", schedule.disk_bytes]]
    .filter(([, held]) => held).map(([where, held]) => `${bytes(held)} ${where}`);
  return [
    card("Memory of the device by role", kindLegend(detail, schedule, toggle), windowTools(view), chart.holder,
      hint("A figure in the legend is of the peak; a click on it hides that role.", elsewhere.length ? ` And ${elsewhere.join(", ")}.` : "")),
    card("Tensors at the peak",
      hint(`${bytes(schedule.peak_bytes)} are held while ${schedule.peak_node} runs.`, more ? ` Left out: ${number(more)} smaller ones, ${bytes(moreBytes)}.` : ""),
      chosen,
      table("Tensors at the peak", [
        { title: "Tensor", value: (row) => row.node, wide: true },
        { title: "Role", value: (row) => row.kind, show: (row) => [swatch(colourOf(row.kind)), words(row.kind)] },
        { title: "Layer", value: (row) => layerName(layerOf(row.node)) },
        { title: "Size", value: (row) => row.num_bytes, right: true, show: (row) => bar(row.num_bytes / (detail.alive[0].num_bytes || 1), colourOf(row.kind), bytes(row.num_bytes)) },
        { title: "Of the peak", value: (row) => row.num_bytes / schedule.peak_bytes, right: true, show: (row) => percent(row.num_bytes / schedule.peak_bytes) },
      ], detail.alive, {
        sort: { column: 3, down: true },
        open: (row) => chosen.replaceChildren(nodeCard(graph, row.node, go)),
      })),
    ...(detail.byLayer.length ? [layerMemory(detail.byLayer)] : []),
  ];
};
