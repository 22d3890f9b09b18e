// The three answers at the top: what is in memory, who shares it, what was thrown away and why.

import { $, h, keyed, setText } from "./dom.js";
import { ago, bytes, count, many, percent, whose } from "./format.js";
import { STATES, stateOf } from "./palette.js";

const WINDOW_S = 60;

export class Glance {
  constructor(store) {
    this.store = store;
    $("memory-meter").append(...STATES.map(({ key }) => h("i", { class: `state-${key}` })));
  }

  update() {
    const blocks = { open: 0, running: 0, shared: 0, cached: 0, pinned: 0 };
    const held = { ...blocks };
    let saved = 0;
    for (const row of this.store.rows.values()) {
      const state = stateOf(row);
      blocks[state] += 1;
      held[state] += row.nbytes;
      if (row.refs > 1) saved += (row.refs - 1) * row.nbytes;
    }
    this.#memory(blocks, held);
    this.shared = blocks.shared;
    this.#shared(blocks, saved);
    this.#thrown();
  }

  #memory(blocks, held) {
    const { bytesTotal, now } = this.store;
    setText($("memory-figure"), percent(1 - now.bytes_free / bytesTotal));
    STATES.forEach(({ key }, i) => {
      $("memory-meter").children[i].style.width = `${(100 * held[key]) / bytesTotal}%`;
    });
    const used = blocks.open + blocks.running + blocks.shared;
    const said = [
      `${bytes(bytesTotal - now.bytes_free)} of ${bytes(bytesTotal)}`,
      `${many(used, "block")} in use`,
      `${count(blocks.cached)} cached`,
    ];
    if (blocks.pinned) said.push(`${count(blocks.pinned)} pinned`);
    setText($("memory-says"), said.join(" · "));
  }

  #shared(blocks, saved) {
    const { store } = this;
    const reused = store.growth("reused_tokens", WINDOW_S);
    const asked = reused + store.growth("computed_tokens", WINDOW_S);
    setText($("shared-figure"), many(blocks.shared, "block"));
    const said = [
      blocks.shared
        ? `one copy instead of several saves ${bytes(saved)}`
        : "no block is read by more than one request now",
      asked
        ? `${percent(reused / asked)} of the last minute's prompt tokens were found here`
        : "no prompt in the last minute",
    ];
    setText($("shared-says"), said.join(" · "));
    const make = () => h("li", {}, h("span", {}), h("b", {}));
    keyed($("shared-top"), this.#sharers(), (share) => share.name, make, (element, share) => {
      setText(element.children[0], share.name);
      const { readers, uses } = share;
      setText(element.children[1], readers > 1 ? `${count(readers)} readers now` : `used ${many(uses, "time")}`);
    });
  }

  // Whose blocks have the most readers now, and after those the most so far.
  #sharers() {
    const shares = new Map();
    for (const row of this.store.rows.values()) {
      if (row.uses < 2) continue;
      const name = whose({ ...row.owner, label: row.owner?.label || "unlabelled requests" });
      const known = shares.get(name) ?? { name, readers: 0, uses: 0 };
      known.readers = Math.max(known.readers, row.refs);
      known.uses = Math.max(known.uses, row.uses);
      shares.set(name, known);
    }
    const shared = (share) => (share.readers > 1 ? share.readers : 0);
    return [...shares.values()].sort((a, b) => shared(b) - shared(a) || b.uses - a.uses).slice(0, 3);
  }

  #thrown() {
    const { store } = this;
    const lately = store.growth("reclaimed_blocks", WINDOW_S);
    setText($("thrown-figure"), many(lately, "block"));
    const { pressure = 0, "pressure on pins": pins = 0, reset = 0, ...others } = store.reclaimed;
    const rest = Object.entries(others).map(([reason, n]) => `${count(n)} by ${reason}`);
    const why = [
      pressure && `${count(pressure)} to make room, those not used for longest first`,
      pins && `${count(pins)} although pinned, as nothing else was left`,
      reset && `${count(reset)} by a reset`,
      ...rest,
      store.now.preemptions && `${many(store.now.preemptions, "request")} preempted`,
    ].filter(Boolean);
    const since = why.length ? `. Since the start: ${why.join(" · ")}` : ", and none since the start";
    setText($("thrown-says"), `in the last minute${since}`);
    const last = store.events.findLast((event) => event.kind === "reclaimed");
    const when = last && ago(store.now.time - last.time);
    setText($("thrown-last"), last ? `Last: ${many(last.blocks, "block")} of ${whose(last.owner)}, ${when}` : "");
  }
}
