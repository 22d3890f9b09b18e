// A conversation with the model, and under each answer what the cache made of it.

import { $, h, setText } from "./dom.js";
import { problem, send } from "./key.js";
import { bar, fill, total, words, write } from "./receipt.js";
import { events } from "./sse.js";

const LABEL = "dashboard chat";

export class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.model = null;
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    $("chat-text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("chat-form").requestSubmit();
    });
    $("chat-text").addEventListener("input", () => grow($("chat-text")));
    $("chat-stop").addEventListener("click", () => this.running?.abort());
    $("chat-new").addEventListener("click", () => this.#begin());
    this.#begin();
  }

  #begin() {
    this.running?.abort();
    this.messages = [];
    const hint = "Each answer comes with its receipt: what was reused, what was computed, and why.";
    $("talk").replaceChildren(h("p", { class: "hint", text: hint }));
  }

  async #ask() {
    const text = $("chat-text").value.trim();
    if (!text || this.running) return;
    $("talk").querySelector(":scope > .hint")?.remove();
    $("chat-text").value = "";
    grow($("chat-text"));
    const asked = { role: "user", content: text };
    const { messages } = this;
    messages.push(asked);
    $("talk").append(h("div", { class: "turn user" }, h("p", { text })));
    const answer = h("div", { class: "turn answer", "data-state": "running" }, h("p", { class: "text" }));
    $("talk").append(answer);
    this.#busy(new AbortController());
    const { signal } = this.running;
    let said = null;
    try {
      said = await this.#stream(messages, answer, signal);
      setText($("chat-said"), `Answer: ${said}`);
    } catch (error) {
      said = answer.querySelector(".text").textContent || null;
      if (signal.aborted) answer.append(h("p", { class: "sub", text: "stopped" }));
      else answer.append(h("p", { class: "error", role: "alert", text: error.message }));
    }
    answer.dataset.state = "ended";
    if (said !== null) messages.push({ role: "assistant", content: said });
    else this.#takeBack(messages, asked);
    this.#busy(null);
  }

  // A question without an answer is no part of the conversation.
  #takeBack(messages, asked) {
    messages.splice(messages.indexOf(asked), 1);
    if (!$("chat-text").value) $("chat-text").value = asked.content;
  }

  async #stream(messages, answer, signal) {
    const response = await send("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(await this.#request(messages)),
      signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    const text = answer.querySelector(".text");
    let reason = null;
    let finished = false;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        finished = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      if (choice?.delta.content) this.#write(text, choice.delta.content);
      reason = choice?.finish_reason ?? reason;
      if (chunk.octavo) this.#receipt(answer, chunk.octavo, reason);
    }
    if (!finished) throw new Error("the answer broke off: the connection ended");
    return text.textContent;
  }

  async #request(messages) {
    this.model ??= await modelName();
    const system = $("chat-system").value.trim();
    const temperature = $("chat-temperature").valueAsNumber;
    const most = $("chat-max").valueAsNumber;
    return {
      model: this.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      stream: true,
      stream_options: { include_usage: true },
      prompt_cache_key: LABEL,
      ...(Number.isFinite(temperature) && { temperature }),
      ...(Number.isFinite(most) && { max_completion_tokens: most }),
    };
  }

  #write(text, more) {
    const talk = $("talk");
    const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
    text.append(more);
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  }

  #receipt(answer, receipt, reason) {
    const line = bar();
    fill(line, receipt, total(receipt));
    const said = h("p", { class: "sub said" });
    write(said, receipt);
    const limit = "ended at the most tokens asked for, or at the end of the context";
    const end = reason === "length" ? h("p", { class: "sub", text: limit }) : "";
    const exactly = JSON.stringify(receipt, null, 1);
    const more = h("details", {}, h("summary", { text: "Receipt" }), h("pre", { text: exactly }));
    const name = `Receipt: ${words(receipt)}`;
    answer.append(h("div", { class: "receipt", role: "group", "aria-label": name }, end, line, said, more));
    $("talk").scrollTop = $("talk").scrollHeight;
  }

  #busy(controller) {
    this.running = controller;
    $("chat-stop").hidden = controller === null;
    $("chat-send").hidden = controller !== null;
    $("talk").scrollTop = $("talk").scrollHeight;
  }
}

export async function modelName() {
  const response = await send("v1/models");
  if (!response.ok) throw new Error(await problem(response));
  return (await response.json()).data[0].id;
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 160)}px`;
}
