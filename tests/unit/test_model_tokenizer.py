"""The tokenizer wrapper: round trips, BOS, chat templates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from model_builders import TEMPLATE, byte_tokenizer

from octavo.errors import ConfigError, InvalidRequest
from octavo.model.tokenizer import Tokenizer, load_tokenizer, read_chat_template

BOS, EOS = 256, 257
TEXT = "Grüße,  1234 \N{SNOWMAN}\n\tไทย 👩‍👩‍👧"
CHAT = [{"role": "user", "content": "hi"}]


def test_text_survives_and_special_tokens_can_be_skipped() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = [*tokenizer.encode(TEXT), EOS]
    assert ids[0] == BOS
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s>{TEXT}</s>"
    assert tokenizer.encode(TEXT, add_special_tokens=False) == ids[1:-1]


def test_spaces_before_punctuation_are_not_cleaned_up() -> None:
    hf = byte_tokenizer()
    hf.clean_up_tokenization_spaces = True
    tokenizer = Tokenizer(hf)
    assert tokenizer.decode(tokenizer.encode("do n't , ok ?")) == "do n't , ok ?"


def test_ids_equal_those_of_transformers() -> None:
    hf = byte_tokenizer()
    expected = hf.encode(TEXT)
    assert Tokenizer(hf).encode(TEXT) == expected


def test_truncation_saved_with_the_tokenizer_does_not_shorten_prompts(tmp_path: Path) -> None:
    hf = byte_tokenizer()
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=8)
    assert len(Tokenizer(hf).encode("0123456789")) == 11


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_a_template_that_writes_bos_yields_one_bos(prepend_bos: bool) -> None:
    tokenizer = Tokenizer(byte_tokenizer(prepend_bos=prepend_bos))
    ids = tokenizer.apply_chat_template(CHAT)
    assert ids.count(BOS) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><user>hi<assistant>"


def test_template_options_reach_the_template() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == "<s><user>hi"
    named = Tokenizer(byte_tokenizer(chat_template="{{ mood }}{{ messages[0]['content'] }}"))
    assert named.render_chat(CHAT, mood="glad") == "gladhi"


def test_chat_template_override_by_text_or_file(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "mine.jinja"
    file.write_text("file:{{ messages[0]['content'] }}")
    by_file = load_tokenizer(tmp_path / "model", chat_template=str(file))
    by_text = load_tokenizer(tmp_path / "model", chat_template="text:{{ messages[0]['content'] }}")
    assert by_file.render_chat(CHAT) == "file:hi"
    assert by_text.render_chat(CHAT) == "text:hi"
    assert load_tokenizer(tmp_path / "model").chat_template == TEMPLATE
    with pytest.raises(ConfigError, match="neither a template nor a readable file"):
        read_chat_template(str(tmp_path / "absent.jinja"))


def test_no_template_or_a_rejecting_template_is_the_requests_error() -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        Tokenizer(byte_tokenizer(chat_template=None)).apply_chat_template(CHAT)
    strict = Tokenizer(byte_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        strict.apply_chat_template(CHAT)


def test_end_tokens_are_those_of_the_model_and_of_the_tokenizer_once_each() -> None:
    assert Tokenizer(byte_tokenizer(), eos_token_ids=(7, EOS)).eos_token_ids == (7, EOS)
    assert Tokenizer(byte_tokenizer(), eos_token_ids=(7,)).eos_token_ids == (7, EOS)
    assert Tokenizer(None, eos_token_ids=(7,)).eos_token_ids == (7,)


def test_single_tokens_are_spelled_for_log_probs() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.decoded_token(EOS) == "</s>"
    assert tokenizer.decoded_token(tokenizer.encode("x", add_special_tokens=False)[0]) == "x"
    assert (
        tokenizer.decoded_token(tokenizer.encode("ü", add_special_tokens=False)[0])
        == "\N{REPLACEMENT CHARACTER}"
    )
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (258, BOS)


def test_many_threads_encode_at_once() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(tokenizer.encode, [TEXT * 20] * 64))
    assert results == [tokenizer.encode(TEXT * 20)] * 64


def test_a_broken_tokenizer_file_is_named_when_text_comes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        tokenizer.encode("hello")
