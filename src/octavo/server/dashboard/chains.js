// The prefix tree as chains: runs of blocks with one way on and the same readers.

import { stateOf } from "./palette.js";

// The root chains of a layer group. A chain is {key, rows, parent, children, start, readers, weight}: `start` counts
// the blocks before it that are there, `weight` says how much it is worth looking at: read now, then used of late,
// then used by many.
export function chainsOf(store, group) {
  const children = new Map();
  const roots = [];
  for (const row of store.rows.values()) {
    if (row.group !== group) continue;
    if (!store.rows.has(row.parent)) roots.push(row);
    else if (children.has(row.parent)) children.get(row.parent).push(row);
    else children.set(row.parent, [row]);
  }
  const below = (row) => children.get(row.offset) ?? [];
  const made = roots.map((row) => grow(row, null, below));
  const open = [...made];
  while (open.length) {
    const chain = open.pop();
    chain.children = below(chain.rows[chain.rows.length - 1]).map((row) => grow(row, chain, below));
    open.push(...chain.children);
  }
  return made;
}

function grow(row, parent, below) {
  const rows = [row];
  for (;;) {
    const next = below(rows[rows.length - 1]);
    if (next.length !== 1 || !alike(row, next[0])) break;
    rows.push(next[0]);
  }
  const last = rows[rows.length - 1];
  return {
    key: row.offset,
    rows,
    parent,
    children: [],
    start: parent ? parent.start + parent.rows.length : 0,
    readers: row.readers,
    state: row.state === "open" ? "running" : stateOf(row),
    recent: Math.max(...rows.map((r) => r.used_at ?? Infinity)),
    weight: [last.refs, Math.max(...rows.map((r) => r.uses))],
  };
}

function alike(a, b) {
  const kind = (row) => (row.refs ? "read" : row.state);
  const same = a.readers.length === b.readers.length && a.readers.every((name, i) => name === b.readers[i]);
  return same && kind(a) === kind(b);
}

const byWorth = (a, b) => b.weight[0] - a.weight[0] || later(a, b) || b.weight[1] - a.weight[1];
const later = (a, b) => (a.recent === b.recent ? 0 : b.recent > a.recent ? 1 : -1);

// Which chains to show in `lines` lines: every leaf takes one, those that are left out are counted where they hang.
// Returns [{chain, level, line, lines, more}] from top to bottom; `more` counts branches that are not shown. What is
// shown is chosen by worth and stands where `place(chain)` puts it, so that it stays where it is while it is there.
export function arrange(roots, lines, place) {
  const leaves = [];
  const visit = (chain) => (chain.children.length ? chain.children.forEach(visit) : leaves.push(chain));
  roots.forEach(visit);
  const kept = new Set();
  for (const leaf of leaves.sort(byWorth).slice(0, lines)) {
    for (let at = leaf; at && !kept.has(at); at = at.parent) kept.add(at);
  }
  const inPlace = (a, b) => compare(place(a), place(b));
  const placed = [];
  let line = 0;
  const put = (chain, level) => {
    const start = line;
    const item = { chain, level, line, lines: 1, more: 0 };
    placed.push(item);
    const shown = chain.children.filter((child) => kept.has(child)).sort(inPlace);
    item.more = chain.children.length - shown.length;
    for (const child of shown) put(child, level + 1);
    if (!shown.length) line += 1;
    item.lines = line - start;
  };
  for (const root of roots.filter((root) => kept.has(root)).sort(inPlace)) put(root, 1);
  return { placed, lines: line, hidden: leaves.length - Math.min(leaves.length, lines) };
}

function compare(a, b) {
  const i = a.findIndex((value, k) => value !== b[k]);
  return i < 0 ? 0 : a[i] < b[i] ? -1 : 1;
}
