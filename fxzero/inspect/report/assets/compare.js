// Two analyses: where they differ.

const amount = (value, unit) => (unit === "us" ? time(value) : unit === "B" ? bytes(value) : number(value));

const comparePanel = (data, graph) => {
  const { against } = data;
  const change = (row) => {
    const by = row.this - row.other;
    if (!by) return el("span", { class: "muted" }, "same");
    const share = row.other ? ` (${by > 0 ? "+" : "−"}${percent(Math.abs(by / row.other))})` : "";
    return `${by > 0 ? "+" : "−"}${amount(Math.abs(by), row.unit)}${share}`;
  };
  const named = (name, title, about) => [el("dt", {}, name), el("dd", {}, el("code", {}, title), ` ZeRO-${about.zero}, ${counted(about.world_size, "rank")}, ${number(about.num_parameters)} parameters`)];
  const figures = card("Figures", el("dl", {}, named("This", data.title, data.about), named("Against", against.title, against.about)),
    table("Figures that differ", [
      { title: "Figure", value: (row) => row.name },
      { title: "Against", value: (row) => row.other, right: true, show: (row) => amount(row.other, row.unit) },
      { title: "This", value: (row) => row.this, right: true, show: (row) => amount(row.this, row.unit) },
      { title: "Change", value: (row) => (row.other ? row.this / row.other - 1 : row.this ? 1 : 0), right: true, show: change },
    ], against.figures, { marked: (row) => row.this !== row.other }));
  const parts = [figures];
  const other = against.graphs.find((one) => one.graph === graph.graph);
  if (other && graph.detail && other.detail.spans.length && graph.detail.spans.length) {
    const view = timeWindow(Math.max(other.schedule.makespan_us, graph.schedule.makespan_us));
    const part = (name, detail) => el("div", {}, el("h3", { class: "inner" }, name),
      timeline([...stripsOf(detail).filter((row) => row.name === "layer"), ...lanesOf(detail)], view, { label: name }).holder,
      detail.held.start_us.length ? memoryChart(detail, view, { height: 150 }).holder : null);
    parts.push(card("Both steps on one clock", laneLegend(graph.detail), windowTools(view), part("Against", other.detail), part("This", graph.detail)));
  }
  const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));
  const sides = [{ title: "Against", value: (row) => shown(row.other) }, { title: "This", value: (row) => shown(row.this) }];
  const orNothing = (rows, what, made) => (rows.length ? made : hint(`No difference in ${what}.`));
  parts.push(card("Settings", orNothing(against.changed, "settings", table("Settings that differ", [{ title: "Setting", value: (row) => row.name }, ...sides], against.changed))));
  parts.push(card("What passes noted", orNothing(against.notes, "what passes noted", table("Notes that differ", [
    { title: "Pass", value: (row) => row.pass, show: (row) => (row.run ? `${row.pass} (run ${row.run + 1})` : row.pass) },
    { title: "Graph", value: (row) => row.graph, right: true },
    { title: "Note", value: (row) => words(row.name) }, ...sides], against.notes))));
  const bucket = (one) => (one ? `${words(one.operator)}, ${number(one.params)} tensors, ${bytes(one.num_bytes)}${one.runs > 1 ? ` × ${one.runs}` : ""}` : "–");
  parts.push(card("Buckets", orNothing(against.buckets, "buckets", table("Buckets that differ", [
    { title: "Bucket", value: (row) => row.bucket },
    { title: "Graph", value: (row) => row.graph, right: true },
    { title: "Against", value: (row) => bucket(row.other) },
    { title: "This", value: (row) => bucket(row.this) }], against.buckets))));
  return parts;
};
