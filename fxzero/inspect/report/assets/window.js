// The stretch of time that is looked at: timeline and memory of a graph share it.

const LEAST_US = 0.5;

const timeWindow = (end) => {
  const full = Math.max(end, 1);
  const listeners = [];
  const view = {
    full,
    low: 0,
    high: full,
    set(low, high) {
      const size = Math.min(full, Math.max(LEAST_US, high - low));
      view.low = Math.min(Math.max(0, low), full - size);
      view.high = view.low + size;
      listeners.forEach((listener) => listener());
    },
    zoom(factor, at = (view.low + view.high) / 2) {
      const size = Math.min(full, Math.max(LEAST_US, (view.high - view.low) * factor));
      const share = (at - view.low) / (view.high - view.low);
      view.set(at - share * size, at + (1 - share) * size);
    },
    pan(share) {
      const by = (view.high - view.low) * share;
      view.set(view.low + by, view.high + by);
    },
    fit: () => view.set(0, full),
    show(start, us) {
      if (start < view.low || start + us > view.high) {
        const size = Math.max(view.high - view.low, us * 1.2);
        view.set(start + us / 2 - size / 2, start + us / 2 + size / 2);
      }
    },
    onChange: (listener) => listeners.push(listener),
  };
  return view;
};

// Wheel, drag and keys of a canvas. `left` is where time begins, in pixels; `wheel` is "always", or
// "ctrl" where the page must still scroll.
const steer = (canvas, view, { left, wheel = "always", keys = () => false, click = () => {} }) => {
  const width = () => canvas.clientWidth - left;
  const timeAt = (event) => view.low + ((event.offsetX - left) / width()) * (view.high - view.low);
  canvas.addEventListener("wheel", (event) => {
    if (wheel === "ctrl" && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan((event.deltaX || event.deltaY) / width());
    } else {
      view.zoom(Math.exp(event.deltaY * 0.0018), timeAt(event));
    }
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, low: view.low, high: view.high, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
    if (!drag.moved) return;
    const by = ((drag.x - event.clientX) / width()) * (drag.high - drag.low);
    view.set(drag.low + by, drag.high + by);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) click(event, timeAt(event));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("dblclick", (event) => view.zoom(0.4, timeAt(event)));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const does = {
      "+": () => view.zoom(0.6), "=": () => view.zoom(0.6), w: () => view.zoom(0.6),
      "-": () => view.zoom(1 / 0.6), _: () => view.zoom(1 / 0.6), s: () => view.zoom(1 / 0.6),
      ArrowLeft: () => view.pan(-0.2), a: () => view.pan(-0.2),
      ArrowRight: () => view.pan(0.2), d: () => view.pan(0.2),
      0: view.fit, Home: view.fit,
    }[event.key];
    if (does) does();
    else if (!keys(event)) return;
    event.preventDefault();
  });
};

// Buttons for those who use neither wheel nor keys, and where one is.
const windowTools = (view) => {
  const where = el("span", { class: "where", "aria-live": "polite" });
  const say = () => where.replaceChildren(`${time(view.low)} to ${time(view.high)} of ${time(view.full)}`);
  view.onChange(say);
  say();
  return el("div", { class: "windowtools", role: "toolbar", "aria-label": "Zoom" },
    button("−", () => view.zoom(1 / 0.6), { "aria-label": "Zoom out" }),
    button("+", () => view.zoom(0.6), { "aria-label": "Zoom in" }),
    button("‹", () => view.pan(-0.3), { "aria-label": "Earlier" }),
    button("›", () => view.pan(0.3), { "aria-label": "Later" }),
    button("Whole step", view.fit), where);
};

// The ruler of a canvas; also lines down to its bottom.
const drawRuler = (context, view, left, width, height) => {
  const scale = (width - left) / (view.high - view.low);
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const tick of ticks(view.low, view.high, Math.max(2, (width - left) / 110))) {
    const x = Math.round(left + (tick - view.low) * scale) + 0.5;
    context.fillStyle = themed("grid");
    context.fillRect(x, 18, 1, height - 18);
    context.fillStyle = themed("muted");
    if (x < width - 40) context.fillText(time(Math.round(tick * 1000) / 1000), x + 3, 9);
  }
};
