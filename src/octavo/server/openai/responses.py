"""What OpenAI's endpoints give back. Fields that were not set are not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from octavo.cache.receipt import Receipt
from octavo.outputs import Logprob, PromptLogprobs, RequestOutput


class Exactly(BaseModel):
    """These fields and no others."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Exactly):
    """`cached_tokens` were found in the cache."""

    cached_tokens: int


class Usage(Exactly):
    """Counts of tokens; `prompt_tokens` includes cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, receipts: Sequence[Receipt], completion_tokens: int | None = None) -> Usage:
        """The sum of `receipts`, with another count of `completion_tokens` where not all were asked for."""
        prompt = sum(receipt.prompt_tokens for receipt in receipts)
        if completion_tokens is None:
            completion_tokens = sum(receipt.completion_tokens for receipt in receipts)
        cached = sum(receipt.reused_tokens for receipt in receipts)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion_tokens,
            total_tokens=prompt + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


def usage_so_far(output: RequestOutput) -> Usage:
    """That of a request that runs."""
    assert output.receipt is not None
    return Usage.of([output.receipt], sum(len(answer.token_ids) for answer in output.outputs))


class MissBody(Exactly):
    """Why reuse ended where it did."""

    reason: str
    at_token: int | None


class ReceiptBody(Exactly):
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

    @classmethod
    def of(cls, receipt: Receipt) -> ReceiptBody:
        """`receipt` for a response."""
        return cls.model_validate(receipt.to_dict())


class TopLogprob(Exactly):
    """A token that could have been, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that is, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Exactly):
    """Log-probabilities of a chat answer, token by token."""

    content: list[TokenLogprob] | None
    refusal: None


class CompletionLogprobs(Exactly):
    """Log-probabilities of a completion; lists with an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Exactly):
    """A token of the prompt, or one that could have been in its place."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
"""vLLM's shape: per token of the prompt, by token id; None for the first."""


def prompt_tokens(steps: PromptLogprobs, least: float) -> PromptTokens:
    """`steps` for a response."""

    def body(found: Logprob) -> PromptToken:
        return PromptToken(
            logprob=max(found.logprob, least), rank=found.rank, decoded_token=found.decoded_token
        )

    return [
        None if step is None else {str(token): body(found) for token, found in step.items()} for step in steps
    ]


ChatFinish = Literal["stop", "length", "tool_calls"]
CompletionFinish = Literal["stop", "length"]


class FunctionBody(Exactly):
    """`arguments` is JSON; in a stream both come in pieces, the name whole."""

    name: str | None = None
    arguments: str


class ToolCallBody(Exactly):
    """A call; `index` is only there in a stream, where `id` and `type` come with its first piece alone."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionBody


class ChatMessage(Exactly):
    """An answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(Exactly):
    """One of the `n` answers; `stop_reason` is the stop string or token that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinish
    stop_reason: int | str | None


class Answered(Exactly):
    """What all responses and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None


class ChatCompletion(Answered):
    """The response of `/v1/chat/completions`. `octavo` is the receipt."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens | None = None
    octavo: ReceiptBody


class ChatDelta(Exactly):
    """What is new in an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallBody] | None = None


class ChatChunkChoice(Exactly):
    """What is new in one of the `n` answers; the last chunk of each has a `finish_reason`."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None = None


class ChatChunk(Answered):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    octavo: ReceiptBody | None = None


class CompletionChoice(Exactly):
    """One of the `n` completions of one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: CompletionFinish | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptTokens | None = None


class Completion(Answered):
    """The response of `/v1/completions`, and an event of its stream.

    `octavo` is the receipt: of several prompts a list with one each.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    octavo: ReceiptBody | list[ReceiptBody] | None = None
