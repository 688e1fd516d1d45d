// What moves: by collective, by layer, by bucket.

const summed = (rows, keyOf) => {
  const found = new Map();
  for (const row of rows) {
    const key = keyOf(row);
    const sum = found.get(key) || { ...row, buckets: 0, travels: 0, num_bytes: 0, sent_bytes: 0, params: 0 };
    sum.buckets += 1;
    sum.travels += row.runs;
    sum.params += row.params.length * row.runs;
    sum.num_bytes += row.num_bytes * row.runs;
    sum.sent_bytes += row.sent_bytes;
    found.set(key, sum);
  }
  return [...found.values()];
};

const operatorName = (row) => words(row.operator).replace("all gather", "all-gather").replace("reduce scatter", "reduce-scatter").replace("all reduce", "all-reduce").replace("all to all", "all-to-all");

// Modules of layers as one row, `blocks.*.attention`, or each by itself.
const byModule = (rows, operator, count, size) => {
  const place = el("div");
  const draw = (apart) => {
    const found = new Map();
    for (const row of rows) {
      const module = apart ? row.module : row.module.replace(/\.\d+(?=\.|$)/g, ".*");
      const key = `${module} ${row.operator} ${row.lane}`;
      const sum = found.get(key) || { ...row, module, modules: 0, tensors: 0, num_bytes: 0, sent_bytes: 0 };
      sum.modules += 1;
      for (const name of ["tensors", "num_bytes", "sent_bytes"]) sum[name] += row[name];
      found.set(key, sum);
    }
    const shown = [...found.values()];
    place.replaceChildren(table("Traffic by module", [{ title: "Module", value: (row) => layerName(row.module) }, operator,
      ...(apart ? [] : [count("modules", "Modules")]), count("tensors", "Tensors"), size("num_bytes", "Full tensors", shown), size("sent_bytes", "Sent by each rank", shown)],
    shown, { sort: { column: apart ? 3 : 4, down: true } }));
  };
  draw(false);
  const choice = el("input", { type: "checkbox", id: "apart", on: { change: () => draw(choice.checked) } });
  return card("By module", el("label", { class: "choice", for: "apart" }, choice, " each layer by itself"), place,
    hint("A bucket of several modules is shared out by the size of their parameters."));
};

const trafficPanel = (data, graph) => {
  const rows = data.transfers.filter((row) => row.graph === graph.graph);
  if (!rows.length) return [hint("Nothing moves between ranks or pools in this graph.")];
  const operator = { title: "Collective or copy", value: operatorName, show: (row) => [swatch(colourOf(row.lane)), operatorName(row)] };
  const most = (name, among) => Math.max(...among.map((row) => row[name]), 1);
  const size = (name, title, among) => ({
    title, value: (row) => row[name], right: true, show: (row) => bar(row[name] / most(name, among), colourOf(row.lane), bytes(row[name])),
  });
  const count = (name, title) => ({ title, value: (row) => row[name], right: true, show: (row) => number(row[name]) });
  const byCollective = summed(rows, (row) => row.operator);
  const layer = { title: "Layer", value: (row) => layerName(row.layer) };
  return [
    card("By collective", table("Traffic by collective", [operator, count("buckets", "Buckets"), count("travels", "Times a step"), count("params", "Tensors"),
      size("num_bytes", "Full tensors", byCollective), size("sent_bytes", "Sent by each rank", byCollective)], byCollective, { sort: { column: 4, down: true } }),
    hint("Sent by each rank: (n − 1)/n of the full tensors in a ring of n ranks, twice that of an all-reduce; a copy between pools sends nothing to others.")),
    ...(graph.detail && graph.detail.traffic.length ? [byModule(graph.detail.traffic, operator, count, size)] : []),
    card("By bucket, in launch order", table("Traffic by bucket", [
      { title: "Bucket", value: (row) => row.bucket },
      operator,
      { title: "Phase", value: (row) => row.phase },
      layer,
      { title: "Tensors", value: (row) => row.params.length, right: true },
      { title: "Parameters", value: (row) => row.params.join(", "), show: (row) => (row.params.length ? someNames(row.params) : ""), wide: true },
      { title: "Times", value: (row) => row.runs, right: true },
      { title: "Ranks", value: (row) => row.num_ranks, right: true },
      size("num_bytes", "Full tensors", rows),
      { title: "Sent", value: (row) => row.sent_bytes, right: true, show: (row) => bytes(row.sent_bytes) },
    ], rows)),
  ];
};
