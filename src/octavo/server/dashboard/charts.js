// The last minutes as small charts that share one clock. Rates come from counters, so a missed sample loses nothing.

import { $, h, setText, swatch } from "./dom.js";
import { bytes, count, decimal, milliseconds, percent, time } from "./format.js";
import { MINUTES } from "./store.js";

const WIDTH = 300;
const HEIGHT = 72;
const SPAN_S = 60 * MINUTES;
const RATE_S = 10;
const GAP_S = 12;
const SVG = "http://www.w3.org/2000/svg";

// Over the last RATE_S seconds up to each sample: how much `top` grew for each that `bottom` did.
function ratio(history, top, bottom) {
  const { time } = history;
  let from = 0;
  return time.map((t, i) => {
    while (time[from] < t - RATE_S) from += 1;
    const k = Math.max(0, Math.min(from, i - 1));
    const grown = bottom(i) - bottom(k);
    return grown > 0 ? (top(i) - top(k)) / grown : NaN;
  });
}

const column = (history, name) => (i) => history[name]?.[i] ?? NaN;
const both = (a, b) => (i) => a(i) + b(i);

// Each chart: its lines as [name, class, values], how a value reads, and the top of its scale, if that is fixed.
const CHARTS = [
  {
    title: "Hit rate",
    read: percent,
    top: () => 1,
    lines: (s, c) => {
      const asked = both(c("reused_tokens"), c("computed_tokens"));
      return [["of prompt tokens", "line-reused", ratio(s.history, c("reused_tokens"), asked)]];
    },
  },
  {
    title: "Memory",
    read: bytes,
    top: (s) => s.bytesTotal,
    lines: (s) => {
      const { bytes_free: free, bytes_running: used } = s.history;
      return [
        ["held", "line-cached", (free ?? []).map((n) => s.bytesTotal - n)],
        ["in use", "line-running", used ?? []],
      ];
    },
  },
  {
    title: "Pressure: thrown away per second",
    read: decimal,
    lines: (s, c) => [
      ["blocks", "line-lost", ratio(s.history, c("reclaimed_blocks"), c("time"))],
      ["preemptions", "line-pinned", ratio(s.history, c("preemptions"), c("time"))],
    ],
  },
  {
    title: "Requests",
    read: count,
    lines: (s) => [
      ["running", "line-running", s.history.running ?? []],
      ["waiting", "line-pinned", s.history.waiting ?? []],
    ],
  },
  {
    title: "Tokens per second",
    read: count,
    lines: (s, c) => [
      ["prompt", "line-computed", ratio(s.history, both(c("reused_tokens"), c("computed_tokens")), c("time"))],
      ["generated", "line-generated", ratio(s.history, c("generated_tokens"), c("time"))],
    ],
  },
  {
    title: "Time to first token",
    read: milliseconds,
    lines: (s, c) => [["mean", "line-running", ratio(s.history, c("first_token_seconds"), c("first_tokens"))]],
  },
  {
    title: "Time between tokens",
    read: milliseconds,
    lines: (s, c) => [["mean", "line-running", ratio(s.history, c("token_gap_seconds"), c("token_gaps"))]],
  },
  {
    title: "Steps per second",
    read: decimal,
    lines: (s, c) => [["steps", "line-running", ratio(s.history, c("steps"), c("time"))]],
  },
];

export class Charts {
  constructor(store) {
    this.store = store;
    this.at = null;
    this.views = CHARTS.map((chart) => this.#make(chart));
    const box = $("charts");
    box.addEventListener("pointermove", (event) => this.#point(event));
    box.addEventListener("pointerleave", () => {
      this.at = null;
      this.update();
    });
  }

  update() {
    const { time: times } = this.store.history;
    if (!times.length) return;
    const end = times[times.length - 1];
    const shown = this.at === null ? times.length - 1 : nearest(times, end - SPAN_S * (1 - this.at));
    setText($("history-at"), this.at === null ? "" : time(times[shown]));
    for (const view of this.views) this.#draw(view, times, end, shown);
  }

  #make(chart) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const cursor = document.createElementNS(SVG, "line");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    const figure = h("figure", { class: "chart" });
    const values = h("figcaption", {}, h("h3", { text: chart.title }), h("p", { class: "values" }));
    const top = h("span", { class: "scale" });
    figure.append(values, h("div", { class: "plot" }, svg, top));
    $("charts").append(figure);
    return { chart, svg, cursor, top, values: values.lastChild, paths: [] };
  }

  #draw(view, times, end, shown) {
    const { chart, svg, paths } = view;
    const lines = chart.lines(this.store, (name) => column(this.store.history, name));
    const largest = Math.max(0, ...lines.flatMap(([, , values]) => values.filter(Number.isFinite)));
    const top = chart.top?.(this.store) ?? nice(largest);
    lines.forEach(([name, kind, values], i) => {
      paths[i] ??= this.#path(svg, kind, view.cursor);
      const drawn = trace(times, values, end, top || 1);
      paths[i].area.setAttribute("d", drawn.area);
      paths[i].line.setAttribute("d", drawn.line);
      const value = values[shown];
      const text = Number.isFinite(value) ? chart.read(value) : "–";
      const said = view.values.children;
      if (!said[i]) view.values.append(h("span", {}, swatch(kind), h("b"), h("span", { class: "sub" })));
      setText(said[i].children[1], text);
      setText(said[i].children[2], name);
    });
    setText(view.top, largest || chart.top ? chart.read(top) : "");
    const x = this.at === null ? -5 : WIDTH * this.at;
    const line = { x1: x, x2: x, y1: 0, y2: HEIGHT };
    for (const [name, value] of Object.entries(line)) view.cursor.setAttribute(name, value);
  }

  #path(svg, kind, before) {
    const area = document.createElementNS(SVG, "path");
    const line = document.createElementNS(SVG, "path");
    area.setAttribute("class", `area ${kind}`);
    line.setAttribute("class", `stroke ${kind}`);
    svg.insertBefore(area, before);
    svg.insertBefore(line, before);
    return { area, line };
  }

  #point(event) {
    const plot = event.target.closest(".plot");
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    this.at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    this.update();
  }
}

function nearest(times, wanted) {
  let best = 0;
  times.forEach((t, i) => {
    if (Math.abs(t - wanted) < Math.abs(times[best] - wanted)) best = i;
  });
  return best;
}

// The next 1, 2 or 5 times a power of ten.
function nice(value) {
  if (!(value > 0)) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 5, 10].find((step) => value <= step * unit);
}

// A line with gaps where nothing was measured, and the area below it.
function trace(times, values, end, top) {
  let line = "";
  let area = "";
  let run = [];
  const finish = () => {
    if (run.length > 1) {
      const d = run.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      line += d;
      area += `${d}L${run[run.length - 1][0].toFixed(1)} ${HEIGHT}L${run[0][0].toFixed(1)} ${HEIGHT}Z`;
    }
    run = [];
  };
  let before = null;
  times.forEach((t, i) => {
    const value = values[i];
    if (!Number.isFinite(value) || t < end - SPAN_S) return finish();
    if (before !== null && t - before > GAP_S) finish();
    before = t;
    return run.push([WIDTH * (1 - (end - t) / SPAN_S), HEIGHT - 1 - (HEIGHT - 3) * Math.min(1, value / top)]);
  });
  finish();
  return { line, area };
}
