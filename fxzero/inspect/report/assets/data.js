// The page's data: base64 of gzip of JSON, with rows as columns and strings as numbers.

const unpack = async () => {
  const text = JSON.parse(document.getElementById("data").textContent);
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

const TEXTS = {
  spans: ["node", "name", "layer", "lane"],
  stalls: ["node", "lane"],
  alive: ["node", "kind"],
  nodes: ["name", "text", "operator", "phase", "lane", "role", "layer", "module", "bucket", "made_by", "again",
    "piece", "source"],
  traffic: ["module", "operator", "lane"],
  transfers: ["bucket", "phase", "lane", "operator", "layer"],
};
const LISTS = { nodes: ["params", "inputs"], transfers: ["params"] };

// Columns as rows: what is a number of a string becomes the string.
const rowsOf = (kind, columns, strings) => {
  const names = Object.keys(columns);
  const count = names.length ? columns[names[0]].length : 0;
  const texts = new Set(TEXTS[kind] || []);
  const lists = new Set(LISTS[kind] || []);
  return Array.from({ length: count }, (_, i) => {
    const row = { at: i };
    for (const name of names) {
      const value = columns[name][i];
      row[name] = texts.has(name) ? strings[value] : lists.has(name) ? value.map((n) => strings[n]) : value;
    }
    return row;
  });
};

const overTime = (raw, strings) => ({
  spans: rowsOf("spans", raw.spans, strings),
  stalls: rowsOf("stalls", raw.stalls, strings),
  repeats: raw.repeats,
  kinds: raw.kinds,
  held: { ...raw.held, node: raw.held.node.map((n) => strings[n]) },
});

const detailOf = (raw, strings) => {
  const nodes = rowsOf("nodes", raw.nodes, strings);
  const byName = new Map();
  for (const node of nodes) if (!byName.has(node.name)) byName.set(node.name, node);
  const pieces = new Map(Object.entries(raw.pieces).map(([n, places]) => [strings[n], places.map((i) => nodes[i])]));
  const blocks = raw.blocks.map((block) => ({
    phase: block.phase,
    microStep: block.micro_step,
    groups: block.groups.map((group) => group.map(([layer, places, us]) => ({
      layer: strings[layer], nodes: places.map((i) => nodes[i]), us,
    }))),
  }));
  return {
    ...overTime(raw, strings),
    alive: rowsOf("alive", raw.alive, strings),
    aliveLeftOut: raw.alive_left_out,
    traffic: rowsOf("traffic", raw.traffic, strings),
    byLayer: raw.by_layer,
    nodes,
    byName,
    pieces,
    blocks,
    decisions: raw.decisions,
    diffs: raw.diffs,
    measured: raw.measured.map((run) => ({ ...run, spans: rowsOf("spans", run.spans, strings) })),
  };
};

const read = (raw) => {
  const { strings } = raw;
  const against = raw.against && {
    ...raw.against,
    graphs: raw.against.graphs.map((graph) => ({ ...graph, detail: overTime(graph, strings) })),
  };
  return {
    ...raw,
    graphs: raw.graphs.map((graph) => ({ ...graph, detail: graph.detail && detailOf(graph.detail, strings) })),
    transfers: rowsOf("transfers", raw.transfers, strings),
    against,
  };
};
