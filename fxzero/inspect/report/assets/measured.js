// What ran beside what was simulated.

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length ? (sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2) : 0;
};

const ratio = (measured, predicted) => (predicted ? `${fixed(measured / predicted, 2)} ×` : "–");

// Measured spans of parts that run one after the other, on one clock.
const onOneClock = (runs) => {
  const found = [];
  let begin = 0;
  for (const run of runs) {
    let end = begin;
    for (const span of run.spans) {
      found.push({ ...span, part: run.part, start_us: span.start_us + begin });
      end = Math.max(end, span.start_us + span.us + begin);
    }
    begin = end;
  }
  return found;
};

const measuredPanel = (graph, go) => {
  const { detail, schedule } = graph;
  const runs = detail ? detail.measured : [];
  if (!runs.length) return [hint("Nothing of this graph was measured: a dump of a run has that.")];
  const spans = onOneClock(runs);
  const calls = runs.reduce((sum, run) => sum + median(run.calls_us), 0);
  const peaks = runs.map((run) => run.peak_bytes).filter((peak) => peak !== null);
  const peak = peaks.length ? Math.max(...peaks) : null;
  const figures = el("div", { class: "figures" },
    figure("Predicted step", time(schedule.makespan_us), schedule.costs),
    figure("Measured step", time(calls), `median of ${runs.map((run) => `${run.calls_us.length} calls of ${run.part}`).join(", ")}`),
    figure("Measured over predicted", ratio(calls, schedule.makespan_us), runs[0].device),
    figure("Peak, predicted", bytes(schedule.peak_bytes), `at ${schedule.peak_node}`),
    figure("Peak, measured", peak === null ? "unknown" : bytes(peak), peak === null ? "not to be found out there" : ratio(peak, schedule.peak_bytes)));
  const end = Math.max(schedule.makespan_us, ...spans.map((span) => span.start_us + span.us));
  const view = timeWindow(end);
  const both = lanesOf(detail).flatMap((lane) => [
    { ...lane, name: lane.lane },
    ...lanesOf({ spans: spans.filter((span) => span.lane === lane.lane), stalls: [], repeats: [] }, () => "as it ran"),
  ]);
  const drawn = timeline(both, view, { select: (span) => chosen.replaceChildren(...(span ? [nodeCard(graph, span.node, go, span)] : [])), label: "Predicted and measured" });
  const chosen = el("div", { class: "chosen", "aria-live": "polite" });
  const sums = (keyOf) => {
    const found = new Map();
    const add = (span, name) => {
      const row = found.get(keyOf(span)) || { layer: span.layer, lane: span.lane, name: span.name, node: span.node, predicted: 0, measured: 0 };
      row[name] += span.us * span.runs;
      found.set(keyOf(span), row);
    };
    detail.spans.forEach((span) => add(span, "predicted"));
    spans.forEach((span) => add(span, "measured"));
    return [...found.values()];
  };
  const lane = { title: "Lane", value: (row) => row.lane, show: (row) => [swatch(colourOf(row.lane)), words(row.lane)] };
  const worth = [
    { title: "Predicted", value: (row) => row.predicted, right: true, show: (row) => time(row.predicted) },
    { title: "Measured", value: (row) => row.measured, right: true, show: (row) => time(row.measured) },
    { title: "Difference", value: (row) => Math.abs(row.measured - row.predicted), right: true, show: (row) => `${row.measured < row.predicted ? "−" : "+"}${time(Math.abs(row.measured - row.predicted))}` },
    { title: "Ratio", value: (row) => (row.predicted ? row.measured / row.predicted : 0), right: true, show: (row) => ratio(row.measured, row.predicted) },
  ];
  return [figures,
    card("Predicted and measured by lane", windowTools(view), drawn.holder, hint("Measured node by node in one call that was watched, and is slower therefore; the figures above are of whole calls."), chosen),
    card("By layer", table("Predicted and measured by layer", [{ title: "Layer", value: (row) => layerName(row.layer) }, lane, ...worth], sums((span) => `${span.layer} ${span.lane}`), { sort: { column: 4, down: true } })),
    card("By node", table("Predicted and measured by node", [{ title: "Node", value: (row) => row.name, wide: true }, lane, ...worth], sums((span) => `${span.node} ${span.lane}`), { sort: { column: 4, down: true }, open: (row) => chosen.replaceChildren(nodeCard(graph, row.node, go)) }))];
};
