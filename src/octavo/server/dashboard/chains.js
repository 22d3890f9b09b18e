// The prefix tree as chains: runs of blocks with one way on and the same readers.

import { stateOf } from "./palette.js";

// The root chains of a layer group. A chain is {key, rows, parent, children, depth, readers, weight}, `weight` says
// how much it is worth looking at: read now, then shared, then used of late.
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
    depth: row.depth,
    readers: row.readers,
    state: row.state === "open" ? "running" : stateOf(row),
    recent: Math.max(...rows.map((r) => r.used_at ?? Infinity)),
    weight: [last.refs, Math.max(...rows.map((r) => r.uses))],
  };
}

function alike(a, b) {
  const kind = (row) => (row.refs ? "read" : row.state);
  return kind(a) === kind(b) && a.readers.length === b.readers.length && a.readers.every((name, i) => name === b.readers[i]);
}

const byWorth = (a, b) => b.weight[0] - a.weight[0] || later(a, b) || b.weight[1] - a.weight[1];
const later = (a, b) => (a.recent === b.recent ? 0 : b.recent > a.recent ? 1 : -1);

// Which chains to show in `lines` lines: every leaf takes one, those that are left out are counted where they hang.
// Returns [{chain, level, line, lines, more}] from top to bottom; `more` counts branches that are not shown.
export function arrange(roots, lines) {
  const leaves = [];
  const visit = (chain) => (chain.children.length ? chain.children.forEach(visit) : leaves.push(chain));
  roots.forEach(visit);
  const worth = new Map();
  const kept = new Set();
  for (const leaf of leaves.sort(byWorth).slice(0, lines)) {
    for (let at = leaf; at && !kept.has(at); at = at.parent) {
      kept.add(at);
      worth.set(at, kept.size);
    }
  }
  const placed = [];
  let line = 0;
  const put = (chain, level) => {
    const start = line;
    const item = { chain, level, line, lines: 1, more: 0 };
    placed.push(item);
    const shown = chain.children.filter((child) => kept.has(child)).sort((a, b) => worth.get(a) - worth.get(b));
    item.more = chain.children.length - shown.length;
    for (const child of shown) put(child, level + 1);
    if (!shown.length) line += 1;
    item.lines = line - start;
  };
  const tops = roots.filter((root) => kept.has(root));
  for (const root of tops.sort((a, b) => size(b, kept) - size(a, kept) || worth.get(a) - worth.get(b))) put(root, 1);
  return { placed, lines: line, hidden: leaves.length - Math.min(leaves.length, lines) };
}

const size = (chain, kept) => 1 + chain.children.reduce((n, child) => n + (kept.has(child) ? size(child, kept) : 0), 0);
