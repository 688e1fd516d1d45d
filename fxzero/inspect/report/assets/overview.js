// The first page: figures, the step and its memory at a glance, passes.

const stackedBar = (parts, total, label) =>
  el("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map(([name, value, text]) => `${words(name)} ${text}`).join(", ")}` },
    parts.filter(([, value]) => value > 0).map(([name, value, text]) =>
      el("span", { css: { width: `${(value / total) * 100}%`, background: colourOf(name) }, title: `${words(name)}: ${text}` })));

const overviewPanel = (data, graph, view, go) => {
  const { schedule, detail } = graph;
  const graphs = data.graphs.map((one) => one.schedule);
  const step = graphs.reduce((sum, one) => sum + one.makespan_us, 0);
  const exposed = graphs.reduce((sum, one) => sum + one.exposed_us, 0);
  const top = graphs.reduce((a, b) => (b.peak_bytes > a.peak_bytes ? b : a));
  const { about } = data;
  const { states } = about;
  const stateBytes = states.parameter_bytes + states.gradient_bytes + states.optimizer_bytes;
  const perStep = graphs.length > 1 ? `${graphs.length} graphs, one after the other` : schedule.costs;
  const figures = el("div", { class: "figures" },
    figure("Step, simulated", time(step), perStep),
    figure("Waiting for transfers", time(exposed), `${percent(step ? exposed / step : 0)} of the step`),
    figure("Peak memory", bytes(top.peak_bytes), `at ${top.peak_node}${graphs.length > 1 ? `, graph ${top.graph}` : ""}`),
    figure("Model states", bytes(stateBytes), `of ${short(about.num_parameters)} parameters`),
    figure("Sent by each rank", bytes(about.totals.sent_bytes), about.num_parameters ? `${fixed(about.totals.wire_elements / about.num_parameters, 3)} P on the wire` : ""),
    figure("Compute", step ? `${flops(about.flops / step * 1e6)}/s` : "–", `${flops(about.flops)} a step`));
  const kinds = Object.entries(schedule.bytes_by_kind).filter(([, held]) => held);
  const parts = [figures];
  if (detail && detail.spans.length) {
    const drawn = timeline([...stripsOf(detail), ...lanesOf(detail)], view, { wheel: "ctrl", select: (span) => span && go.toTimeline(span.node), label: "Timeline at a glance" });
    const chart = detail.held.start_us.length ? memoryChart(detail, view, { height: 190, wheel: "ctrl" }) : null;
    parts.push(card("The step", laneLegend(detail), windowTools(view), drawn.holder,
      ...(chart ? [el("h3", { class: "inner" }, "Memory of the device"), kindLegend(detail, schedule), chart.holder] : [])));
  }
  const busy = LANES.filter((lane) => schedule.busy_us[lane]).map((lane) => [lane, schedule.busy_us[lane]]);
  const lanes = el("table", { class: "plain" }, el("caption", { class: "unseen" }, "How busy each lane is"), el("tbody", {}, busy.map(([lane, us]) =>
    el("tr", {}, el("th", { scope: "row" }, swatch(colourOf(lane)), words(lane)), el("td", { class: "grow" }, bar(schedule.makespan_us ? us / schedule.makespan_us : 0, colourOf(lane), percent(schedule.makespan_us ? us / schedule.makespan_us : 0))), el("td", { class: "right" }, time(us))))));
  const held = el("table", { class: "plain" }, el("caption", { class: "unseen" }, "What the peak is made of"), el("tbody", {}, kinds.sort((a, b) => b[1] - a[1]).map(([kind, amount]) =>
    el("tr", {}, el("th", { scope: "row" }, swatch(colourOf(kind)), words(kind)), el("td", { class: "grow" }, bar(amount / schedule.peak_bytes, colourOf(kind), percent(amount / schedule.peak_bytes))), el("td", { class: "right" }, bytes(amount))))));
  const leftOut = (schedule.left_out || []).length ? [hint(`Not counted: what ${schedule.left_out.join(" and ")} holds.`)] : [];
  parts.push(el("div", { class: "two" },
    card("How busy each lane is", lanes),
    card("What the peak is made of", ...leftOut, stackedBar(kinds.map(([kind, amount]) => [kind, amount, bytes(amount)]), schedule.peak_bytes, "The peak"), held)));
  const rows = data.passes.filter((row) => row.graph === graph.graph);
  rows.forEach((row, i) => { row.order = i; });
  const diffOf = (row) => detail && detail.diffs.find((diff) => diff.row === row.order);
  parts.push(card("Passes", table("Passes", [
    { title: "Pass", value: (row) => passName(row, diffOf(row)) },
    { title: "Order", value: (row) => row.order + 1, right: true },
    { title: "Took", value: (row) => row.time_ms, right: true, show: (row) => `${fixed(row.time_ms, 1)} ms` },
    { title: "Nodes", value: (row) => row.nodes_after, right: true, show: (row) => (row.nodes_before === row.nodes_after ? number(row.nodes_after) : `${number(row.nodes_before)} → ${number(row.nodes_after)}`) },
    { title: "Changed", value: (row) => ((diffOf(row) || {}).added || 0) + ((diffOf(row) || {}).removed || 0), right: true, show: (row) => changes(diffOf(row)) },
    { title: "What it noted", value: notesText, wide: true },
  ], rows, { open: detail && detail.diffs.length ? (row) => go.toPass(row.order) : null })));
  const settings = Object.entries(data.settings);
  if (settings.length) {
    parts.push(card("Settings that are not the default", el("dl", { class: "settings" }, settings.map(([name, value]) =>
      [el("dt", {}, el("code", {}, name)), el("dd", {}, el("code", {}, JSON.stringify(value)))]))));
  }
  return parts;
};

const notesText = (row) => Object.entries(row.notes).map(([name, value]) => `${words(name)} ${typeof value === "number" ? number(value) : value}`).join(", ") || "nothing to do";

const changes = (diff) => {
  if (!diff) return "";
  if (!diff.added && !diff.removed) return el("span", { class: "muted" }, "nothing");
  return [el("span", { class: "plus" }, `+${number(diff.added)}`), " ", el("span", { class: "minus" }, `−${number(diff.removed)}`)];
};
