// The API key: asked for when the server wants one, kept for this tab.

import { $ } from "./dom.js";

const NAME = "octavo-key";
let asking = null;

export const root = new URL("../", import.meta.url);

export function headers(more = {}) {
  const key = sessionStorage.getItem(NAME);
  $("key").hidden &&= key === null;
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

// Resolves once the dialog is closed: to true if there is another key to try. With `optional` it can be left.
export function askForKey(why, optional = false) {
  $("key").hidden = false;
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-why").textContent = why;
    $("key-input").value = "";
    $("key-cancel").hidden = !optional;
    dialog.returnValue = "";
    dialog.oncancel = (event) => optional || event.preventDefault();
    dialog.onclose = () => {
      const key = $("key-input").value.trim();
      if (dialog.returnValue === "use") sessionStorage.setItem(NAME, key);
      asking = null;
      resolve(dialog.returnValue === "use");
    };
    dialog.showModal();
  });
  return asking;
}

$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key").addEventListener("click", async () => {
  if (await askForKey("The page goes on with another key.", true)) location.reload();
});

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
