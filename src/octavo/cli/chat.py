"""`octavo chat`: a conversation. What was said stays said: an answer cut short or refused loses nothing before it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

from octavo.cli.generate import deltas, text_of
from octavo.cli.show import finish_reason, notice, show_receipt
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import OctavoError, show
from octavo.interrupt import interruptible
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams

COMMANDS = "/receipt shows the account of the last answer, /reset starts over, /exit or Ctrl-D leaves"
HELP = f"Ctrl-C stops an answer. {COMMANDS}; /help says this again. A message that begins with / has a space before it."


class Conversation:
    """The messages so far, and how to go on."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self.last: RequestOutput | None = None
        self._engine = engine
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": text_of(system, "system")}]
        self._said = 0
        self._turns = engine.turns()
        self.reset()

    def reset(self) -> None:
        """Back to the system prompt."""
        self.messages = list(self._opening)

    def say(self, text: str, stop: threading.Event) -> Iterator[str]:
        """The answer to `text`, piece by piece, until `stop`. Both are then part of the conversation.

        Raises `OctavoError` (mostly `ContextLengthExceeded`), and nothing was said.
        """
        said = [*self.messages, {"role": "user", "content": text_of(text, "message")}]
        prompt = self._engine.tokenizer.render_chat(said)
        tokens = self._turns.encode(prompt)
        self._said += 1
        live = self._engine.prepare(f"turn {self._said}", tokens, self._params)
        answer = ""
        for delta in deltas(self._engine, live, stop):
            answer += delta
            yield delta
        self.messages = [*said, {"role": "assistant", "content": answer}]
        self.last = live.output()
        self._turns.remember(prompt, tokens + self.last.outputs[0].token_ids)


def run_chat(config: EngineConfig, params: SamplingParams, *, system: str | None) -> None:
    """Talk until the input ends. Without a terminal each line of stdin is a message."""
    engine = Engine(config, notice=notice)
    if not engine.tokenizer.chat_template:
        engine.tokenizer.render_chat([])  # raises, and says what can be done
    conversation = Conversation(engine, params, system)
    if sys.stdin.isatty():
        notice(HELP)
    for line in lines():
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            notice("The conversation starts over.")
        elif line == "/receipt":
            if conversation.last is None:
                notice("There is no receipt before the first answer.")
            else:
                show_receipt(conversation.last)
        elif line == "/help":
            notice(HELP)
        elif line.startswith("/"):
            notice(f"{show(line)} is no command: {COMMANDS}. If it is a message, put a space before it.")
        elif message := line.strip():
            with interruptible() as stop:
                _answer(conversation, message, stop)


def _answer(conversation: Conversation, line: str, stop: threading.Event) -> None:
    try:
        for delta in conversation.say(line, stop):
            sys.stdout.write(delta)
            sys.stdout.flush()
    except OctavoError as error:
        notice(
            f"{error.message}\nThis message was not taken; the conversation before it is kept (/reset starts over)."
        )
        return
    print(flush=True)
    assert conversation.last is not None
    reason = finish_reason(conversation.last)
    if reason == "abort":
        notice("[stopped]")
    elif reason == "length":
        notice("[cut: the context or --max-tokens is used up]")


def lines() -> Iterator[str]:
    """What is typed, line by line, without white space at its end; Ctrl-C drops a line, Ctrl-D ends them."""
    if not sys.stdin.isatty():
        yield from (line.rstrip() for line in sys.stdin)
        return
    import readline  # noqa: F401  (gives input() editing and history)

    while True:
        try:
            yield input("> ").rstrip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
