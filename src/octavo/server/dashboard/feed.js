// The feed of the cache, again and again until it holds. While the page is hidden nothing is asked of the server.

import { askForKey, problem, send } from "./key.js";
import { events } from "./sse.js";

const SILENCE_MS = 20_000;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function whenVisible() {
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

// Calls `take(event, data)` for every message and `tell(state, text)` about the connection; never returns.
export async function follow(take, tell) {
  let wait = 500;
  let refused = false;
  for (;;) {
    await whenVisible();
    const leave = new AbortController();
    let silence;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => leave.abort(), SILENCE_MS);
    };
    const hide = () => document.hidden && leave.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const response = await send("cache/feed", { signal: leave.signal });
      if (!response.ok) {
        const why = await problem(response);
        tell("lost", why);
        wait = 8000;
        if (response.status === 403 && !refused) {
          refused = true; // asked once; later there is the button
          if (await askForKey(why, true)) wait = 0;
        }
      } else {
        heard();
        for await (const { event, data } of events(response)) {
          heard();
          wait = 500;
          take(event, JSON.parse(data));
          if (event === "failed") tell("lost", JSON.parse(data).error.message);
          else tell("live", "live");
        }
      }
    } catch (error) {
      if (!leave.signal.aborted) tell("lost", "no connection, trying again");
      if (!(error instanceof TypeError) && error.name !== "AbortError") console.error(error);
    } finally {
      clearTimeout(silence);
      document.removeEventListener("visibilitychange", hide);
    }
    await pause(wait);
    wait = Math.min(2 * wait, 8000);
  }
}
