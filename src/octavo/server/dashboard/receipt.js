// A receipt as a bar and as words.

import { h, setText, swatch } from "./dom.js";
import { count, many } from "./format.js";

const PARTS = [
  { key: "reused", name: "reused: found in memory" },
  { key: "computed", name: "computed: the rest of the prompt" },
  { key: "generated", name: "generated" },
  { key: "recomputed", name: "computed again after a preemption" },
];

const REASONS = {
  disabled: () => "reuse was off",
  namespace: (at) => `from token ${at} on only others have it, and it is not shared with them`,
  exactness: (at) => `what is there from token ${at} on is not exact`,
  reclaimed: (at) => `thrown away from token ${at} on`,
  diverged: (at) => `new from token ${at} on`,
  tail: () => "only the last, unfinished block was missing",
  cold: () => "nothing of it was known",
};

export function legend() {
  return PARTS.map(({ key, name }) => h("li", {}, swatch(`part-${key}`), name));
}

const amounts = (receipt) => ({
  reused: receipt.reused_tokens,
  computed: receipt.computed_tokens,
  generated: receipt.completion_tokens,
  recomputed: receipt.recomputed_tokens,
});

export const total = (receipt) => Object.values(amounts(receipt)).reduce((sum, n) => sum + n, 0);

export function bar() {
  return h("div", { class: "bar", "aria-hidden": "true" }, ...PARTS.map(({ key }) => h("i", { class: `part-${key}` })));
}

// `most` is how many tokens make the whole width.
export function fill(element, receipt, most) {
  const parts = amounts(receipt);
  PARTS.forEach(({ key }, i) => {
    element.children[i].style.width = `${(100 * parts[key]) / Math.max(most, 1)}%`;
  });
}

export function words(receipt) {
  const said = [`${count(receipt.reused_tokens)} of ${count(receipt.prompt_tokens)} prompt tokens reused`];
  if (receipt.computed_tokens) said.push(`${count(receipt.computed_tokens)} computed`);
  said.push(`${count(receipt.completion_tokens)} generated`);
  if (receipt.preemptions) said.push(`preempted ${many(receipt.preemptions, "time")}`);
  if (receipt.recomputed_tokens) said.push(`${count(receipt.recomputed_tokens)} computed again`);
  for (const [first, last] of receipt.dropped) said.push(`dropped tokens ${count(first)} to ${count(last)}`);
  if (receipt.compressed_tokens) said.push(`${count(receipt.compressed_tokens)} compressed`);
  if (receipt.queued_ms >= 1) said.push(`waited ${count(receipt.queued_ms)} ms`);
  if (!receipt.exact) said.push("not exact");
  return said.join(" · ");
}

// Why no more was reused; empty if all was.
export function why(receipt) {
  const { miss } = receipt;
  if (!miss || miss.at_token === null) return "";
  return REASONS[miss.reason]?.(count(miss.at_token)) ?? `${miss.reason} from token ${count(miss.at_token)} on`;
}

export function pins({ pinned }) {
  if (!pinned) return "";
  if (pinned.refused) return `not pinned: ${pinned.refused}`;
  return `${many(pinned.blocks, "block")} pinned for ${count(pinned.ttl_s)} s`;
}

export function write(element, receipt) {
  setText(element, [words(receipt), why(receipt), pins(receipt)].filter(Boolean).join(" · "));
}
