// Where each block lies on the map. A sheet is 8 × 8 cells; sheets run along lines, in order of address.
//
// One size of block: the whole arena is cut into cells, carved into slabs or not. Several sizes: the slabs of each
// size make a section of their own, and what is not carved yet has no cells.

import { bytes } from "./format.js";

const SIDE = 8;
const SHEET = SIDE * SIDE;
const LARGEST = 17;
const SMALLEST = 3;
const TITLE = 22;
const WIDEST_GAP = 20;

export class Grid {
  // `cells[i]` is {offset, x, y, column, line}; pixels are CSS pixels.
  constructor(store, width, tallest) {
    this.width = width;
    const sections = sectionsOf(store);
    this.named = sections.length > 1;
    this.size = SMALLEST;
    for (let size = LARGEST; size >= SMALLEST; size -= 1) {
      this.size = size;
      if (this.#heightOf(sections) <= tallest) break;
    }
    this.gap = this.size >= 7 ? 1 : 0.5;
    const slack = this.width - (this.#across * this.#pitch - this.#apart);
    this.pitch = this.#pitch + (this.#across > 1 ? Math.min(WIDEST_GAP, slack / (this.#across - 1)) : 0);
    this.#place(sections);
  }

  // The index of the cell at a point, -1 if there is none.
  at(x, y) {
    const line = this.#lines.find((l) => y >= l.y && y < l.y + SIDE * this.size);
    if (!line) return -1;
    const sheet = Math.floor(x / this.pitch);
    const column = Math.floor((x - sheet * this.pitch) / this.size);
    if (sheet >= this.#across || column >= SIDE || column < 0) return -1;
    return this.#byPlace.get(place(sheet * SIDE + column, line.line + Math.floor((y - line.y) / this.size))) ?? -1;
  }

  // The nearest cell from cell `i` in a direction, `i` itself at the edge.
  step(i, dx, dy) {
    const { column, line } = this.cells[i];
    const reach = Math.max(this.#across * SIDE, this.#lines.length * SIDE);
    for (let k = 1; k <= reach; k += 1) {
      const found = this.#byPlace.get(place(column + k * dx, line + k * dy));
      if (found !== undefined) return found;
    }
    return i;
  }

  indexOf(offset) {
    return this.#byOffset.get(offset) ?? -1;
  }

  #byPlace = new Map();
  #byOffset = new Map();
  #lines = [];

  get #apart() {
    return this.size >= 7 ? 6 : 3;
  }

  // From sheet to sheet, at least.
  get #pitch() {
    return SIDE * this.size + this.#apart;
  }

  get #across() {
    return Math.max(1, Math.floor((this.width + this.#apart) / this.#pitch));
  }

  #heightOf(sections) {
    return sections.reduce((sum, section) => {
      const sheets = section.slabs.reduce((n, slab) => n + Math.ceil(slab.count / SHEET), 0);
      return sum + (this.named ? TITLE : 0) + Math.ceil(sheets / this.#across) * this.#pitch;
    }, 0);
  }

  #place(sections) {
    this.cells = [];
    this.titles = [];
    let top = 0;
    let line = 0;
    for (const section of sections) {
      if (this.named) {
        this.titles.push({ text: section.title, y: top + TITLE - 8 });
        top += TITLE;
      }
      let sheet = 0;
      for (const slab of section.slabs) {
        for (let k = 0; k < slab.count; k += 1) {
          if (k % SHEET === 0 && (k > 0 || slab !== section.slabs[0])) sheet += 1;
          this.#add(section, slab, k, sheet, top, line);
        }
      }
      const lines = section.slabs.length ? Math.floor(sheet / this.#across) + 1 : 0;
      for (let l = 0; l < lines; l += 1) this.#lines.push({ y: top + l * this.#pitch, line: line + l * SIDE });
      top += lines * this.#pitch;
      line += lines * SIDE;
    }
    this.height = Math.max(top, this.size);
  }

  #add(section, slab, k, sheet, top, line) {
    const [across, down] = [sheet % this.#across, Math.floor(sheet / this.#across)];
    const [x, y] = [(k % SHEET) % SIDE, Math.floor((k % SHEET) / SIDE)];
    const cell = {
      offset: slab.start + k * section.blockBytes,
      x: across * this.pitch + x * this.size,
      y: top + down * this.#pitch + y * this.size,
      column: across * SIDE + x,
      line: line + down * SIDE + y,
    };
    this.#byOffset.set(cell.offset, this.cells.length);
    this.#byPlace.set(place(cell.column, cell.line), this.cells.length);
    this.cells.push(cell);
  }
}

const place = (column, line) => line * 65536 + column;

function sectionsOf(store) {
  const { sizes, slabs } = store;
  if (sizes.length === 1) {
    const count = Math.floor(store.bytesTotal / sizes[0]);
    return [{ blockBytes: sizes[0], title: "", slabs: [{ start: 0, count }] }];
  }
  return sizes.map((size) => ({
    blockBytes: size,
    title: `${bytes(size)} per block: ${store.groups.flatMap((group) => kinds(group, size)).join("; ")}`,
    slabs: slabs.start
      .map((start, i) => ({ start, count: slabs.count[i], size: slabs.block_bytes[i] }))
      .filter((slab) => slab.size === size),
  }));
}

// Which blocks of a layer group have this size.
function kinds(group, size) {
  if (group.block_bytes === group.sealed_bytes) return group.block_bytes === size ? [describe(group)] : [];
  const found = [];
  if (group.block_bytes === size) found.push(`${describe(group)}, being filled`);
  if (group.sealed_bytes === size) found.push(`${describe(group)}, full`);
  return found;
}

export function describe(group) {
  const layers = group.layers.length === 1 ? `layer ${group.layers[0]}` : `${group.layers.length} layers`;
  return group.window === null ? `full attention, ${layers}` : `window of ${group.window}, ${layers}`;
}
