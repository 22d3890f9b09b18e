// The requests that run and wait, with their receipts as they grow, and the last that ended.

import { $, h, keyed, setAttribute, setText, swatch } from "./dom.js";
import { count, many, requestName, short } from "./format.js";
import { bar, fill, legend, total, write } from "./receipt.js";

const SHOWN = 24;

export class Requests {
  constructor(store, palette, map) {
    this.store = store;
    this.palette = palette;
    this.map = map;
    this.lit = null;
    this.list = $("request-list");
    $("receipt-legend").append(...legend());
    this.list.addEventListener("click", (event) => {
      const name = event.target.closest("button")?.dataset.request;
      if (name !== undefined) this.#light(name === this.lit ? null : name);
    });
    this.list.addEventListener("keydown", (event) => event.key === "Escape" && this.#light(null));
  }

  update() {
    const { requests, ended, now } = this.store;
    const live = [...requests.values()].sort((a, b) => rank(a) - rank(b) || a.arrived_at - b.arrived_at);
    const shown = [...live, ...[...ended].reverse()].slice(0, SHOWN);
    const most = Math.max(...shown.map((request) => total(request.receipt)), 1);
    keyed(this.list, shown, (r) => r.id, (r) => this.#make(r), (element, r) => this.#fill(element, r, most));
    const said = [`${count(now.running)} running`, `${count(now.waiting)} waiting`];
    if (live.length > SHOWN) said.push(`the first ${SHOWN} shown`);
    setText($("requests-sub"), said.join(" · "));
    $("requests-none").hidden = shown.length > 0;
    if (this.lit !== null) this.#light(requests.has(this.lit) ? this.lit : null);
  }

  #make(request) {
    return h(
      "li",
      {},
      h(
        "button",
        { type: "button", "data-request": request.id, title: "Show its blocks on the map" },
        h("span", { class: "who" }, swatch(), h("b", {}), h("span", { class: "sub" })),
        h("span", { class: "phase" }),
        bar(),
        h("span", { class: "sub said" }),
      ),
    );
  }

  #fill(element, request, most) {
    const button = element.firstElementChild;
    const [who, phase, receiptBar, said] = button.children;
    setAttribute(who.children[0], "class", `swatch ${this.palette.tenantClass(request.tenant)}`);
    const id = short(request.id);
    setText(who.children[1], request.label ?? requestName(request.id));
    setText(who.children[2], [request.tenant, request.label === null ? "" : id].filter(Boolean).join(" · "));
    const { text, kind } = phaseOf(request);
    setText(phase, text);
    setAttribute(phase, "data-kind", kind);
    fill(receiptBar, request.receipt, most);
    write(said, request.receipt);
    setAttribute(element, "data-kind", kind);
    setAttribute(button, "aria-pressed", String(this.lit === request.id));
  }

  #light(name) {
    if (this.lit === null && name === null) return;
    this.lit = name;
    this.map.light(name === null ? null : new Set(this.store.heldBy(name).map((row) => row.offset)));
    for (const button of this.list.querySelectorAll("button")) {
      setAttribute(button, "aria-pressed", String(button.dataset.request === name));
    }
  }
}

const rank = (request) => ({ running: 0, waiting: 1 })[phaseOf(request).kind] ?? 0;

function phaseOf({ choices, receipt, reason, priority }) {
  const important = priority ? ` · priority ${priority}` : "";
  if (reason) return { text: `ended: ${reason}`, kind: "ended" };
  const running = choices.filter((choice) => choice.status === "running");
  if (!running.length) {
    const preempted = choices.some((choice) => choice.status === "preempted");
    return { text: (preempted ? "preempted, waits for room" : "waiting") + important, kind: "waiting" };
  }
  const done = Math.max(...running.map((choice) => choice.computed));
  const { prompt_tokens: prompt } = receipt;
  if (done < prompt) return { text: `reading, ${count(done)} of ${count(prompt)}${important}`, kind: "running" };
  const answers = choices.length > 1 ? ` ${many(choices.length, "answer")}` : "";
  return { text: `writing${answers}${important}`, kind: "running" };
}
