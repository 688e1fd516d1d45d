// Tabs, themes, and which graph is looked at. A tab is made when it is first opened.

const setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("themechange"));
};

const themeButton = () => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const label = () => (isDark() ? "Light" : "Dark");
  const made = button(label(), () => {
    setTheme(isDark() ? "light" : "dark");
    made.replaceChildren(label());
  }, { id: "theme", title: "Change between light and dark" });
  dark.addEventListener("change", () => {
    made.replaceChildren(label());
    document.dispatchEvent(new Event("themechange"));
  });
  return made;
};

const start = (data) => {
  const { about } = data;
  document.getElementById("title").replaceChildren(data.title);
  const chips = [`ZeRO-${about.zero}`, counted(about.world_size, "rank"), about.rank ? `rank ${about.rank}` : null, `${short(about.num_parameters)} parameters`];
  document.getElementById("chips").replaceChildren(...chips.filter(Boolean).map((text) => el("span", { class: "chip" }, text)));

  const bar_ = document.getElementById("tabs");
  const panels = document.getElementById("panels");
  let opened = "overview";
  let graph = data.graphs[0];
  let view = null;
  let made = new Map();

  if (!graph) {
    panels.replaceChildren(hint("No graph of this analysis was kept."));
    return;
  }

  const hasMeasured = data.graphs.some((one) => one.detail && one.detail.measured.length);
  const go = {
    toTimeline(name) {
      open("timeline");
      go.toSpan(name);
    },
    toNode(name, piece) {
      open("graph");
      go.search(name, piece);
    },
    toPass(at) {
      open("passes");
      go.showPass(at);
    },
  };
  const kinds = [
    ["overview", "Overview", () => overviewPanel(data, graph, view, go)],
    ["timeline", "Timeline", () => timelinePanel(graph, view, go)],
    ["memory", "Memory", () => memoryPanel(graph, view, go)],
    ["traffic", "Traffic", () => trafficPanel(data, graph)],
    ["graph", "Graph", () => blocksPanel(graph, go)],
    ["passes", "Passes", () => diffsPanel(data, graph, go)],
    ...(hasMeasured ? [["measured", "Measured", () => measuredPanel(graph, go)]] : []),
    ...(data.against ? [["compare", "Compare", () => comparePanel(data, graph)]] : []),
  ];

  const open = (name, focus = false) => {
    opened = name;
    tooltip.hide();
    for (const [kind, , make] of kinds) {
      const tab = document.getElementById(`tab-${kind}`);
      tab.setAttribute("aria-selected", String(kind === name));
      tab.setAttribute("tabindex", kind === name ? "0" : "-1");
      if (kind === name && !made.has(kind)) {
        const panel = el("section", { role: "tabpanel", id: `panel-${kind}`, "aria-labelledby": `tab-${kind}`, class: "panel" }, make());
        made.set(kind, panel);
        panels.append(panel);
      }
      if (made.has(kind)) made.get(kind).hidden = kind !== name;
      if (kind === name && focus) tab.focus();
    }
    if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  };

  const show = (number_) => {
    graph = data.graphs[number_];
    const ends = graph.detail ? graph.detail.spans.map((span) => span.start_us + span.us) : [];
    view = timeWindow(ends.reduce((a, b) => Math.max(a, b), graph.schedule.makespan_us));
    made = new Map();
    panels.replaceChildren();
    open(opened);
  };

  bar_.replaceChildren(...kinds.map(([kind, label]) => button(label, () => open(kind), { role: "tab", id: `tab-${kind}`, "aria-controls": `panel-${kind}`, class: "tab" })));
  bar_.addEventListener("keydown", (event) => {
    const at = kinds.findIndex(([kind]) => kind === opened);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: kinds.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(kinds[(to + kinds.length) % kinds.length][0], true);
  });

  const tools = document.getElementById("tools");
  if (data.graphs.length > 1) {
    const choice = el("select", { id: "graphs", "aria-label": "Graph", on: { change: () => show(Number(choice.value)) } },
      data.graphs.map((one, i) => el("option", { value: i }, `graph ${one.graph}: ${time(one.schedule.makespan_us)}`)));
    tools.append(choice);
  }
  tools.append(themeButton());
  const asked = location.hash.slice(1);
  if (kinds.some(([kind]) => kind === asked)) opened = asked;
  show(0);
  // Behind the first frame that shows something: how long opening took, for whoever measures it.
  requestAnimationFrame(() => setTimeout(() => {
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }));
};

if (typeof DecompressionStream === "undefined") {
  document.getElementById("panels").replaceChildren(hint("This browser is too old to open the report: one of 2023 or later can."));
} else {
  unpack().then(read).then(start).catch((error) => {
    document.getElementById("panels").replaceChildren(hint("This file is damaged: write the report again."));
    throw error;
  });
}
