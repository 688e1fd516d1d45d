// The step by lane. Above the lanes stand phases and layers; where compute waits for a transfer it is
// hatched in that lane's colour.

const GUTTER = 84;
const STRIP = 18;
const RULER = 22;

// Neighbours of one lane with the same word, as one stretch.
const stretches = (spans, wordOf) => {
  const found = [];
  for (const span of spans) {
    const word = wordOf(span);
    const last = found[found.length - 1];
    if (last && last.word === word) last.end = span.start_us + span.us;
    else found.push({ word, start: span.start_us, end: span.start_us + span.us });
  }
  return found;
};

// Rows of a timeline: a strip of words, or a lane of spans.
const lanesOf = (detail, named = (lane) => lane) => {
  const lanes = LANES.filter((lane) => detail.spans.some((span) => span.lane === lane));
  return lanes.map((lane) => ({
    name: named(lane),
    lane,
    spans: detail.spans.filter((span) => span.lane === lane).sort((a, b) => a.start_us - b.start_us),
    stalls: lane === "compute" ? detail.stalls : [],
    repeats: lane === "compute" ? detail.repeats : [],
  }));
};

const stripsOf = (detail) => {
  const compute = detail.spans.filter((span) => span.lane === "compute").sort((a, b) => a.start_us - b.start_us);
  const node = (span) => (detail.byName ? detail.byName.get(span.node) : undefined);
  const strips = [{ name: "layer", strip: stretches(compute, (span) => span.layer) }];
  if (detail.byName) {
    const phaseOf = ({ phase, micro_step: step }) => (step ? `${phase} ${step}` : phase);
    const known = compute.filter((span) => node(span) && node(span).phase);
    strips.unshift({ name: "phase", strip: stretches(known, (span) => phaseOf(node(span))) });
  }
  return strips;
};

