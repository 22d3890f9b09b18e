"""`cache_control`: what is marked is kept, and the usage tells of it. With the real `anthropic` package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from octavo import AsyncEngine
from support.serving import SMALL, Served, serving

BLOCK = 16
BLOCK_BYTES = 8192
"""Of the tiny llama in float32."""
KEEP: Any = {"type": "ephemeral"}
LONG: Any = {"type": "ephemeral", "ttl": "1h"}
BOOK = "It was a dark and stormy night; the rain fell in torrents. " * 4

Serve = Callable[..., Any]


@pytest.fixture
def serve(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """A client of a server with a cache of so many blocks, of which so many may be pinned."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))

    @contextmanager
    def start(blocks: int, pinned: int) -> Iterator[tuple[anthropic.Anthropic, Served]]:
        sizes = {"kv_cache_memory": blocks * BLOCK_BYTES, "max_pinned": pinned * BLOCK_BYTES}
        engine = AsyncEngine(str(tiny("llama")), **{**SMALL, **sizes})
        try:
            with (
                serving(engine) as served,
                anthropic.Anthropic(base_url=served.url, api_key="-", max_retries=0) as client,
            ):
                yield client, served
        finally:
            engine.close()

    return start


def ask(client: anthropic.Anthropic, system: Any, question: Any = "Who?", **options: Any) -> Any:
    return client.messages.create(
        model="tiny",
        max_tokens=4,
        system=system,
        messages=[{"role": "user", "content": question}],
        **options,
    )


def counts(message: Any) -> tuple[int, int, int]:
    """Tokens read, tokens created for 5 minutes and for an hour; the usage must add up to the prompt."""
    usage, receipt = message.usage, message.model_extra["octavo"]
    created = usage.cache_creation
    assert usage.cache_creation_input_tokens == (
        created.ephemeral_5m_input_tokens + created.ephemeral_1h_input_tokens
    )
    whole = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert whole == receipt["prompt_tokens"]
    assert usage.cache_read_input_tokens == receipt["reused_tokens"]
    return (
        usage.cache_read_input_tokens,
        created.ephemeral_5m_input_tokens,
        created.ephemeral_1h_input_tokens,
    )


def text(text: str, control: Any = None) -> Any:
    block = {"type": "text", "text": text}
    return block if control is None else {**block, "cache_control": control}


def blocks_of(text: str) -> int:
    """Whole blocks of what the template writes up to the end of the system prompt `text`, in tokens. BOS is one."""
    return len(f"B<system>{text}") // BLOCK * BLOCK


def test_a_marked_part_is_created_once_and_read_later(serve: Serve) -> None:
    with serve(blocks=64, pinned=32) as (client, served):
        system = [text(BOOK, KEEP)]
        first, second, unmarked = ask(client, system), ask(client, system, "Why?"), ask(client, BOOK)
        kept = blocks_of(BOOK)
        assert counts(first) == (0, kept, 0)
        assert counts(second) == (kept, 0, 0)
        assert counts(unmarked)[1:] == (0, 0)
        pinned = first.model_extra["octavo"]["pinned"]
        assert (pinned["ttl_s"], pinned["tokens"], pinned["refused"]) == (300.0, kept, None)
        assert served.ask(lambda engine: engine.stats().bytes_pinned) == kept // BLOCK * BLOCK_BYTES


def test_a_stream_tells_the_same_at_its_beginning_and_its_end(serve: Serve) -> None:
    with serve(blocks=64, pinned=32) as (client, _):
        with client.messages.stream(
            model="tiny",
            max_tokens=4,
            system=[text(BOOK, LONG)],
            messages=[{"role": "user", "content": "Who?"}],
        ) as stream:
            events = list(stream)
            final = stream.get_final_message()
        start, end = events[0], events[-2]
        assert start.type == "message_start"
        assert end.type == "message_delta"
        kept = blocks_of(BOOK)
        created = final.usage.cache_creation
        assert created is not None
        assert (created.ephemeral_5m_input_tokens, created.ephemeral_1h_input_tokens) == (0, kept)
        for usage in (start.message.usage, end.usage, final.usage):
            assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, kept)


def test_the_last_of_several_marks_is_kept_for_the_longest_time(serve: Serve) -> None:
    with serve(blocks=64, pinned=32) as (client, served):
        message = ask(client, [text(BOOK, LONG)], [text(BOOK, KEEP), text("Who is that?")])
        assert counts(message)[2] == len(f"B<system>{BOOK}<user>{BOOK}") // BLOCK * BLOCK
        assert message.model_extra["octavo"]["pinned"]["ttl_s"] == 3600.0
        served.ask(lambda engine: engine.check())


def test_a_mark_of_the_whole_request_keeps_the_whole_prompt(serve: Serve) -> None:
    with serve(blocks=64, pinned=32) as (client, _):
        message = ask(client, BOOK, cache_control=KEEP)
        assert counts(message) == (0, message.model_extra["octavo"]["prompt_tokens"] // BLOCK * BLOCK, 0)


def test_more_of_a_conversation_creates_only_what_is_new(serve: Serve) -> None:
    with serve(blocks=64, pinned=32) as (client, _):
        first = ask(client, [text(BOOK, KEEP)])
        more = ask(client, [text(BOOK)], [text(BOOK), text("Who?")], cache_control=KEEP)
        kept = counts(first)[1]
        assert counts(more)[0] >= kept
        assert sum(counts(more)) == more.model_extra["octavo"]["prompt_tokens"] // BLOCK * BLOCK


def test_what_is_kept_outlives_pressure(serve: Serve) -> None:
    with serve(blocks=64, pinned=20) as (client, _):
        kept = counts(ask(client, [text(BOOK, KEEP)]))[1]
        for i in range(8):
            ask(client, f"{i}{BOOK}", BOOK)
        assert counts(ask(client, BOOK, "Why?"))[0] == kept


def test_over_the_budget_nothing_is_kept_and_the_receipt_says_so(serve: Serve) -> None:
    with serve(blocks=64, pinned=4) as (client, served):
        message = ask(client, [text(BOOK, KEEP)])
        assert counts(message) == (0, 0, 0)
        assert message.model_extra["octavo"]["pinned"]["refused"].startswith(
            f"over max_pinned={4 * BLOCK_BYTES} bytes by"
        )
        assert served.ask(lambda engine: engine.stats().bytes_pinned) == 0


def test_no_answer_is_needed_to_fill_the_cache(serve: Serve) -> None:
    with serve(blocks=64, pinned=32) as (client, _):
        options: Any = {"model": "tiny", "max_tokens": 0, "system": [text(BOOK, KEEP)]}
        options["messages"] = [{"role": "user", "content": "Who?"}]
        warm = client.messages.create(**options)
        assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
        assert counts(warm)[1] == blocks_of(BOOK)
        with client.messages.stream(**options) as stream:
            again = stream.get_final_message()
        assert (again.content, again.stop_reason, again.usage.output_tokens) == ([], "max_tokens", 0)
        assert again.usage.cache_read_input_tokens
