// The map of the arena: a canvas of cells, redrawn only where something changed, and one above it for marks.

import { $, setText } from "./dom.js";
import { Grid } from "./grid.js";
import { colour } from "./palette.js";

const FLASH_MS = 900;
const FREE = "free";
const MARGIN = 3; // so that outlines of cells at the edge are whole
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class ArenaMap extends EventTarget {
  // Tells of `look` (a cell is pointed at, or walked to) with {row, offset, kept, walked}; row is null on free cells.
  constructor(store, palette) {
    super();
    this.store = store;
    this.palette = palette;
    this.frame = $("map");
    this.cells = $("map-cells");
    this.marks = $("map-marks");
    this.drawn = [];
    this.lit = null;
    this.flashes = new Map();
    this.hovered = -1;
    this.chosen = -1;
    this.kept = false;
    this.#listen();
  }

  // Draws what `change` of the store touched, everything if the arena, the room or the colours are new.
  update(change) {
    if (!this.store.ready) return;
    if (change.whole || !this.grid || this.#outgrown()) this.rebuild();
    else if (this.palette.mode === "age") this.#drawAll();
    else {
      const now = this.store.now.time;
      for (const row of change.gone) this.#drawOffset(row.offset, now);
      for (const row of change.changed) this.#drawOffset(row.offset, now);
    }
    if (!change.whole) this.#flash(change);
    this.#mark();
    this.#tell(false);
  }

  rebuild() {
    if (!this.store.ready || !this.frame.clientWidth) return;
    const tallest = innerWidth < 700 ? 420 : Math.max(260, Math.min(520, 0.52 * innerHeight));
    const offset = this.grid?.cells[this.chosen]?.offset;
    this.grid = new Grid(this.store, this.frame.clientWidth, tallest);
    this.slabs = this.#slabsKey();
    this.chosen = offset === undefined ? -1 : this.grid.indexOf(offset);
    this.hovered = -1;
    this.scale = devicePixelRatio || 1;
    this.gap = Math.max(1, Math.round(this.grid.gap * this.scale));
    for (const canvas of [this.cells, this.marks]) {
      const [width, height] = [this.grid.width + 2 * MARGIN, this.grid.height + 2 * MARGIN];
      canvas.width = Math.round(width * this.scale);
      canvas.height = Math.round(height * this.scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.marks.getContext("2d").setTransform(this.scale, 0, 0, this.scale, this.scale * MARGIN, this.scale * MARGIN);
    this.frame.style.height = `${this.grid.height}px`;
    this.repaint();
  }

  // Everything again, in the colours of the moment.
  repaint() {
    if (!this.grid) return;
    this.ink = Object.fromEntries(this.palette.classes().map((c) => [c.key, colour(c.property)]));
    this.ink[FREE] = colour("--free");
    this.accents = { choice: colour("--ink"), paper: colour("--card"), lost: colour("--lost") };
    this.drawn = new Array(this.grid.cells.length);
    const context = this.cells.getContext("2d");
    context.clearRect(0, 0, this.cells.width, this.cells.height);
    context.fillStyle = colour("--muted");
    context.font = `${12 * this.scale}px ${getComputedStyle(document.body).fontFamily}`;
    for (const { text, y } of this.grid.titles) context.fillText(text, MARGIN * this.scale, (y + MARGIN) * this.scale);
    this.#drawAll();
    this.#mark();
  }

  // Lights the blocks of `offsets` up and dims all others; null ends it.
  light(offsets) {
    this.lit = offsets;
    this.#mark();
  }

  // Puts the choice on a block and shows it.
  choose(offset, kept = true) {
    const i = this.grid?.indexOf(offset) ?? -1;
    if (i >= 0) this.#choose(i, kept, true);
  }

  #outgrown() {
    return this.grid.named && this.slabs !== this.#slabsKey();
  }

  #slabsKey() {
    return this.store.slabs.start.join() + this.store.slabs.count.join();
  }

  #drawAll() {
    const now = this.store.now.time;
    for (let i = 0; i < this.grid.cells.length; i += 1) this.#draw(i, now);
  }

  #drawOffset(offset, now) {
    const i = this.grid.indexOf(offset);
    if (i >= 0) this.#draw(i, now);
  }

  #draw(i, now) {
    const cell = this.grid.cells[i];
    const row = this.store.rows.get(cell.offset);
    const key = row ? this.palette.key(row, now) : FREE;
    const part = row?.state === "open" ? row.filled / this.store.blockSize : 1;
    const notch = row !== undefined && row.pinned_until !== null;
    const look = `${key} ${part} ${notch}`;
    if (this.drawn[i] === look) return;
    this.drawn[i] = look;
    if (!(key in this.ink)) this.ink[key] = colour(this.palette.classes().find((c) => c.key === key).property);
    const context = this.cells.getContext("2d");
    const { x, y, width, height } = this.#pixels(cell);
    context.clearRect(x, y, width, height);
    const [w, h] = [width - this.gap, height - this.gap];
    context.fillStyle = this.ink[FREE];
    if (key === FREE || part < 1) this.#box(context, x, y, w, h);
    context.fillStyle = this.ink[key];
    if (key !== FREE) {
      const tall = Math.max(1, Math.round(h * part));
      this.#box(context, x, y + h - tall, w, tall);
    }
    if (notch && this.grid.size >= 6) {
      context.fillStyle = this.accents.paper;
      const n = Math.round(w / 2.2);
      context.beginPath();
      context.moveTo(x + w - n, y);
      context.lineTo(x + w, y);
      context.lineTo(x + w, y + n);
      context.fill();
    }
  }

  // Where a cell lies on the canvas of cells, in whole device pixels, so that nothing of it is left when it changes.
  #pixels({ x, y }) {
    const at = (v) => Math.round((v + MARGIN) * this.scale);
    const { size } = this.grid;
    return { x: at(x), y: at(y), width: at(x + size) - at(x), height: at(y + size) - at(y) };
  }

  #box(context, x, y, width, height) {
    if (this.grid.size < 9) {
      context.fillRect(x, y, width, height);
      return;
    }
    context.beginPath();
    context.roundRect(x, y, width, height, Math.min(2.5 * this.scale, height / 2));
    context.fill();
  }

  // What was thrown away shows for a moment.
  #flash({ lost }) {
    if (calm.matches) return;
    const end = performance.now() + FLASH_MS;
    for (const offset of lost) this.flashes.set(offset, end);
    if (this.flashes.size && !this.fading) this.#fade();
  }

  #fade() {
    this.fading = true;
    this.#mark();
    const now = performance.now();
    for (const [offset, end] of this.flashes) if (end < now) this.flashes.delete(offset);
    if (this.flashes.size) requestAnimationFrame(() => this.#fade());
    else {
      this.fading = false;
      this.#mark();
    }
  }

  #mark() {
    if (!this.grid) return;
    const context = this.marks.getContext("2d");
    context.clearRect(-MARGIN, -MARGIN, this.grid.width + 2 * MARGIN, this.grid.height + 2 * MARGIN);
    if (this.lit) this.#dim(context);
    this.#drawFlashes(context);
    const shown = this.hovered >= 0 ? this.hovered : this.chosen;
    if (shown < 0) return;
    const row = this.store.rows.get(this.grid.cells[shown].offset);
    if (row) {
      for (const before of this.store.ancestors(row)) {
        this.#outline(context, before.offset, this.accents.paper, 3.5);
        this.#outline(context, before.offset, this.accents.choice, 1.5);
      }
    }
    this.#outline(context, this.grid.cells[shown].offset, this.accents.paper, 5);
    this.#outline(context, this.grid.cells[shown].offset, this.accents.choice, 2.5);
  }

  #dim(context) {
    context.globalAlpha = 0.78;
    context.fillStyle = this.accents.paper;
    context.fillRect(-MARGIN, -MARGIN, this.grid.width + 2 * MARGIN, this.grid.height + 2 * MARGIN);
    context.globalAlpha = 1;
    for (const offset of this.lit) {
      const cell = this.grid.cells[this.grid.indexOf(offset)];
      if (cell) context.clearRect(cell.x, cell.y, this.grid.size, this.grid.size);
    }
  }

  #drawFlashes(context) {
    const now = performance.now();
    for (const [offset, end] of this.flashes) {
      if (end < now) continue;
      context.globalAlpha = (end - now) / FLASH_MS;
      this.#outline(context, offset, this.accents.lost, 1.75);
    }
    context.globalAlpha = 1;
  }

  #outline(context, offset, ink, width) {
    const cell = this.grid.cells[this.grid.indexOf(offset)];
    if (!cell) return;
    const side = this.grid.size - this.grid.gap + 1;
    context.strokeStyle = ink;
    context.lineWidth = width;
    context.strokeRect(cell.x - 0.5, cell.y - 0.5, side, side);
  }

  #tell(walked) {
    const i = this.hovered >= 0 ? this.hovered : this.chosen;
    const offset = i < 0 ? null : this.grid.cells[i].offset;
    const row = offset === null ? null : (this.store.rows.get(offset) ?? null);
    this.dispatchEvent(new CustomEvent("look", { detail: { row, offset, kept: this.kept, walked } }));
  }

  #choose(i, kept, walked) {
    this.chosen = i;
    this.kept = kept;
    this.hovered = -1;
    this.#mark();
    this.#tell(walked);
  }

  #listen() {
    const under = (event) => {
      const box = this.frame.getBoundingClientRect();
      return this.grid?.at(event.clientX - box.left, event.clientY - box.top) ?? -1;
    };
    this.frame.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const i = under(event);
      if (i === this.hovered) return;
      this.hovered = i;
      this.#mark();
      this.#tell(false);
    });
    this.frame.addEventListener("pointerleave", () => {
      this.hovered = -1;
      this.#mark();
      if (this.grid) this.#tell(false);
    });
    this.frame.addEventListener("click", (event) => {
      const i = under(event);
      this.#choose(i, i >= 0, false);
    });
    this.frame.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => {
      if (this.frame.clientWidth !== this.grid?.width) this.rebuild();
    }).observe(this.frame);
  }

  #key(event) {
    if (!this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Math.max(this.chosen, 0);
    const last = this.grid.cells.length - 1;
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    let to = null;
    if (event.key in steps) to = this.chosen < 0 ? 0 : this.grid.step(at, ...steps[event.key]);
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = last;
    else if (event.key === "PageDown") to = Math.min(last, at + 64);
    else if (event.key === "PageUp") to = Math.max(0, at - 64);
    else if (event.key === "Enter" || event.key === " ") this.#choose(at, true, true);
    else if (event.key === "Escape") this.#choose(-1, false, true);
    else if (event.key.toLowerCase() === "p") {
      const row = this.store.rows.get(this.grid.cells[at].offset);
      const before = row ? this.grid.indexOf(row.parent) : -1;
      if (before >= 0) to = before;
      else setText($("map-said"), "There is no block before this one.");
    } else return;
    event.preventDefault();
    if (to !== null) this.#choose(to, true, true);
  }
}
