"""Requests and models that are wrong in ways nobody intends: each is refused with its reason or served rightly."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import ConfigError, InvalidRequest, ModelNotFound, ModelRefused, OctavoError
from octavo.kernels import native
from octavo.model.load import load_model
from octavo.turns import Turns
from support.engines import greedy, make_engine
from support.sharing import hear
from support.tiny import BASE
from unit.model_builders import byte_tokenizer, save_model

Opened = Callable[..., AbstractContextManager[LLM]]
GPT2 = {"vocab_size": 264, "n_layer": 2, "n_head": 2, "bos_token_id": 256, "eos_token_id": None}


def edited(directory: Path, **fields: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


@pytest.mark.parametrize("prompts", [bytearray(b"abc"), memoryview(b"abc"), [bytearray(b"abc")]])
def test_undecoded_text_is_no_list_of_token_ids(prompts: Any, llm_of: Opened) -> None:
    with llm_of("llama") as llm, pytest.raises(InvalidRequest, match="give a string"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [[], {}, 0, ""])
def test_params_that_are_none_in_name_only_are_refused(params: Any, llm_of: Opened) -> None:
    with llm_of("llama") as llm, pytest.raises(InvalidRequest, match="one SamplingParams or a list of 1"):
        llm.generate(["a"], params)


@pytest.mark.parametrize("messages", [5, "hello", (m for m in [{"role": "user", "content": "a"}])])
def test_messages_that_are_no_list_are_refused(messages: Any, llm_of: Opened) -> None:
    with llm_of("llama") as llm, pytest.raises(InvalidRequest, match="messages is a"):
        llm.chat(messages)


def test_token_ids_may_be_of_any_integer_type_and_messages_stay_short(llm_of: Opened) -> None:
    with llm_of("llama") as llm:
        plain, numpy, flat = [
            llm.generate(p, greedy(4))[0]
            for p in ([[1, 2]], [[np.int64(1), np.int32(2)]], list(np.array([1, 2])))
        ]
        assert plain.outputs[0].token_ids == numpy.outputs[0].token_ids == flat.outputs[0].token_ids
        assert [type(token) for token in numpy.prompt_token_ids] == [int, int]
        for wrong in (10**5000, "x" * 100_000):
            with pytest.raises(InvalidRequest, match=r"prompt\[0\]=") as refused:
                llm.generate([[wrong]])  # type: ignore[list-item]
            assert len(refused.value.message) < 200


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e10, 3e38, 1e308])
def test_penalties_that_leave_float32_are_refused(penalty: float) -> None:
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        SamplingParams(repetition_penalty=penalty)


@pytest.mark.parametrize("penalty", [1e-9, 1e9])
def test_the_strongest_penalties_are_honoured(penalty: float, llm_of: Opened) -> None:
    with llm_of("llama") as llm:
        [output] = llm.generate([[1, 2, 3]], greedy(40, repetition_penalty=penalty))
    assert len(output.outputs[0].token_ids) == 40


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 16.0}, "block_size"),
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching"),
        ({"tenant": 5}, "tenant"),
        ({"chat_template": 5}, "chat_template"),
        ({"kv_cache_memory": "9" * 5000 + "GiB"}, "kv_cache_memory"),
        ({"max_model_len": 10**5000}, "max_model_len"),
        ({"num_threads": 10**6}, "num_threads"),
    ],
)
def test_options_of_a_wrong_type_or_size_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refused:
        EngineConfig.create("model", **options)
    assert refused.value.param == field
    assert len(refused.value.message) < 250


def test_a_step_too_wide_for_the_memory_is_refused(llm_of: Opened) -> None:
    with (
        pytest.raises(ConfigError, match="max_num_batched_tokens"),
        llm_of("llama", max_num_batched_tokens=10**13),
    ):
        pass


def test_a_model_may_be_a_path_and_a_name_too_long_is_not_found(tiny: Callable[[str], Path]) -> None:
    with LLM(tiny("llama"), kv_cache_memory="1MiB", num_threads=1) as llm:
        assert llm.model_path == tiny("llama")
    for name in ("x" * 5000, ""):
        with pytest.raises(ModelNotFound):
            load_model(name)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**{**BASE, "num_key_value_heads": 3}), "cannot share 3 KV heads"),
        (LlamaConfig(**BASE, head_dim=native.MAX_HEAD_DIM + 2), "at most 512"),
        (GPT2Config(**GPT2, n_embd=2 * 33), "odd number"),
        (MistralConfig(**BASE, sliding_window=2**31), "sliding_window=2147483648"),
        (MistralConfig(**BASE, sliding_window=-1), "sliding_window=-1"),
    ],
)
def test_heads_and_windows_the_kernels_cannot_take_are_refused(
    config: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        load_model(str(save_model(config, tmp_path)), dtype="bfloat16")


def test_odd_heads_work_in_float32(tmp_path: Path) -> None:
    loaded = load_model(str(save_model(GPT2Config(**GPT2, n_embd=2 * 33), tmp_path)), dtype="float32")
    assert loaded.spec.layers[0].head_dim == 33


def test_the_limit_of_a_head_is_that_of_the_kernels() -> None:
    rows = (Path(__file__).parents[2] / "native" / "rows.h").read_text()
    assert f"constexpr int kMaxHeadDim = {native.MAX_HEAD_DIM};" in rows


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vocab_size": 300}, "the first is lm_head.weight"),
        ({"max_position_embeddings": -5}, "max_position_embeddings=-5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": "four"}, "num_attention_heads.*four"),
        (
            {"rope_parameters": {"rope_type": "bogus", "rope_theta": 1e4}},
            "'bogus' is not known; known: default",
        ),
    ],
)
def test_wrong_configurations_are_refused_with_what_is_wrong(
    fields: Any, reason: str, tmp_path: Path
) -> None:
    directory = edited(save_model(LlamaConfig(**BASE), tmp_path), **fields)
    with pytest.raises(ModelRefused, match=reason):
        load_model(str(directory))


@pytest.fixture
def narrow_head(tmp_path: Path, engine_of: object) -> Engine:
    """A model that knows fewer tokens than its tokenizer, which calls one of the others the end."""
    directory = save_model(
        LlamaConfig(**{**BASE, "vocab_size": 200, "bos_token_id": None}), tmp_path, tokenizer=False
    )
    byte_tokenizer(prepend_bos=False).save_pretrained(directory)
    return make_engine(directory, num_threads=1)


def test_tokens_the_model_does_not_know_hurt_nobody(narrow_head: Engine) -> None:
    assert max(narrow_head.tokenizer.eos_token_ids) > 200
    with pytest.raises(InvalidRequest, match="the tokenizer makes token id"):
        narrow_head.prepare("text", "\u4e16\u754c", greedy(2))
    params = greedy(4, min_tokens=3, ignore_eos=False, bad_words=["a", "\u4e16", "</s>"])
    [heard] = hear(narrow_head, [([1, 2, 3], params)])
    assert len(heard.answers[0].token_ids) == 4


def test_bad_words_without_a_tokenizer_are_refused_at_the_door(tmp_path: Path, engine_of: object) -> None:
    engine = make_engine(save_model(LlamaConfig(**BASE), tmp_path, tokenizer=False), num_threads=1)
    with pytest.raises(InvalidRequest, match="bad_words needs a tokenizer") as refused:
        engine.prepare("words", [1, 2], SamplingParams(bad_words=["a"]))
    assert refused.value.param == "bad_words"


@pytest.mark.parametrize("positions", [16, 64])
def test_learned_positions_fewer_than_a_step_is_wide(
    positions: int, tmp_path: Path, engine_of: object
) -> None:
    config = GPT2Config(**GPT2, n_embd=64, n_positions=positions)
    engine = make_engine(save_model(config, tmp_path), num_threads=1)
    assert engine.runner.exact
    asked = [(list(range(positions - 3)), greedy(100)), ([5, 6], greedy(4))]
    long, short = hear(engine, asked)
    assert (len(long.answers[0].token_ids), long.answers[0].finish_reason) == (3, "length")
    assert len(short.answers[0].token_ids) == 4


def test_a_failed_step_is_computed_again_for_every_choice(engine_of: Callable[..., Engine]) -> None:
    asked = [(list(range(20)), greedy(4, n=3, temperature=1.0, seed=5))]
    engine = engine_of("llama", num_threads=1)
    expected = hear(engine, asked)
    live = engine.prepare("again", *asked[0])
    engine.submit(live)
    sample, failures = engine._sampler.sample, [RuntimeError("no memory")]

    def failing(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return sample(*args)

    engine._sampler.sample = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    while engine.has_work:
        engine.step()
    engine.check()
    assert [tuple(c.token_ids) for c in live.output().outputs] == [a.token_ids for a in expected[0].answers]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_so(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", num_threads=2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hear(engine, [([1, 2, 3], greedy(2))])
        except OctavoError as error:
            os.write(writing, error.message.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "was forked" in pipe.read()
    os.waitpid(child, 0)
    assert hear(engine, [([1, 2, 3], greedy(2))])


class Numbers:
    """Text is its characters' numbers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def test_a_conversation_is_remembered_while_another_is_looked_up() -> None:
    class Slow(str):
        """Remembers something new, on another thread, whenever it is compared."""

        def startswith(self, *args: Any) -> bool:
            other = threading.Thread(
                target=turns.remember, args=("a", Numbers().encode(f"a{len(turns._known)}"))
            )
            other.start()
            other.join(0.05)
            return super().startswith(*args)

    turns = Turns(Numbers(), ["|"])
    turns.remember("x", Numbers().encode("xy|"))
    turns.remember("q", Numbers().encode("q"))
    assert turns.encode(Slow("xy|z")) == Numbers().encode("xy|z")
