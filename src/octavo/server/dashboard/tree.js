// The prefix tree: a chain of blocks is a bar, as long as it has tokens, as high as it has branches. What stands to
// the right of a bar begins with all that stands left of it.

import { arrange, chainsOf } from "./chains.js";
import { $, h, keyed, setAttribute, setText, swatch } from "./dom.js";
import { ago, count, many, short, whose } from "./format.js";

const LINES = 26;
const LINES_NARROW = 16;
const LINE_PX = 22;
const ROOM_FOR_LABEL = 0.3;
const ROOM_NARROW = 0.42;

const narrow = matchMedia("(max-width: 820px)");

export class Tree {
  constructor(store, palette, map) {
    this.store = store;
    this.palette = palette;
    this.map = map;
    this.element = $("tree");
    this.placed = [];
    this.seen = new Map();
    this.tallest = 0;
    this.width = 0; // told by the observer: to ask for it in an update would lay the page out once more
    new ResizeObserver(([entry]) => (this.width = entry.contentRect.width)).observe(this.element);
    this.looked = null;
    this.focused = null;
    const chainAt = (event) => this.#byKey(event.target.closest(".chain")?.dataset.key);
    this.element.addEventListener("pointerover", (event) => this.#look(chainAt(event)));
    this.element.addEventListener("pointerleave", () => this.#look(null));
    this.element.addEventListener("focusin", (event) => this.#look(chainAt(event)));
    this.element.addEventListener("focusout", () => this.#look(null));
    this.element.addEventListener("click", (event) => {
      const item = chainAt(event);
      if (item) map.choose(item.chain.rows[0].offset);
    });
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  update() {
    const full = this.store.groups.findIndex((group) => group.window === null);
    const roots = chainsOf(this.store, Math.max(full, 0));
    this.room = 1 - (narrow.matches ? ROOM_NARROW : ROOM_FOR_LABEL);
    const most = narrow.matches ? LINES_NARROW : LINES;
    const { placed, lines, hidden } = arrange(roots, most, (chain) => this.#place(chain));
    this.placed = placed;
    const deepest = Math.max(...placed.map(({ chain }) => chain.start + chain.rows.length), 1);
    this.tallest = Math.max(this.tallest, lines);
    this.element.style.height = `${this.tallest * LINE_PX}px`; // it never shrinks: what stands below stays in place
    if (!placed.some(({ chain }) => chain.key === this.focused)) this.focused = placed[0]?.chain.key ?? null;
    const fill = (element, item) => this.#fill(element, item, deepest);
    keyed(this.element, placed, ({ chain }) => chain.key, () => this.#make(), fill);
    $("tree-none").hidden = placed.length > 0;
    const said = placed.length ? [`the longest shown has ${many(deepest * this.store.blockSize, "token")}`] : [];
    if (hidden) said.push(`${many(hidden, "branch", "branches")} of less interest left out`);
    setText($("tree-sub"), said.join(" · "));
    if (this.looked !== null) this.#look(this.#byKey(this.looked) ?? null);
  }

  // Tenants together, and within them whoever came first.
  #place(chain) {
    const tenant = chain.rows[0].owner?.tenant ?? "";
    const name = `${chain.key} ${whose(chain.rows[0].owner)}`;
    if (!this.seen.has(name)) this.seen.set(name, this.seen.size);
    return [tenant, this.seen.get(name)];
  }

  #make() {
    return h(
      "div",
      { class: "chain", role: "treeitem" },
      h("i", { class: "blocks" }),
      h("span", { class: "name" }, swatch(), h("span")),
    );
  }

  #fill(element, item, deepest) {
    const { chain, level, line, lines, more } = item;
    const [blocks, name] = element.children;
    const left = chain.start / deepest;
    const right = (chain.start + chain.rows.length) / deepest;
    const { room } = this;
    element.style.top = `${line * LINE_PX}px`;
    element.style.height = `${lines * LINE_PX}px`;
    element.style.left = `${100 * room * left}%`;
    element.style.width = `max(3px, ${100 * room * (right - left)}%)`;
    setAttribute(blocks, "class", `blocks state-${chain.state}`);
    const leaf = !chain.children.length || more === chain.children.length;
    const inner = this.width * room * (right - left) > 74 ? this.#inner(chain) : "";
    setText(name.children[1], leaf ? this.#nameOf(chain, more) : inner);
    name.children[0].hidden = !leaf;
    setAttribute(name.children[0], "class", `swatch ${this.palette.tenantClass(chain.rows[0].owner?.tenant)}`);
    setAttribute(name, "class", leaf ? "name leaf" : "name inner");
    element.dataset.key = chain.key;
    element.tabIndex = chain.key === this.focused ? 0 : -1;
    setAttribute(element, "aria-level", String(level));
    setAttribute(element, "aria-label", this.#spoken(item));
  }

  #nameOf(chain, more) {
    const last = chain.rows[chain.rows.length - 1];
    const name = chain.readers.length === 1 ? this.#reader(chain.readers[0]) : whose(last.owner);
    return more ? `${name} and ${many(more, "more branch", "more branches")}` : name;
  }

  #inner(chain) {
    if (chain.readers.length > 1) return `${count(chain.readers.length)} readers`;
    return many(chain.rows.length * this.store.blockSize, "token");
  }

  #reader(name) {
    const request = this.store.requests.get(name) ?? this.store.requests.get(name.replace(/#\d+$/, ""));
    return request ? whose({ ...request, request_id: name }) : short(name);
  }

  #spoken({ chain, more }) {
    const { store } = this;
    const first = chain.rows[0].depth * store.blockSize;
    const last = chain.rows[chain.rows.length - 1];
    const end = last.depth * store.blockSize + last.filled;
    const said = [`${many(chain.rows.length, "block")}, tokens ${count(first)} to ${count(Math.max(first, end - 1))}`];
    if (chain.readers.length) {
      const names = chain.readers.slice(0, 4).map((name) => this.#reader(name));
      const others = chain.readers.length - names.length;
      said.push(`read by ${names.join(", ")}${others ? ` and ${others} more` : ""}`);
    } else said.push(`${chain.state}, last used ${ago(store.now.time - chain.recent)}`);
    const branches = chain.children.length;
    if (branches > 1) said.push(`${many(branches, "branch", "branches")}${more ? `, ${more} not shown` : ""}`);
    said.push(`computed for ${whose(chain.rows[0].owner)}`);
    return said.join(" · ");
  }

  #byKey(key) {
    return key === undefined || key === null ? null : this.placed.find(({ chain }) => chain.key === Number(key));
  }

  #look(item) {
    if (!item && this.looked === null) return;
    this.looked = item ? item.chain.key : null;
    setText($("tree-says"), item ? this.#spoken(item) : "");
    if (!item) {
      this.map.light(null);
      return;
    }
    const lit = new Set(item.chain.rows.map((row) => row.offset));
    for (const row of this.store.ancestors(item.chain.rows[0])) lit.add(row.offset);
    this.map.light(lit);
  }

  #key(event) {
    const i = this.placed.findIndex(({ chain }) => chain.key === this.focused);
    if (i < 0) return;
    const at = this.placed[i].chain;
    const indexOf = (chain) => this.placed.findIndex((item) => item.chain === chain);
    let to;
    if (event.key === "ArrowDown") to = Math.min(i + 1, this.placed.length - 1);
    else if (event.key === "ArrowUp") to = Math.max(i - 1, 0);
    else if (event.key === "ArrowLeft") to = at.parent ? indexOf(at.parent) : i;
    else if (event.key === "ArrowRight") to = this.placed[i + 1]?.chain.parent === at ? i + 1 : i;
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.placed.length - 1;
    else if (event.key === "Enter") this.map.choose(at.rows[0].offset);
    else return;
    event.preventDefault();
    if (to === undefined) return;
    this.focused = this.placed[to].chain.key;
    for (const element of this.element.children) {
      const here = Number(element.dataset.key) === this.focused;
      element.tabIndex = here ? 0 : -1;
      if (here) element.focus();
    }
  }
}
