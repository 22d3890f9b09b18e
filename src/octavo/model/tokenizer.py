"""Text to token ids and back: a thin wrapper over the transformers fast tokenizer of a model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, InvalidRequest
from octavo.model.fewest import Fewest, fewest
from octavo.model.spec import id_tuple

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """`hf` is the transformers tokenizer, or None for a model without one: text then raises `InvalidRequest`
    where it is needed, and token ids work. Safe to use from several threads."""

    def __init__(
        self,
        hf: Any | None,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        missing: str = "the model has no tokenizer",
    ) -> None:
        self.hf = hf
        self._missing = missing
        own = () if hf is None else id_tuple(hf.eos_token_id)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_token_ids, *own)))
        self.chat_template: str | dict[str, str] | None = chat_template or (hf.chat_template if hf else None)
        if hf is not None:
            # The backend is called directly, since transformers' own calls set these on it and so are not
            # thread-safe.
            hf.backend_tokenizer.no_truncation()
            hf.backend_tokenizer.no_padding()
        self._fewest = Fewest(None) if hf is None else fewest(hf.backend_tokenizer)

    def _backend(self) -> Any:
        if self.hf is None:
            raise InvalidRequest(f"{self._missing}; send token ids instead of text", param="prompt")
        return self.hf.backend_tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS where the tokenizer prepends one and `add_special_tokens` is true.

        Raises `InvalidRequest` for a lone surrogate, which is no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text holds a lone surrogate at character {error.start}, which is no character; remove it",
                param="prompt",
            ) from error
        return list(self._backend().encode(text, add_special_tokens=add_special_tokens).ids)

    def fewest_tokens(self, text: str) -> int:
        """So many tokens `encode(text)` has at least, found without encoding it; 0 where that cannot be known."""
        return self._fewest.tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, no space cleaned up; bytes of an unfinished character become U+FFFD."""
        return str(self._backend().decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoded_token(self, token_id: int) -> str:
        """The text of one token, special tokens spelled out; U+FFFD where it is part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the answer (`add_generation_prompt=True` unless given).

        The template writes every special token itself, so none is added and BOS is never doubled. `options`
        go to the template (`tools`, `continue_final_message`, ...). Raises `InvalidRequest` when there is no
        template or it rejects the messages.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text that `apply_chat_template` encodes."""
        self._backend()
        if not self.chat_template or self.hf is None:
            raise InvalidRequest(
                "the model has no chat template; start with --chat-template FILE or use plain completions",
                param="messages",
            )
        options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
        template = options.pop("chat_template", None) or self.chat_template
        chosen = template if isinstance(template, str) else None
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages], chat_template=chosen, tokenize=False, **options
            )
        except Exception as error:  # templates raise Jinja errors of any kind, on messages they do not expect
            raise InvalidRequest(
                f"the chat template rejects these messages: {error}", param="messages"
            ) from error
        return str(text)

    @property
    def vocab_size(self) -> int:
        """Number of tokens the tokenizer knows, added ones included; the model's head may be wider."""
        self._backend()
        return len(self.hf) if self.hf is not None else 0

    @property
    def bos_token_id(self) -> int | None:
        """The id of the BOS token, whether or not `encode` prepends it; None if there is none."""
        return None if self.hf is None else self.hf.bos_token_id


def load_tokenizer(
    path: Path, *, eos_token_ids: Sequence[int] = (), chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer of the model directory `path`; `chat_template` overrides the model's own.

    A missing or unusable tokenizer is no error here, only where text is first needed. Raises `ConfigError`
    for a `chat_template` that is neither a readable file nor a template.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return Tokenizer(None, eos_token_ids=eos_token_ids, missing=f"the model in {path} has no tokenizer")
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # untrusted files: transformers raises many kinds of errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        missing = f"the tokenizer in {path} cannot be read ({reason})"
        return Tokenizer(None, eos_token_ids=eos_token_ids, missing=missing)
    if not getattr(hf, "is_fast", False):
        return Tokenizer(
            None, eos_token_ids=eos_token_ids, missing=f"the tokenizer in {path} has no tokenizer.json form"
        )
    return Tokenizer(hf, eos_token_ids=eos_token_ids, chat_template=template)


def read_chat_template(text_or_path: str) -> str:
    """The template itself: `text_or_path` if it looks like one (has `{{` or `{%`), else the file's
    content."""
    if "{{" in text_or_path or "{%" in text_or_path:
        return text_or_path
    try:
        return Path(text_or_path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={text_or_path!r} is neither a template nor a readable file: {error}",
            param="chat_template",
        ) from error
