// Joins the feed, the store and the views.

import { Charts } from "./charts.js";
import { Chat, modelName } from "./chat.js";
import { $, h, keyed, setAttribute, setText, swatch } from "./dom.js";
import { follow } from "./feed.js";
import { bytes, count, many } from "./format.js";
import { Glance } from "./glance.js";
import { Inspector } from "./inspector.js";
import { Log } from "./log.js";
import { ArenaMap } from "./map.js";
import { Palette } from "./palette.js";
import { Requests } from "./requests.js";
import { Store } from "./store.js";
import { Tree } from "./tree.js";

const THEMES = ["system", "light", "dark"];

const store = new Store();
const palette = new Palette();
const map = new ArenaMap(store, palette);
const inspector = new Inspector(store, palette, map);
const glance = new Glance(store);
const requests = new Requests(store, palette, map);
const views = [glance, requests, new Tree(store, palette, map), new Charts(store), new Log(store)];

function sayArena() {
  const { sizes } = store;
  const one = sizes.length === 1 ? `${count(Math.floor(store.bytesTotal / sizes[0]))} blocks of ` : "blocks of ";
  setText($("arena-sub"), `${one}${store.blockSize} tokens, ${sizes.map(bytes).join(" or ")} each`);
}

function legend() {
  const counts = new Map();
  for (const row of store.rows.values()) {
    const key = palette.key(row, store.now.time);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  const free = { key: "free", name: `free, ${bytes(store.now.bytes_free)}`, property: "--free" };
  const shown = palette.classes().filter((c) => counts.has(c.key) || palette.mode === "state");
  const make = (c) => h("li", {}, swatch(c.property.slice(2)), h("span"), h("b"));
  keyed($("map-legend"), [...shown, free], (c) => palette.mode + c.key, make, (element, c) => {
    setText(element.children[1], c.name);
    setText(element.children[2], c.key === "free" ? "" : count(counts.get(c.key) ?? 0));
  });
  const held = `${many(store.rows.size, "block")} held, ${glance.shared} of them shared`;
  setAttribute($("map"), "aria-label", `Map of the arena: ${held}`);
}

function draw(change) {
  map.update(change);
  for (const view of views) view.update(change);
  legend();
  sayArena();
}

// What came since the last frame, as one change. Messages are merged while frames are missing.
let pending = null;

function take(kind, data) {
  if (kind === "failed") return;
  if (kind === "picture") nameModel();
  const change = store.take(kind, data);
  if (pending) {
    pending.whole ||= change.whole;
    pending.changed.push(...change.changed);
    pending.gone.push(...change.gone);
    pending.lost.push(...change.lost);
    return;
  }
  pending = change;
  requestAnimationFrame(() => {
    const now = pending;
    pending = null;
    draw(now);
  });
}

function nameModel() {
  modelName().then(
    (name) => setText($("model"), name),
    () => setText($("model"), ""),
  );
}

function tell(state, text) {
  $("status").dataset.state = state;
  setText($("status-text"), text);
}

function theme() {
  const root = document.documentElement;
  const button = $("theme");
  const apply = (name) => {
    if (name === "system") {
      delete root.dataset.theme;
      localStorage.removeItem("octavo-theme");
    } else {
      root.dataset.theme = name;
      localStorage.setItem("octavo-theme", name);
    }
    setText(button, { system: "◐ System", light: "☀ Light", dark: "☾ Dark" }[name]);
    button.setAttribute("aria-label", `Theme: ${name}`);
    map.repaint();
  };
  button.addEventListener("click", () => {
    const at = THEMES.indexOf(root.dataset.theme ?? "system");
    apply(THEMES[(at + 1) % THEMES.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.repaint());
  apply(root.dataset.theme ?? "system");
}

$("colour-by").addEventListener("change", (event) => {
  palette.mode = event.target.value;
  map.repaint();
  if (store.ready) legend();
});

theme();
inspector.show({ row: null, offset: null, walked: false });
new Chat();
follow(take, tell);
