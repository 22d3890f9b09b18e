"""Log-probabilities in OpenAI's two shapes, with the bytes of each token.

A token may be a part of a character, so its text alone cannot say what it is; the bytes of an answer's tokens, one
after the other, are the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import cached_property

from octavo.model.tokenizer import Tokenizer
from octavo.outputs import Logprob
from octavo.server.openai.responses import (
    ChoiceLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
    finite,
)

_SPACE = "▁"


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with (GPT-2's table): printable ones stand for themselves,
    the others for the code points from 256 up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


class TokenBytes:
    """The bytes that a token adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = None if tokenizer.hf is None else tokenizer.hf.backend_tokenizer
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._of(token_id)
        return self._known[token_id]

    @cached_property
    def _added(self) -> dict[int, str]:
        assert self._backend is not None
        return {token: added.content for token, added in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_level(self) -> bool:
        """How the decoder reads the letter of a space tells."""
        decoder = None if self._backend is None else self._backend.decoder
        return decoder is not None and decoder.decode(["a", "Ġa"]) == "a a"

    def _of(self, token_id: int) -> bytes:
        piece = None if self._backend is None else self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        if self._byte_level:
            return bytes(_BYTES[letter] for letter in piece if letter in _BYTES)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace(_SPACE, " ").encode()

    def text(self, token_id: int) -> str:
        """The token as OpenAI names it: its text, or `bytes:\\xe2\\x80` where it is no whole characters."""
        data = self(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that no text is encoded to, by their text."""
    if tokenizer.hf is None:
        return {}
    added = tokenizer.hf.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


def chat_logprobs(
    steps: Sequence[Mapping[int, Logprob]], token_ids: Sequence[int], top: int, tokens: TokenBytes
) -> ChoiceLogprobs:
    """Those of a chat answer; `steps` has the sampled token and the likeliest of each of `token_ids`."""

    def entry(token_id: int, logprob: Logprob) -> TopLogprob:
        data = tokens(token_id)
        return {"token": tokens.text(token_id), "logprob": finite(logprob.logprob), "bytes": list(data)}

    content: list[TokenLogprob] = []
    for token_id, step in zip(token_ids, steps, strict=True):
        ranked = sorted((item for item in step.items() if item[1].rank <= top), key=lambda item: item[1].rank)
        content.append({**entry(token_id, step[token_id]), "top_logprobs": [entry(*item) for item in ranked]})
    return {"content": content, "refusal": None}


class CompletionTokens:
    """Log-probabilities of one text of `/v1/completions`, piece by piece: their offsets count its characters."""

    def __init__(self, tokens: TokenBytes, hidden: frozenset[int]) -> None:
        self._tokens = tokens
        self._hidden = hidden  # tokens that the text leaves out
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(
        self,
        steps: Sequence[Mapping[int, Logprob] | None],
        token_ids: Sequence[int],
        found: CompletionLogprobs,
    ) -> None:
        """Add those of the next `token_ids` to `found`; None where there are none, at the first token of a prompt."""
        for token_id, step in zip(token_ids, steps, strict=True):
            found["tokens"].append(self._tokens.text(token_id))
            found["text_offset"].append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokens(token_id)))
            if step is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
            else:
                found["token_logprobs"].append(finite(step[token_id].logprob))
                found["top_logprobs"].append(
                    {self._tokens.text(t): finite(p.logprob) for t, p in step.items()}
                )