const timeline = (rows, view, { select = () => {}, wheel = "always", label = "Timeline", tall: ROW = 28 } = {}) => {
  const tops = [];
  let height = RULER;
  for (const row of rows) {
    tops.push(height);
    height += row.strip ? STRIP + 2 : ROW + 4;
  }
  let chosen = null;
  const lanes = rows.filter((row) => row.spans);

  const draw = (context, width, tall) => {
    drawRuler(context, view, GUTTER, width, tall);
    const scale = (width - GUTTER) / (view.high - view.low);
    rows.forEach((row, i) => {
      context.fillStyle = themed("muted");
      context.textAlign = "right";
      context.fillText(words(row.name), GUTTER - 10, tops[i] + (row.strip ? STRIP : ROW) / 2);
      context.textAlign = "left";
      context.save();
      context.beginPath();
      context.rect(GUTTER, 0, width - GUTTER, tall);
      context.clip();
      if (row.strip) drawStrip(context, row, tops[i], scale);
      else drawLane(context, row, tops[i], scale);
      context.restore();
    });
  };

  const drawStrip = (context, row, top, scale) => {
    row.strip.forEach((part, n) => {
      if (part.end < view.low || part.start > view.high) return;
      const x = GUTTER + (part.start - view.low) * scale;
      const w = Math.max(1, (part.end - part.start) * scale);
      const phase = PHASES[part.word.split(" ")[0]];
      context.fillStyle = phase || themed(n % 2 ? "stripA" : "stripB");
      context.fillRect(x, top, Math.max(1, w - 1), STRIP);
      const from = Math.max(x, GUTTER);
      context.fillStyle = phase ? "#10151c" : themed("text");
      fitText(context, layerName(part.word), from + 4, top + STRIP / 2 + 0.5, x + w - from - 6, layerTail(part.word));
    });
  };

  const drawLane = (context, row, top, scale) => {
    context.fillStyle = themed("lane");
    context.fillRect(GUTTER, top, 1e5, ROW);
    for (const repeat of row.repeats) {
      const x = GUTTER + (repeat.once_us - view.low) * scale;
      const w = (repeat.end_us - repeat.once_us) * scale;
      hatch(context, x, top, w, ROW, themed("muted"));
      const from = Math.max(x, GUTTER) + 8;
      const text = `the same ${repeat.runs - 1} times more`;
      const room = context.measureText(text).width + 12;
      if (room < x + w - from) {
        context.fillStyle = themed("card");
        context.fillRect(from, top + 5, room, ROW - 10);
        context.fillStyle = themed("text");
        context.fillText(text, from + 6, top + ROW / 2 + 0.5);
      }
    }
    for (const stall of row.stalls) {
      if (stall.start_us + stall.us < view.low || stall.start_us > view.high) continue;
      hatch(context, GUTTER + (stall.start_us - view.low) * scale, top, stall.us * scale, ROW, colourOf(stall.lane));
    }
    const colour = row.colour || colourOf(row.lane);
    context.fillStyle = colour;
    for (const span of row.spans) {
      if (span.start_us > view.high) break;
      if (span.start_us + span.us < view.low) continue;
      const x = GUTTER + (span.start_us - view.low) * scale;
      const w = span.us * scale;
      context.fillStyle = colour;
      context.fillRect(x, top, Math.max(0.7, w > 3 ? w - 1 : w), ROW);
      if (w > 20) {
        const from = Math.max(x, GUTTER);
        context.fillStyle = "#0b0f14";
        fitText(context, span.name, from + 4, top + ROW / 2 + 0.5, x + w - from - 6, row.lane === "compute" ? layerTail(span.layer) : null);
      }
      if (span === chosen) {
        context.strokeStyle = themed("text");
        context.lineWidth = 2;
        context.strokeRect(x + 1, top + 1, Math.max(2, w - 3), ROW - 2);
      }
    }
  };

  const found = canvasOf(height + 4, `${label}: plus and minus zoom, left and right move, comma and full stop choose a neighbour, up and down a lane`, draw);
  const { canvas, holder, redraw } = found;
  view.onChange(redraw);

  const laneAt = (y) => rows.find((row, i) => row.spans && y >= tops[i] && y < tops[i] + ROW);
  const spanAt = (lane, at) => {
    const slack = ((view.high - view.low) / canvas.clientWidth) * 2;
    let best = null;
    for (const span of lane ? lane.spans : []) {
      const away = Math.max(span.start_us - at, at - span.start_us - span.us, 0);
      if (away <= slack && (!best || away < best.away)) best = { away, span };
    }
    return best && best.span;
  };
  const choose = (span, lane) => {
    chosen = span;
    redraw();
    select(span, lane);
  };
  const next = (way) => {
    const lane = lanes.find((row) => row.spans.includes(chosen)) || lanes[0];
    if (!lane) return;
    const at = lane.spans.indexOf(chosen);
    const span = at < 0
      ? lane.spans.find((one) => one.start_us + one.us > view.low) || lane.spans[0]
      : lane.spans[Math.min(Math.max(at + way, 0), lane.spans.length - 1)];
    choose(span, lane);
    view.show(span.start_us, span.us);
  };
  const otherLane = (way) => {
    const at = lanes.findIndex((row) => row.spans.includes(chosen));
    const lane = lanes[Math.min(Math.max(at + way, 0), lanes.length - 1)];
    const middle = chosen ? chosen.start_us + chosen.us / 2 : view.low;
    const span = lane.spans.reduce((a, b) =>
      (Math.abs(b.start_us + b.us / 2 - middle) < Math.abs(a.start_us + a.us / 2 - middle) ? b : a));
    choose(span, lane);
    view.show(span.start_us, span.us);
  };
  const KEYS = {
    ".": () => next(1), ",": () => next(-1), ArrowDown: () => otherLane(1), ArrowUp: () => otherLane(-1),
    Escape: () => choose(null, null),
    Enter: () => chosen && view.set(chosen.start_us - chosen.us, chosen.start_us + 2 * chosen.us),
  };
  steer(canvas, view, {
    left: GUTTER,
    wheel,
    keys: (event) => (KEYS[event.key] ? (KEYS[event.key](), true) : false),
    click: (event, at) => {
      const lane = laneAt(event.offsetY);
      choose(spanAt(lane, at), lane);
    },
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = view.low + ((event.offsetX - GUTTER) / (canvas.clientWidth - GUTTER)) * (view.high - view.low);
    const lane = laneAt(event.offsetY);
    const span = event.offsetX > GUTTER && spanAt(lane, at);
    const stall = !span && lane && event.offsetX > GUTTER
      && lane.stalls.find((one) => at >= one.start_us && at <= one.start_us + one.us);
    if (span) {
      tooltip.show(event, [span.name, `${time(span.us)} from ${time(span.start_us)}`, `${words(span.lane)} · ${layerName(span.layer)}${span.runs > 1 ? ` · ${span.runs} times` : ""}`]);
    } else if (stall) {
      tooltip.show(event, [`Waiting for ${words(stall.lane)}`, `${time(stall.us)}, before ${stall.node}`]);
    } else {
      tooltip.hide();
    }
  });
  canvas.addEventListener("pointerleave", tooltip.hide);
  return { holder, choose: (span) => { chosen = span; redraw(); if (span) view.show(span.start_us, span.us); } };
};

