// What happened to blocks and requests, in sentences, newest first.

import { $, h, keyed } from "./dom.js";
import { count, many, time, whose } from "./format.js";

const SHOWN = 120;
const KIND = {
  reclaimed: "thrown",
  preempted: "preempted",
  resumed: "preempted",
  pinned: "pins",
  pin_refused: "pins",
  stored: "stored",
  folded: "folded",
};
const MARK = { folded: "◣", reclaimed: "✕", preempted: "‖", resumed: "▸", pinned: "◥", pin_refused: "⊘", stored: "+" };
const TITLE = {
  folded: "folded",
  reclaimed: "thrown away",
  preempted: "preempted",
  resumed: "resumed",
  pinned: "pinned",
  pin_refused: "not pinned",
  stored: "stored",
};
const WHY = {
  pressure: "to make room: nobody read them, and they were unused for longest",
  "pressure on pins": "although pinned: there was no room, and nothing else was left",
  reset: "because the cache was reset",
  recomputed: "for others that are exact",
};
const NO_BLOCK = "there was no block left. It goes on later, with the same answer";

export class Log {
  constructor(store) {
    this.store = store;
    this.count = 0;
    $("log-kinds").addEventListener("change", () => this.update());
  }

  update() {
    const wanted = new Set([...$("log-kinds").querySelectorAll("input:checked")].map((input) => input.value));
    const shown = this.store.events.filter((event) => wanted.has(KIND[event.kind])).slice(-SHOWN).reverse();
    for (const event of shown) event.key ??= this.count++;
    const make = (event) =>
      h(
        "li",
        { "data-kind": event.kind },
        h("time", { text: time(event.time) }),
        h("span", { class: "mark", "aria-hidden": "true", text: MARK[event.kind] }),
        h("span", {}, h("b", { text: TITLE[event.kind] }), ` ${sentence(event)}`),
      );
    keyed($("log-list"), shown, (event) => event.key, make, () => {});
    $("log-none").hidden = shown.length > 0;
  }
}

function sentence({ kind, reason, owner, blocks, tokens }) {
  const who = whose(owner);
  switch (kind) {
    case "reclaimed":
      return `${many(blocks, "block")} of ${who}, ${WHY[reason] ?? reason}`;
    case "folded":
      return `${many(blocks, "block")} of ${who}: ${reason}`;
    case "stored":
      return `${many(blocks, "full block")} for ${who}, to be found again`;
    case "preempted":
      return `${who} at ${many(tokens, "token")}: ${reason === "pressure" ? NO_BLOCK : reason}`;
    case "resumed":
      return `${who} at ${many(tokens, "token")}: there is room again`;
    case "pinned":
      return `the first ${count(tokens)} tokens of ${who}`;
    default:
      return `${who}: ${reason}`;
  }
}

