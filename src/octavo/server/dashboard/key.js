// The API key: asked for when the server wants one, kept for this tab.

import { $ } from "./dom.js";

const NAME = "octavo-key";
let asking = null;

export const root = new URL("../", import.meta.url);

export function headers(more = {}) {
  const key = sessionStorage.getItem(NAME);
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

// Resolves once there is another key to try.
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-why").textContent = why;
    $("key-input").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(NAME, $("key-input").value.trim());
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

// `fetch` with the key; asks for one, and again, while the server says 401. The path is below the server's root.
export async function send(path, options = {}) {
  for (;;) {
    const response = await fetch(new URL(path, root), { ...options, headers: headers(options.headers) });
    if (response.status !== 401) return response;
    const known = sessionStorage.getItem(NAME) !== null;
    await askForKey(known ? "The server does not know this key." : "This server answers only those who have a key.");
  }
}

// What went wrong, in the server's words.
export async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `HTTP ${response.status}`;
  }
}
