// All that is known of one node, with ways to where else it is shown.

const sourceLine = (source) => {
  const parts = sourceParts(source);
  if (!parts) return el("code", {}, source);
  return el("span", { class: "source", title: parts.file },
    el("code", {}, parts.short), ` in ${parts.place} `, parts.code ? el("code", { class: "code" }, parts.code) : null);
};

const nodeCard = (graph, name, go, span = null) => {
  const node = graph.detail.byName.get(name);
  if (!node) return el("div", { class: "node" }, el("h3", {}, name), hint("No node of the outline has this name."));
  return nodeFacts(graph, node, go, span);
};

const nodeFacts = (graph, node, go, span = null) => {
  const facts = [
    ["operator", el("code", {}, node.operator)],
    ["runs", span ? `${time(span.us)} from ${time(span.start_us)}${span.runs > 1 ? `, ${span.runs} times a step` : ""}` : null],
    ["by itself", node.us ? time(node.us) : null],
    ["makes", node.num_bytes ? bytes(node.num_bytes) : null],
    ["where", [node.phase, node.lane, node.role].filter(Boolean).map(words).join(" · ") || null],
    ["micro-step", node.micro_step ? String(node.micro_step) : null],
    ["layer", node.layer || null],
    ["module", node.module || null],
    ["bucket", node.bucket || null],
    ["made by", node.made_by && node.made_by !== "capture" ? node.made_by : null],
    ["repeats", node.again || null],
    ["parameters", node.params.length ? someNames(node.params) : null],
    ["reads", node.inputs.length && go ? el("span", { class: "inputs" }, node.inputs.slice(0, 12).map((name) =>
      button(name, () => go.toNode(name, node.piece), { class: "link" })), node.inputs.length > 12 ? ` and ${node.inputs.length - 12} more` : null) : null],
    ["source", node.source ? sourceLine(node.source) : null],
  ].filter(([, value]) => value);
  const ways = go ? [
    button("Show in the graph", () => go.toNode(node.name, node.piece)),
    graph.detail.spans.some((one) => one.node === node.name) ? button("Show on the timeline", () => go.toTimeline(node.name)) : null,
  ] : [];
  return el("div", { class: "node" }, el("h3", {}, swatch(colourOf(node.lane)), node.name),
    el("pre", { class: "wrap" }, node.text),
    el("dl", {}, facts.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)])),
    el("div", { class: "ways" }, ways));
};

const someNames = (names) => {
  if (names.length <= 3) return names.join(", ");
  return el("details", {}, el("summary", {}, `${names.length}: ${names[0]} …`), el("div", { class: "namelist" }, names.join(", ")));
};
