// The graph as blocks that open: phases, layers (alike ones as one), nodes, and the nodes of the piece
// that a node calls. What is inside is made when it is opened. A tree as screen readers know it: the
// arrow keys walk it, Enter opens.

const MOST_FOUND = 200;
const MOST_CHILDREN = 400;
const MOST_OPEN = 4;

const treeItem = (level, label, { inside = null, facts = null }) => {
  const opens = inside || facts;
  const row = el("div", { class: "row", css: { "padding-left": `${(level - 1) * 18}px` } },
    el("span", { class: opens ? "twist" : "twist none", "aria-hidden": "true" }), label);
  const item = el("li", { role: "treeitem", "aria-level": level, "aria-expanded": opens ? "false" : null, tabindex: "-1" }, row);
  let made = null;
  item.open = (wanted) => {
    if (!opens) return;
    if (wanted && !made) {
      made = el("ul", { role: "group" });
      if (facts) made.append(el("li", { role: "none", class: "facts", css: { "padding-left": `${level * 18}px` } }, facts()));
      if (inside) addSome(made, inside(level + 1));
      item.append(made);
    }
    if (made) made.hidden = !wanted;
    item.setAttribute("aria-expanded", String(wanted));
  };
  row.addEventListener("click", () => {
    item.open(item.getAttribute("aria-expanded") !== "true");
    focusItem(item);
  });
  return item;
};

const addSome = (list, makers) => {
  list.append(...makers.slice(0, MOST_CHILDREN).map((make) => make()));
  const left = makers.slice(MOST_CHILDREN);
  if (left.length) {
    const more = el("li", { role: "none" }, button(`Show ${number(left.length)} more`, () => { more.remove(); list.append(...left.map((make) => make())); }));
    list.append(more);
  }
};

const focusItem = (item) => {
  const tree = item.closest("[role=tree]");
  tree.querySelectorAll("[role=treeitem][tabindex='0']").forEach((one) => one.setAttribute("tabindex", "-1"));
  item.setAttribute("tabindex", "0");
  item.focus({ preventScroll: false });
};

