// What each pass changed: a list of passes, and the unified diff of the graph's text.

const passName = (row, diff) => (diff && diff.side ? `${row.name} (${diff.side})` : row.name);

const diffLines = (lines) => {
  const kinds = { "+": "plus", "-": "minus", "@": "hunk" };
  return el("pre", { class: "diff", tabindex: "0", role: "region", "aria-label": "Diff" },
    lines.map((line) => el("span", { class: kinds[line[0]] || "same" }, `${line}\n`)));
};

const diffsPanel = (data, graph, go) => {
  const rows = data.passes.filter((row) => row.graph === graph.graph);
  const { detail } = graph;
  const diffs = new Map(detail ? detail.diffs.map((diff) => [diff.row, diff]) : []);
  const shown = el("div", { class: "shownpass", role: "region", "aria-label": "What the pass changed", "aria-live": "polite" });
  const list = el("div", { class: "passes", role: "radiogroup", "aria-label": "Passes" });
  const show = (at, focus = false) => {
    const row = rows[at];
    const diff = diffs.get(at);
    [...list.children].forEach((one, i) => {
      one.setAttribute("aria-checked", String(i === at));
      one.setAttribute("tabindex", i === at ? "0" : "-1");
    });
    if (focus) list.children[at].focus();
    const decision = detail && detail.decisions[row.name];
    shown.replaceChildren(...[
      el("h3", {}, passName(row, diff), " ", changes(diff)),
      el("p", {}, notesText(row)),
      el("p", { class: "hint" }, el("code", {}, row.options), `, ${fixed(row.time_ms, 1)} ms, ${number(row.nodes_before)} → ${number(row.nodes_after)} nodes`),
      decision ? el("details", {}, el("summary", {}, "What it decided"), el("pre", { class: "wrap" }, JSON.stringify(decision, null, 1))) : null,
      !diff ? hint("No text of the graph was kept.") : null,
      diff && !diff.lines.length ? hint("It left the graph as it was.") : null,
      diff && diff.lines.length ? diffLines(diff.lines) : null,
      diff && diff.left_out ? hint(`${number(diff.left_out)} more lines are left out here. All of them: `, el("code", {}, `fxzero inspect TARGET --diff ${row.name}`)) : null,
    ].filter(Boolean));
  };
  rows.forEach((row, at) => {
    const diff = diffs.get(at);
    list.append(button([el("span", { class: "passname" }, passName(row, diff)), changes(diff)], () => show(at), { role: "radio", "aria-checked": "false", class: "pass", "data-pass": row.name }));
  });
  list.addEventListener("keydown", (event) => {
    const at = [...list.children].indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    show(Math.min(Math.max(to, 0), rows.length - 1), true);
  });
  if (!rows.length) return [hint("No pass ran.")];
  const first = rows.findIndex((row, at) => row.name === "shard_params" && (diffs.get(at) || {}).added);
  show(Math.max(first, 0));
  go.showPass = (at) => show(at, true);
  return [card("What each pass changed", el("div", { class: "sidebyside" }, list, shown))];
};