const hatch = (context, x, y, width, height, colour) => {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.globalAlpha = 0.18;
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 0.9;
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  const from = Math.max(x, 0) - height;
  const to = Math.min(x + width, context.canvas.width) + height;
  context.beginPath();
  for (let at = Math.floor(from / 7) * 7; at < to; at += 7) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
};

const keys = (...names) => names.flatMap((name, i) => (i ? [" ", el("kbd", {}, name)] : el("kbd", {}, name)));

const laneLegend = (detail) => {
  const lanes = LANES.filter((lane) => detail.spans.some((span) => span.lane === lane));
  const waits = detail.stalls.length
    ? [el("li", {}, el("span", { class: "swatch hatched", css: { "--hatch": colourOf(detail.stalls[0].lane) }, "aria-hidden": "true" }), "compute waits for a transfer")]
    : [];
  return el("ul", { class: "legend" }, lanes.map((lane) => el("li", {}, swatch(colourOf(lane)), words(lane))), waits);
};

const timelinePanel = (graph, view, go) => {
  const { detail } = graph;
  if (!detail || !detail.spans.length) return [noDetail()];
  const chosen = el("div", { class: "chosen", "aria-live": "polite" },
    hint("Click on something, or choose it by keys, to see its node."));
  const select = (span) => {
    if (!span) chosen.replaceChildren();
    else chosen.replaceChildren(nodeCard(graph, span.node, go, span));
  };
  const drawn = timeline([...stripsOf(detail), ...lanesOf(detail)], view, { select, tall: 36 });
  go.toSpan = (name) => {
    const span = detail.spans.find((one) => one.node === name);
    if (span) {
      drawn.choose(span);
      select(span);
    }
    return Boolean(span);
  };
  const byLayer = new Map();
  for (const span of detail.spans) {
    const key = `${span.layer} ${span.lane}`;
    const row = byLayer.get(key) || { layer: span.layer, lane: span.lane, us: 0, count: 0 };
    row.us += span.us * span.runs;
    row.count += span.runs;
    byLayer.set(key, row);
  }
  const rows = [...byLayer.values()];
  const most = Math.max(...rows.map((row) => row.us), 1);
  return [
    card("Timeline by lane", laneLegend(detail), windowTools(view), drawn.holder,
      hint("Wheel zooms, dragging moves. Keys: ", keys("+", "−"), " zoom, ", keys("←", "→"), " move, ", keys(",", "."), " neighbour, ", keys("↑", "↓"), " lane, ", keys("Enter"), " closer, ", keys("0"), ` whole step. Times are simulated (${graph.schedule.costs}); where compute is empty and not hatched, the host starts transfers.`), chosen),
    card("Time by layer and lane", table("Time by layer and lane", [
      { title: "Layer", value: (row) => layerName(row.layer) },
      { title: "Lane", value: (row) => row.lane, show: (row) => [swatch(colourOf(row.lane)), words(row.lane)] },
      { title: "Runs", value: (row) => row.count, right: true },
      { title: "Time", value: (row) => row.us, right: true, show: (row) => bar(row.us / most, colourOf(row.lane), time(row.us)) },
    ], rows, { sort: { column: 3, down: true } })),
  ];
};

const noDetail = () => hint("This analysis has no details of its graph: nothing to draw.");
