// Figures as people read them, and one colour for one thing everywhere. The colours keep apart for
// people who see red and green alike (after Okabe and Ito); what a lane brings has its lane's.

const COLOURS = {
  compute: "#4a86c5",
  gather: "#e69f00",
  reduce: "#009e73",
  all_to_all: "#b8860b",
  send: "#c2a500",
  receive: "#8d8741",
  h2d: "#56b4e9",
  d2h: "#8073ac",
  host: "#7f8c8d",
  read: "#2aa198",
  write: "#a6559d",
  parameters: "#3f5fa8",
  optimizer_state: "#cc79a7",
  inputs: "#8a94a6",
  gathered: "#e69f00",
  gradients: "#009e73",
  activations: "#74b3e3",
  workspace: "#d55e00",
};
const colourOf = (name) => COLOURS[name] || "#8a94a6";
const LANES = Object.keys(COLOURS).slice(0, 11);
const PHASES = { forward: "#9aa7b8", backward: "#6c7b8f", optimizer: "#b48ead" };

const fixed = (value, digits) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const number = (value) => value.toLocaleString("en");

// Three digits that count.
const digitsOf = (value) => (Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2);

const time = (us) => {
  if (us === 0) return "0";
  if (Math.abs(us) < 1e3) return `${fixed(us, digitsOf(us))} µs`;
  if (Math.abs(us) < 1e6) return `${fixed(us / 1e3, digitsOf(us / 1e3))} ms`;
  return `${fixed(us / 1e6, digitsOf(us / 1e6))} s`;
};

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const bytes = (count) => {
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? number(value) : fixed(value, digitsOf(value))} ${UNITS[unit]}`;
};

const SCALES = [[1e12, "T"], [1e9, "B"], [1e6, "M"]];
const short = (count) => {
  const scale = SCALES.find(([size]) => count >= size);
  return scale ? `${fixed(count / scale[0], digitsOf(count / scale[0]))}${scale[1]}` : number(count);
};

const flops = (count) => {
  const [size, unit] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1, ""]].find(([least]) => count >= least) || [1, ""];
  return `${fixed(count / size, digitsOf(count / size))} ${unit}FLOP`;
};

const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

const percent = (share) => `${fixed(share * 100, 1)} %`;
const words = (name) => name.replaceAll("_", " ");
const layerName = (layer) => layer || "(root)";
const layerTail = (layer) => layer.split(".").slice(-2).join(".") || null;

// Steps of an axis: 1, 2 or 5 of some power of ten, about `count` of them.
const ticks = (low, high, count, base = 10) => {
  const rough = (high - low) / count;
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((n) => n * power).find((n) => n >= rough) || power;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
};

// `File "a/b/models.py", line 136, in forward x = …` as its parts.
const sourceParts = (source) => {
  const found = /^File "(.*)", line (\d+), in (\S+) ?(.*)$/s.exec(source);
  if (!found) return null;
  const [, file, line, place, code] = found;
  return { file, line, place, code, short: `${file.split(/[\\/]/).slice(-2).join("/")}:${line}` };
};
