// The colours of the map: what each mode tells apart, in an order, with a name for each.
//
// Colours are custom properties of the style sheet, so that light and dark each have their own. Those next to each
// other differ in lightness too, for eyes and prints that tell no hues apart.

import { duration } from "./format.js";

const probe = document.createElement("span");
probe.hidden = true;

// The colour behind a custom property, as the theme of the moment has it.
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

export const STATES = [
  { key: "open", name: "being filled", property: "--open" },
  { key: "running", name: "read by one", property: "--running" },
  { key: "shared", name: "read by several", property: "--shared" },
  { key: "cached", name: "cached", property: "--cached" },
  { key: "pinned", name: "pinned", property: "--pinned" },
];

export const stateOf = (row) => (row.state === "running" && row.refs > 1 ? "shared" : row.state);

const AGES = [
  { key: "now", name: "in use", below: 0 },
  { key: "10", name: `below ${duration(10)}`, below: 10 },
  { key: "60", name: `below ${duration(60)}`, below: 60 },
  { key: "300", name: "below 5 min", below: 300 },
  { key: "1800", name: "below 30 min", below: 1800 },
  { key: "old", name: "older", below: Infinity },
].map((bucket, i) => ({ ...bucket, property: `--age-${i}` }));

const FORMATS = ["bf16", "f32", "fp8", "int8", "int4", "int2"];
const HUES = 8;

// A mode gives every row a `key`; `classes()` lists what there is: {key, name, property}. Tenants get their colours in
// the order in which they are first seen; those beyond the last colour share one.
export class Palette {
  mode = "state";
  #tenants = new Map();

  classes() {
    if (this.mode === "state") return STATES;
    if (this.mode === "age") return AGES;
    if (this.mode === "format") {
      return FORMATS.map((key, i) => ({ key, name: key, property: `--hue-${i}` }));
    }
    const tenants = [...this.#tenants].slice(0, HUES);
    const found = tenants.map(([key, i]) => ({ key, name: key || "no tenant", property: `--hue-${i}` }));
    if (this.#tenants.size > HUES) found.push({ key: "others", name: "others", property: "--cached" });
    return found;
  }

  key(row, now) {
    if (this.mode === "state") return stateOf(row);
    if (this.mode === "format") return row.format;
    if (this.mode === "age") {
      if (row.used_at === null) return "now";
      return AGES.find((bucket) => now - row.used_at < bucket.below).key;
    }
    const tenant = row.owner?.tenant ?? "";
    return this.numberOf(tenant) < HUES ? tenant : "others";
  }

  numberOf(tenant) {
    if (!this.#tenants.has(tenant)) this.#tenants.set(tenant, this.#tenants.size);
    return this.#tenants.get(tenant);
  }

  // The class of a tenant's colour, wherever one is shown.
  tenantClass(tenant = "") {
    const number = this.numberOf(tenant);
    return number < HUES ? `hue-${number}` : "cached";
  }
}
