// What the server has told so far: the blocks by offset, the requests, the last minutes, what happened.

const EVENTS = 400;
const ENDED = 12;
export const MINUTES = 5;

export class Store {
  rows = new Map();
  requests = new Map();
  ended = [];
  events = [];
  history = { time: [] };
  now = null;
  ready = false;

  // Takes one message of the feed. Returns {whole, changed, gone, lost}: rows that are new or differ, those that went,
  // and the offsets of those that went or gave their place to another.
  take(kind, data) {
    const whole = kind === "picture";
    if (whole) {
      this.ready = true;
      this.rows = new Map();
      this.requests = new Map();
      this.events = [];
      this.ended = [];
      this.history = { time: [] };
      this.blockSize = data.block_size;
      this.groups = data.groups;
      this.bytesTotal = data.bytes_total;
    }
    this.now = data.now;
    this.reclaimed = data.reclaimed;
    this.slabs = data.slabs;
    const gone = (data.gone ?? []).map((offset) => this.rows.get(offset)).filter(Boolean);
    for (const row of gone) this.rows.delete(row.offset);
    const lost = gone.map((row) => row.offset);
    const changed = unpack(data);
    for (const row of changed) {
      const before = this.rows.get(row.offset);
      if (before && !same(before, row)) lost.push(row.offset);
      this.rows.set(row.offset, row);
    }
    this.#takeRequests(data);
    this.events = [...this.events, ...data.events].slice(-EVENTS);
    this.#takeHistory(data.history);
    return { whole, changed, gone, lost };
  }

  // The blocks of one sequence or of all sequences of a request, by name.
  heldBy(name) {
    const found = [];
    for (const row of this.rows.values()) {
      if (row.readers.some((reader) => reader === name || reader.startsWith(`${name}#`))) found.push(row);
    }
    return found;
  }

  // The blocks before `row` in its sequence, nearest first.
  *ancestors(row) {
    for (let at = this.rows.get(row.parent); at !== undefined; at = this.rows.get(at.parent)) yield at;
  }

  // The sizes that blocks have, largest first.
  get sizes() {
    const sizes = this.groups.flatMap((group) => [group.block_bytes, group.sealed_bytes]);
    return [...new Set(sizes)].sort((a, b) => b - a);
  }

  // How much a counter has grown in the last `seconds`.
  growth(name, seconds) {
    const { time } = this.history;
    const values = this.history[name];
    if (!time.length) return 0;
    const from = time[time.length - 1] - seconds;
    let i = time.findIndex((t) => t >= from);
    if (i > 0) i -= 1;
    return values[values.length - 1] - values[i];
  }

  #takeRequests(data) {
    for (const name of data.left ?? []) this.requests.delete(name);
    for (const request of data.requests) this.requests.set(request.id, request);
    this.ended = [...this.ended, ...(data.ended ?? [])].slice(-ENDED);
  }

  #takeHistory(more) {
    const cut = (this.now.time ?? 0) - 60 * MINUTES - 15;
    const old = this.history.time.findIndex((t) => t >= cut);
    for (const [name, values] of Object.entries(more)) {
      const kept = this.history[name] ?? [];
      this.history[name] = (old > 0 ? kept.slice(old) : kept).concat(values);
    }
  }
}

const same = (a, b) => a.depth === b.depth && a.group === b.group && a.owner?.request_id === b.owner?.request_id;

function unpack({ blocks, owners, readers }) {
  const names = Object.keys(blocks);
  return blocks.offset.map((_, i) => {
    const row = {};
    for (const name of names) row[name] = blocks[name][i];
    row.owner = owners[row.owner] ?? null;
    row.readers = readers[row.readers] ?? [];
    return row;
  });
}