const treeKeys = (tree) => tree.addEventListener("keydown", (event) => {
  const item = event.target.closest("[role=treeitem]");
  if (!item || event.target !== item) return;
  const seen = [...tree.querySelectorAll("[role=treeitem]")].filter((one) => one.offsetParent !== null);
  const at = seen.indexOf(item);
  const isOpen = item.getAttribute("aria-expanded") === "true";
  const parent = item.parentElement.closest("[role=treeitem]");
  const does = {
    ArrowDown: () => seen[at + 1] && focusItem(seen[at + 1]),
    ArrowUp: () => seen[at - 1] && focusItem(seen[at - 1]),
    ArrowRight: () => (isOpen ? seen[at + 1] && focusItem(seen[at + 1]) : item.open(true)),
    ArrowLeft: () => (isOpen ? item.open(false) : parent && focusItem(parent)),
    Enter: () => item.open(!isOpen),
    " ": () => item.open(!isOpen),
    Home: () => focusItem(seen[0]),
    End: () => focusItem(seen[seen.length - 1]),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});

const nodeLabel = (node) => [
  swatch(colourOf(node.lane)), el("span", { class: "name" }, node.name), el("span", { class: "op" }, node.operator === node.name ? "" : node.operator),
  el("span", { class: "place" }, node.source && sourceParts(node.source) ? sourceParts(node.source).short : ""),
  el("span", { class: "size" }, node.num_bytes ? bytes(node.num_bytes) : ""), el("span", { class: "time" }, node.us ? time(node.us) : ""),
];

const blocksPanel = (graph, go) => {
  const { detail } = graph;
  if (!detail) return [noDetail()];
  const nodeItem = (node) => (level) => {
    const body = node.piece ? null : detail.pieces.get(node.operator);
    return Object.assign(treeItem(level, nodeLabel(node), {
      facts: () => nodeFacts(graph, node, go),
      inside: body ? (deeper) => body.map((inner) => () => nodeItem(inner)(deeper)) : null,
    }), { node });
  };
  const sums = (blocks) => {
    const us = blocks.reduce((sum, block) => sum + block.us, 0);
    return el("span", { class: "time" }, us ? time(us) : "");
  };
  const layerItem = (block) => (level) => treeItem(level, [
    el("span", { class: "name layer" }, layerName(block.layer)), el("span", { class: "op" }, counted(block.nodes.length, "node")), sums([block]),
  ], { inside: (deeper) => block.nodes.map((node) => () => nodeItem(node)(deeper)) });
  const groupItem = (group) => (level) => {
    if (group.length === 1) return layerItem(group[0])(level);
    return treeItem(level, [
      el("span", { class: "name layer" }, `${layerName(group[0].layer)} … ${layerName(group[group.length - 1].layer)}`),
      el("span", { class: "badge" }, `${group.length} alike`),
      el("span", { class: "op" }, counted(group.reduce((sum, block) => sum + block.nodes.length, 0), "node")), sums(group),
    ], { inside: (deeper) => group.map((block) => () => layerItem(block)(deeper)) });
  };
  const several = detail.blocks.some((block) => block.microStep > 0);
  const phaseItem = (block) => {
    const every = block.groups.flat();
    const name = `${block.phase}${several && block.phase !== "optimizer" && block.phase in PHASES ? `, micro-step ${block.microStep}` : ""}`;
    return Object.assign(treeItem(1, [el("span", { class: "name phase" }, name), el("span", { class: "op" }, counted(every.reduce((sum, one) => sum + one.nodes.length, 0), "node")), sums(every)],
      { inside: (level) => (block.phase in PHASES
        ? block.groups.map((group) => () => groupItem(group)(level))
        : every.flatMap((one) => one.nodes).map((node) => () => nodeItem(node)(level))) }), { phase: block.phase });
  };

  const tree = el("ul", { role: "tree", "aria-label": "The graph", class: "tree" });
  treeKeys(tree);
  const folded = () => {
    tree.replaceChildren(...detail.blocks.map(phaseItem));
    tree.querySelectorAll(":scope > li").forEach((item) => item.open(detail.blocks.length <= MOST_OPEN && item.phase in PHASES));
    tree.firstElementChild.setAttribute("tabindex", "0");
  };
  folded();

  const said = el("span", { class: "where", role: "status" });
  const hay = detail.nodes.map((node) => [node.name, node.operator, node.module, node.layer, node.bucket, node.made_by, node.piece, ...node.params, node.source].join("\n").toLowerCase());
  const find = () => {
    const wanted = box.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    if (!wanted.length) {
      said.replaceChildren();
      return folded();
    }
    const is = (node) => node.name.toLowerCase() === wanted[0];
    const matching = detail.nodes.filter((node, i) => wanted.every((word) => hay[i].includes(word)));
    const found = [...matching.filter(is), ...matching.filter((node) => !is(node))];
    said.replaceChildren(`${number(found.length)} of ${number(detail.nodes.length)} nodes${found.length > MOST_FOUND ? `, the first ${MOST_FOUND} shown` : ""}`);
    tree.replaceChildren(...found.slice(0, MOST_FOUND).map((node) => nodeItem(node)(1)));
    if (tree.firstElementChild) tree.firstElementChild.setAttribute("tabindex", "0");
    return undefined;
  };
  const box = el("input", { type: "search", id: "search", placeholder: "Operator, module, parameter, file:line …", autocomplete: "off", spellcheck: "false", on: { input: find } });
  go.search = (name, piece) => {
    box.value = name;
    find();
    const items = [...tree.children];
    const exact = items.find((item) => item.node.name === name && item.node.piece === (piece || "")) || items.find((item) => item.node.name === name);
    if (exact) {
      tree.prepend(exact);
      exact.open(true);
      focusItem(exact);
    }
  };
  return [card("The graph",
    el("div", { class: "searchbar" }, el("label", { for: "search" }, "Search"), box, button("Fold all", () => { box.value = ""; find(); }), said),
    el("div", { class: "treehead", "aria-hidden": "true" }, el("span", {}, "in launch order"), el("span", { class: "size" }, "size"), el("span", { class: "time" }, "time alone")), tree,
    hint("Layers that compute alike are one block until it is opened. Arrow keys walk the tree, Enter opens. Times are of each node by itself; a region of several takes less than their sum."))];
};
