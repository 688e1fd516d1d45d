// Tables that sort by any column. A column is {title, value(row), show(row), right, wide}; a click or
// Enter on its title sorts by it, numbers from the largest.

const MOST_ROWS = 250;

const table = (label, columns, rows, { sort = null, open = null, marked = null } = {}) => {
  let order = sort;
  let limit = MOST_ROWS;
  const head = el("tr");
  const body = el("tbody");
  const more = el("div", { class: "more" });

  const sorted = () => {
    if (!order) return rows;
    const { value } = columns[order.column];
    const way = order.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return way * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    });
  };

  const draw = () => {
    const every = sorted();
    body.replaceChildren(...every.slice(0, limit).map((row) => {
      const cells = columns.map((column, i) => {
        const shown = (column.show || column.value)(row);
        const inside = i === 0 && open ? button(shown, () => open(row), { class: "link" }) : shown;
        return el(i ? "td" : "th", { class: `${column.right ? "right" : ""} ${column.wide ? "wide" : ""}`, scope: i ? null : "row" }, inside);
      });
      return el("tr", { class: marked && marked(row) ? "marked" : null }, cells);
    }));
    head.replaceChildren(...columns.map((column, i) => {
      const down = order && order.column === i && order.down;
      const is = order && order.column === i ? (down ? "descending" : "ascending") : "none";
      const arrow = el("span", { class: "arrow", "aria-hidden": "true" }, is === "none" ? "" : down ? "▼" : "▲");
      const choose = () => {
        const first = columns[i].right === true;
        order = { column: i, down: order && order.column === i ? !order.down : first };
        draw();
        head.children[i].querySelector("button").focus();
      };
      return el("th", { scope: "col", class: column.right ? "right" : null, "aria-sort": is },
        button([column.title, arrow], choose, { class: "sorter" }));
    }));
    const left = every.length - limit;
    more.replaceChildren(...(left > 0
      ? [button(`Show ${number(left)} more`, () => { limit = Infinity; draw(); })]
      : []));
  };
  draw();
  return el("div", { class: "table" },
    el("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": label },
      el("table", {}, el("caption", { class: "unseen" }, label), el("thead", {}, head), body)), more);
};

// A share as a bar behind its number.
const bar = (share, colour, label) =>
  el("span", { class: "bar" },
    el("span", { class: "fill", css: { width: `${Math.min(100, share * 100)}%`, background: colour } }),
    el("span", { class: "text" }, label));
