// What is known of one block, in words.

import { $, h, swatch } from "./dom.js";
import { ago, bytes, count, duration, many, short, time, whose } from "./format.js";
import { describe } from "./grid.js";
import { stateOf } from "./palette.js";

const MEANING = {
  open: "being filled by a running request",
  running: "full, and read by a running request",
  shared: "full, and read by several running sequences",
  cached: "full, read by nobody now, kept for the next who has the same beginning",
  pinned: "full, read by nobody now, and kept until its time is over",
  free: "holds nothing",
};
const NAMES = {
  open: "being filled",
  running: "in use",
  shared: "shared",
  cached: "cached",
  pinned: "pinned",
  free: "free",
};
const NOTHING = "Point at a block or tap it, and see whose it is, who reads it, and what comes before it.";
const FREE = "This block holds nothing. The next one that is needed goes to a place like this.";
const MOST_READERS = 6;

export class Inspector {
  constructor(store, palette, map) {
    this.store = store;
    this.map = map;
    this.palette = palette;
    this.element = $("inspector");
    this.element.addEventListener("click", (event) => {
      const to = event.target.closest("[data-offset]");
      if (to) map.choose(Number(to.dataset.offset));
    });
    map.addEventListener("look", (event) => this.show(event.detail));
  }

  show({ row, offset, walked }) {
    if (offset === this.shown && this.#isRead()) return;
    this.shown = offset;
    const focused = [...this.element.querySelectorAll("button")].indexOf(document.activeElement);
    if (offset === null) this.element.replaceChildren(...this.#nothing());
    else if (row === null) this.element.replaceChildren(...this.#free(offset));
    else this.element.replaceChildren(...this.#block(row));
    if (focused >= 0) this.element.querySelectorAll("button")[focused]?.focus();
    if (walked) $("map-said").textContent = row ? this.#spoken(row) : "free";
  }

  // Whether somebody is selecting text here, to copy it.
  #isRead() {
    const selection = getSelection();
    return !selection.isCollapsed && this.element.contains(selection.anchorNode);
  }

  #nothing() {
    return [h("p", { class: "hint", text: NOTHING })];
  }

  #free(offset) {
    return [h("h3", {}, badge("free"), ` at ${bytes(offset)}`), h("p", { class: "hint", text: FREE })];
  }

  #block(row) {
    const { store } = this;
    const size = store.blockSize;
    const first = row.depth * size;
    const state = stateOf(row);
    const children = [...store.rows.values()].filter((other) => other.parent === row.offset);
    const more = row.filled < size ? `, room for ${size - row.filled} more` : "";
    const tenant = this.palette.tenantClass(row.owner?.tenant);
    const left = duration(Math.max(0, row.pinned_until - store.now.time));
    const lines = [
      ["Computed for", h("span", {}, swatch(tenant), row.owner?.label ?? "no label")],
      ["Tenant", row.owner?.tenant || "none"],
      ["Request", row.owner?.request_id ?? "unknown"],
      ["Read by", this.#readers(row)],
      ["Holds", row.filled ? `tokens ${count(first)} to ${count(first + row.filled - 1)}${more}` : "nothing yet"],
      ["Used", `${many(row.uses, "time")}, ${row.used_at === null ? "in use now" : ago(store.now.time - row.used_at)}`],
      ["Pinned", row.pinned_until === null ? "no" : `until ${time(row.pinned_until)}, ${left} more`],
      ["Priority", String(row.priority)],
      ["Stored as", `${row.format}, ${bytes(row.nbytes)}${row.exact ? "" : ", not exact"}`],
      ["Follows", this.#link(row.parent, "nothing here")],
      ["Followed by", children.length ? this.#link(children[0].offset, "", children.length) : "nothing"],
    ];
    if (store.groups.length > 1) lines.splice(5, 0, ["Layers", describe(store.groups[row.group])]);
    return [
      h("h3", {}, badge(state), h("span", { text: ` block ${count(row.depth)} of its sequence` })),
      h("p", { class: "hint", text: `${MEANING[state]}.` }),
      h("dl", {}, ...lines.flatMap(([term, what]) => [h("dt", { text: term }), h("dd", {}, what)])),
    ];
  }

  #readers({ readers }) {
    if (!readers.length) return "nobody now";
    const more = readers.length - MOST_READERS;
    return readers.slice(0, MOST_READERS).map(short).join(", ") + (more > 0 ? ` and ${more} more` : "");
  }

  #link(offset, otherwise, others = 1) {
    if (!this.store.rows.has(offset)) return otherwise;
    const text = `${others > 1 ? `${count(others)} blocks, first of them` : "the block"} at ${bytes(offset)}`;
    return h("button", { type: "button", class: "link", "data-offset": String(offset), text });
  }

  #spoken(row) {
    const state = NAMES[stateOf(row)];
    const readers = row.refs ? `, read by ${many(row.refs, "sequence")}` : "";
    return `${state}, block ${row.depth}, for ${whose(row.owner)}${readers}`;
  }
}

const badge = (state) => h("span", { class: `badge ${state}`, text: NAMES[state] });
