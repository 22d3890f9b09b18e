"""OpenAI's requests in Octavo's words: messages as templates want them, parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from octavo.errors import InvalidRequest
from octavo.model.tokenizer import Tokenizer
from octavo.outputs import Logprob
from octavo.server.openai import translate
from octavo.server.openai.logprobs import CompletionTokens, TokenBytes, chat_logprobs
from octavo.server.openai.responses import CompletionLogprobs
from octavo.server.openai.schemas import ChatRequest, CompletionRequest
from octavo.server.openai.tools import HERMES, MISTRAL_NAMED
from octavo.server.openai.translate import Conversation, sampling_params, structured
from unit.model_builders import TEMPLATE, byte_tokenizer

PLAIN = TEMPLATE
NATIVE = TEMPLATE + "{% if tools %}{{ tools }} <tool_call>{% endif %}"
THINKING = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}{{ reasoning_effort }}"

LIGHT: dict[str, Any] = {"type": "function", "function": {"name": "light", "description": "Turn it on."}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "Sure.",
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "light", "arguments": '{"on": true}'}}
    ],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "a", "content": "done"}


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer(chat_template=template))


def conversation(template: str, *messages: dict[str, Any], **body: Any) -> Conversation:
    request = ChatRequest.model_validate({"messages": list(messages) or [USER], **body})
    return Conversation(request, tokenizer(template))


def test_calls_and_results_go_to_a_template_that_knows_them() -> None:
    found = conversation(NATIVE, USER, CALL, RESULT, tools=[LIGHT])
    assert found.form is HERMES
    assert found.options() == {"tools": [LIGHT]}
    assert found.messages()[1:] == [
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "light", "arguments": {"on": True}}}
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "a", "name": "light"},
    ]


def test_for_any_other_template_they_are_text() -> None:
    found = conversation(PLAIN, USER, CALL, RESULT, {**RESULT, "content": "twice"}, tools=[LIGHT])
    assert found.options() == {}
    system, user, assistant, results = found.messages()
    assert system["role"] == "system"
    assert '{"name": "light", "description": "Turn it on."}' in system["content"]
    assert user == USER
    assert assistant == {
        "role": "assistant",
        "content": 'Sure.\n<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>',
    }
    assert results == {
        "role": "user",
        "content": "<tool_response>\ndone\n</tool_response>\n<tool_response>\ntwice\n</tool_response>",
    }


def test_what_it_is_told_of_tools_follows_the_system_message() -> None:
    (system, _) = conversation(
        PLAIN, {"role": "developer", "content": "Be brief."}, USER, tools=[LIGHT]
    ).messages()
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")


def test_arguments_that_were_cut_off_stay_text() -> None:
    cut = {**CALL, "tool_calls": [{"id": "a", "function": {"name": "light", "arguments": '{"on'}}]}
    for template in (NATIVE, PLAIN):
        (message,) = conversation(template, cut).messages()
        assert '{"on' in str(message)


def test_a_template_that_knows_developers_gets_them() -> None:
    developer = {"role": "developer", "content": "x"}
    assert conversation(PLAIN, developer).messages()[0]["role"] == "system"
    assert conversation(PLAIN + "{# developer #}", developer).messages()[0]["role"] == "developer"


def test_variables_of_the_template() -> None:
    given = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}
    assert conversation(THINKING, **given).options() == {"enable_thinking": True, "reasoning_effort": "low"}
    for body in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}):
        with pytest.raises(InvalidRequest, match="does not know"):
            conversation(PLAIN, **body).options()
    for name in ("chat_template", "tokenize", "tools", "return_tensors"):
        with pytest.raises(InvalidRequest, match=name):
            conversation(THINKING, chat_template_kwargs={name: True}).options()


def test_a_named_template_for_tools_is_the_one_that_is_asked() -> None:
    made = tokenizer(PLAIN)
    made.chat_template = {"default": PLAIN, "tool_use": NATIVE}
    body = ChatRequest.model_validate({"messages": [USER], "tools": [LIGHT]})
    assert Conversation(body, made).options() == {"tools": [LIGHT]}


def test_special_tokens_show_where_calls_are_made_of_them() -> None:
    made = byte_tokenizer(chat_template="{{ tools }} [TOOL_CALLS] [ARGS]")
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    body = ChatRequest.model_validate({"messages": [USER], "tools": [LIGHT]})
    found = Conversation(body, Tokenizer(made))
    assert found.form is MISTRAL_NAMED
    assert found.params().skip_special_tokens is False
    assert conversation(NATIVE, tools=[LIGHT]).params().skip_special_tokens is True


def test_no_tools_no_form() -> None:
    found = conversation(NATIVE, tools=[])
    assert found.form is None
    assert found.params().structured_outputs is None
    assert not conversation(NATIVE, tools=[LIGHT], tool_choice="none").reads_calls


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop": ["x"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "bad_words": ["y"],
        "allowed_token_ids": [1, 2],
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"4": 1.5},
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "priority": -1,
        "cache_salt": "s",
        "cache_ttl": 60,
        "context_policy": "window",
        "sinks": 16,
        "window": 32,
    }
    params = conversation(PLAIN, **fields).params()
    for name, value in fields.items():
        wanted = {4: 1.5} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == wanted, name
    body = CompletionRequest.model_validate({"prompt": "x", **fields})
    assert sampling_params(body, max_tokens=9) == params


def test_what_an_answer_must_be_is_said_once() -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(InvalidRequest, match="exclude each other"):
        structured(CompletionRequest.model_validate({"prompt": "x", **both}))


def test_the_bytes_of_tokens_are_the_text() -> None:
    made = Tokenizer(byte_tokenizer(prepend_bos=False))
    tokens = TokenBytes(made)
    text = "naïve 🦉\n"
    ids = made.encode(text)
    assert b"".join(map(tokens, ids)) == text.encode()
    assert [tokens.text(token) for token in made.encode("ï")] == ["bytes:\\xc3", "bytes:\\xaf"]
    assert tokens(257) == b"</s>"


def test_the_bytes_of_sentencepiece_tokens() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers.models import BPE

    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = Backend(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokens = TokenBytes(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert [tokens(i) for i in (1, 2, 3, 4)] == [b" a", b"b", b"\xc3", b"\xa9"]


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    tokens = TokenBytes(Tokenizer(byte_tokenizer()))
    step = {9: Logprob(-5.0, 7, "x"), 3: Logprob(-0.1, 1, "y"), 4: Logprob(float("-inf"), 2, "z")}
    (found,) = chat_logprobs([step], [9], 2, tokens)["content"]
    assert (found["logprob"], [entry["logprob"] for entry in found["top_logprobs"]]) == (
        -5.0,
        [-0.1, -9999.0],
    )


def test_offsets_count_characters_however_the_tokens_come() -> None:
    made = Tokenizer(byte_tokenizer(prepend_bos=False))
    ids = [256, *made.encode("aé🦉b")]
    steps = [{token: Logprob(-1.0, 1, "")} for token in ids]
    for size in range(1, len(ids) + 1):
        counted = CompletionTokens(TokenBytes(made), frozenset({256}))
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for at in range(0, len(ids), size):
            counted.take(steps[at : at + size], ids[at : at + size], found)
        assert found["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 2_000 + "1" + "}" * 2_000, "{", "[1]", ""])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    assert translate._arguments(text) == text
