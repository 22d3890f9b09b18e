"""What a request gives back. Names and shapes are those of vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from octavo.cache.receipt import Receipt
    from octavo.watch import Timing

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw logits; `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers of a request. `logprobs` has one dict (token id → `Logprob`) per token.

    `stop_reason` is the stop string or the stop token id that ended the answer; None for the end token.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: complete when `finished`, what there is so far while it streams.

    `prompt` is None when the prompt came as token ids. `prompt_logprobs` has one entry per prompt token, the
    first is None. The receipt is there once the request has been admitted; `timing` says when it was.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    receipt: Receipt | None = None
    timing: Timing | None = field(default=None, compare=False)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens whose K and V were found in the cache; None before admission."""
        return None if self.receipt is None else self.receipt.reused_tokens
