"""How long a sequence may be: the smaller of the model's context and the whole arena."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cache.layout import CacheLayout
from octavo.errors import ContextLengthExceeded, KVCacheTooSmall

UNNAMED_CONTEXT = 131_072
"""Context of a model whose configuration names none."""


@dataclass(frozen=True)
class Limits:
    """In tokens, prompt and answer together; `context` is None where only the arena of `bytes_total` limits."""

    layout: CacheLayout
    bytes_total: int
    context: int | None

    @property
    def arena(self) -> int:
        """The longest sequence that the arena holds."""
        return self.layout.longest_sequence(self.bytes_total)

    @property
    def tokens(self) -> int:
        """The longest sequence."""
        return self.arena if self.context is None else min(self.context, self.arena)

    def check(self, prompt: int, request_id: str | None = None, *, at_least: bool = False) -> None:
        """Raises `ContextLengthExceeded` or `KVCacheTooSmall` unless `prompt` tokens and one more fit.

        `at_least` says that the prompt was not counted to its end.
        """
        who = "" if request_id is None else f"request {request_id!r}: "
        has = f"the prompt has {'at least ' if at_least else ''}{prompt} and needs room for 1 more"
        if self.context is not None and prompt + 1 > self.context:
            raise ContextLengthExceeded(
                f"{who}this model's maximum context length is {self.context} tokens, {has}; "
                f"shorten it by {prompt + 1 - self.context}",
                param="prompt",
            )
        if prompt + 1 > self.arena:
            raise KVCacheTooSmall(
                f"{who}the KV cache of {self.bytes_total} bytes holds at most {self.arena} tokens, "
                f"{has}; shorten it by {prompt + 1 - self.arena} or start with kv_cache_memory of at least "
                f"{self.layout.sequence_bytes(prompt + 1)}",
                param="prompt",
            )
