"""What OpenAI's endpoints give back, as dictionaries: a stream makes thousands of them a second.

Tests hold what is sent to these types, strictly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, cast

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from octavo.cache.receipt import Receipt
from octavo.outputs import Logprob, PromptLogprobs, RequestOutput

LEAST = -9999.0
"""What stands for minus infinity, which JSON has no word for."""

exactly = with_config(ConfigDict(extra="forbid"))


@exactly
class PromptTokensDetails(TypedDict):
    """`cached_tokens` were found in the cache."""

    cached_tokens: int


@exactly
class Usage(TypedDict):
    """Counts of tokens; `prompt_tokens` includes cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(receipts: Sequence[Receipt], completion_tokens: int | None = None) -> Usage:
    """The sum of `receipts`, with another count of `completion_tokens` where not all were asked for."""
    prompt = sum(receipt.prompt_tokens for receipt in receipts)
    if completion_tokens is None:
        completion_tokens = sum(receipt.completion_tokens for receipt in receipts)
    cached = sum(receipt.reused_tokens for receipt in receipts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@exactly
class Counted(TypedDict):
    """What a response or chunk says of usage: None where it comes later. `octavo` is the receipt, only in the last
    chunk of a stream; of several prompts it is a list with one each."""

    usage: NotRequired[Usage | None]
    octavo: NotRequired[ReceiptBody | list[ReceiptBody]]


def usage_so_far(output: RequestOutput) -> Usage:
    """That of a request that runs."""
    assert output.receipt is not None
    return usage_of([output.receipt], sum(len(answer.token_ids) for answer in output.outputs))


@exactly
class MissBody(TypedDict):
    """Why reuse ended where it did."""

    reason: str
    at_token: int | None


@exactly
class ReceiptBody(TypedDict):
    """The cache account of one prompt, as `octavo.cache.receipt.Receipt` writes it."""

    prompt_tokens: int
    completion_tokens: int
    seed: int | None
    reused_tokens: int
    reused_from: dict[str, int]
    computed_tokens: int
    recomputed_tokens: int
    written_blocks: int
    miss: MissBody | None
    preemptions: int
    queued_ms: float
    formats: dict[str, int]
    compressed_tokens: int
    dropped: list[tuple[int, int, str]]
    pinned: dict[str, Any] | None
    exact: bool


def receipt_body(receipt: Receipt) -> ReceiptBody:
    """`receipt` for a response."""
    return cast(ReceiptBody, receipt.to_dict())


def finite(logprob: float) -> float:
    """`logprob`, or `LEAST`."""
    return max(logprob, LEAST)


@exactly
class TopLogprob(TypedDict):
    """A token that could have been, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


@exactly
class TokenLogprob(TopLogprob):
    """A token that is, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


@exactly
class ChoiceLogprobs(TypedDict):
    """Log-probabilities of a chat answer, token by token."""

    content: list[TokenLogprob]
    refusal: None


@exactly
class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion; lists with an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@exactly
class PromptToken(TypedDict):
    """A token of the prompt, or one that could have been in its place."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
"""vLLM's shape: per token of the prompt, by token id; None for the first."""


@exactly
class Scored(TypedDict):
    """Log-probs of the prompt, where they were asked for."""

    prompt_logprobs: NotRequired[PromptTokens]


def scored(output: RequestOutput) -> Scored:
    """Those of `output`."""
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": _prompt_tokens(output.prompt_logprobs)}


def _prompt_tokens(steps: PromptLogprobs) -> PromptTokens:

    def body(found: Logprob) -> PromptToken:
        return {
            "logprob": finite(found.logprob),
            "rank": found.rank,
            "decoded_token": found.decoded_token,
        }

    return [
        None if step is None else {str(token): body(found) for token, found in step.items()} for step in steps
    ]


ChatFinish = Literal["stop", "length", "tool_calls"]
CompletionFinish = Literal["stop", "length"]


@exactly
class Called(TypedDict):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str


@exactly
class ToolCallBody(TypedDict):
    """A call."""

    id: str
    type: Literal["function"]
    function: Called


@exactly
class ChatMessage(TypedDict):
    """An answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallBody]]


@exactly
class ChatChoice(TypedDict):
    """One of the `n` answers; `stop_reason` is the stop string or token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinish
    stop_reason: int | str | None


@exactly
class Head(TypedDict):
    """What all responses and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: NotRequired[Literal["default"]]


@exactly
class ChatCompletion(Head, Scored):
    """The response of `/v1/chat/completions`. `octavo` is the receipt."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    octavo: ReceiptBody


@exactly
class CalledPiece(TypedDict):
    """More of the arguments; the name comes once and whole."""

    name: NotRequired[str]
    arguments: str


@exactly
class ToolCallPiece(TypedDict):
    """More of call `index`; `id` and `type` come with its first piece."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledPiece


@exactly
class ChatDelta(TypedDict):
    """What is new in an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPiece]]


@exactly
class ChatChunkChoice(TypedDict):
    """What is new in one of the `n` answers; the last chunk of each has a `finish_reason`."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: NotRequired[int | str | None]


@exactly
class ChatChunk(Head, Counted):
    """An event of a stream; the last one has usage and receipt where they were asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@exactly
class CompletionChoice(Scored):
    """One of the `n` completions of one of the prompts, or what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish | None
    stop_reason: NotRequired[int | str | None]


@exactly
class Completion(Head, Counted):
    """The response of `/v1/completions`, and an event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
