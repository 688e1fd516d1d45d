// Elements from data. Whatever is shown goes in as text: nothing here, or anywhere else in this
// page, makes markup of a string.

const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (name === "css") {
      for (const [property, worth] of Object.entries(value)) made.style.setProperty(property, worth);
    } else {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
};

const button = (label, listener, attributes = {}) =>
  el("button", { type: "button", ...attributes, on: { click: listener } }, label);

const swatch = (colour) => el("span", { class: "swatch", css: { background: colour }, "aria-hidden": "true" });

const figure = (label, value, note) =>
  el("div", { class: "figure" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value),
    note ? el("div", { class: "note" }, note) : null);

const card = (title, ...children) =>
  el("section", { class: "card", "aria-label": title }, el("h2", {}, title), ...children);

const hint = (...children) => el("p", { class: "hint" }, ...children);

// A canvas that is as wide as its container and sharp on any screen; `draw` gets its context and
// its size, whenever the size, the theme or what it shows has changed.
const canvasOf = (height, label, draw) => {
  const canvas = el("canvas", { role: "application", "aria-label": label, tabindex: "0" });
  const holder = el("div", { class: "canvas", css: { height: `${height}px` } }, canvas);
  let asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      const width = holder.clientWidth;
      const tall = holder.clientHeight;
      if (!width) return;
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(tall * ratio);
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, tall);
      draw(context, width, tall);
    });
  };
  new ResizeObserver(redraw).observe(holder);
  document.addEventListener("themechange", redraw);
  return { canvas, holder, redraw };
};

// Colours of the page as they are now, for what is drawn and not styled.
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const FONT = '11px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// Text that is cut to fit, or another one that fits instead; nothing where not even three letters
// would.
const fitText = (context, text, x, y, room, instead = null) => {
  if (room < 15) return;
  let shown = text;
  if (instead && context.measureText(text).width > room) shown = instead;
  const width = context.measureText(shown).width;
  if (width > room) {
    let letters = Math.floor((room / width) * shown.length);
    while (letters > 2 && context.measureText(`${shown.slice(0, letters)}…`).width > room) letters -= 1;
    if (letters < 3) return;
    shown = `${shown.slice(0, letters)}…`;
  }
  context.fillText(shown, x, y);
};

const tooltip = (() => {
  const box = el("div", { class: "tooltip", role: "tooltip", hidden: true });
  document.body.append(box);
  return {
    show(event, lines) {
      box.replaceChildren(...lines.map((line, i) => el(i ? "div" : "strong", {}, line)));
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      const x = Math.min(event.clientX + 14, window.innerWidth - width - 8);
      const y = event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 12 : event.clientY + 18;
      box.style.left = `${Math.max(8, x)}px`;
      box.style.top = `${Math.max(8, y)}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
})();
