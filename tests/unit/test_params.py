"""Sampling parameters are accepted and honoured, or refused with the field, the value and what would work."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from octavo.errors import InvalidRequest
from octavo.params import SamplingParams

BAD_VALUES = {
    "n": [0, -1, 1.5, 1.0, True, "1", None, 10**6],
    "temperature": [math.nan, -1, -0.001, math.inf, "0", None, True, 10**400, 1j],
    "top_p": [0, 0.0, 2, 1.0001, -0.5, math.nan, None, False],
    "top_k": [-2, 1.5, True, None, "5"],
    "min_p": [-0.1, 1.1, math.nan, None],
    "seed": [-1, 2**64, 1.0, True, "7", math.nan],
    "max_tokens": [-1, 0, 1.5, True, "16", math.inf],
    "min_tokens": [-1, 17, 0.5, None, False],
    "stop": [[""], "", ["a", ""], [1], {"a": 1}, 7, ["\ud800"], [None], b"x"],
    "include_stop_str_in_output": [1, None, "true"],
    "stop_token_ids": [[-1], [1.5], [True], 5, ["a"], [None]],
    "ignore_eos": [0, None, "no"],
    "bad_words": [[""], [" "], "word", [1], ["\udfff"]],
    "allowed_token_ids": [[], [-1], [2.0], 3, [math.nan]],
    "repetition_penalty": [0, -1, math.nan, math.inf, None, True],
    "presence_penalty": [2.1, -2.1, math.nan, None],
    "frequency_penalty": [3, -3, math.inf, "1"],
    "logit_bias": [{1: 101}, {1: math.nan}, {-1: 1.0}, {"1": 1.0}, {1.0: 1.0}, {1: None}, [1], {True: 1.0}],
    "logprobs": [-2, 1.5, True, "5"],
    "prompt_logprobs": [-2, 0.0, False],
    "structured_outputs": [{"regex": "a"}, "a", True, 1],
    "skip_special_tokens": [1, None],
    "priority": [1.5, None, True, 2**63],
    "cache_salt": [1, b"salt", True, "\ud834"],
    "cache_ttl": [0, -1, math.nan, math.inf, True, "60"],
    "cache_ttl_tokens": [0, -1, 1.5, True, "60", 60],
    "exact": [1, None, "yes"],
    "context_policy": ["drop", "", 1, True],
    "sinks": [4],
    "window": [64],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values]
)
def test_an_impossible_value_is_refused_with_its_field_and_value(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}=")
    if value != 10**400:
        assert repr(value)[:60] in caught.value.message


def test_every_field_has_bad_values_above() -> None:
    assert set(BAD_VALUES) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("field", "value", "works"),
    [
        ("top_p", 2, "top_p=1 works"),
        ("temperature", -1, "temperature=0 works"),
        ("max_tokens", -1, "max_tokens=1 works"),
        ("n", 0, "n=1 works"),
        ("seed", 2**64, f"seed={2**64 - 1} works"),
        ("stop", ["a", ""], "stop=['a'] works"),
        ("min_tokens", 17, "min_tokens=16 works"),
    ],
)
def test_the_message_names_the_smallest_change(field: str, value: object, works: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.message.endswith(works)


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    with pytest.raises(InvalidRequest, match="seed=<a number too long to print>"):
        SamplingParams(seed=10**5000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 5.0),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("top_k", -1),
        ("top_k", 0),
        ("min_p", 1.0),
        ("seed", 2**64 - 1),
        ("seed", 0),
        ("max_tokens", None),
        ("max_tokens", 10**12),
        ("min_tokens", 16),
        ("logprobs", 0),
        ("logprobs", -1),
        ("cache_salt", ""),
        ("cache_ttl", 0.5),
        ("priority", -3),
        ("repetition_penalty", 0.5),
    ],
)
def test_the_edges_of_the_ranges_are_accepted(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.skip_special_tokens
    assert not params.ignore_eos


def test_stop_is_a_string_or_a_list_and_always_read_as_a_tuple() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "ab"]).stop == ("a", "ab")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    params = SamplingParams(stop_token_ids=list(np.array([5, 3])), top_k=np.int64(4))  # type: ignore[arg-type]
    assert params.stop_token_ids == (3, 5)
    assert type(params.top_k) is int


def test_parameters_can_be_changed_by_copy_only() -> None:
    params = SamplingParams(stop=["x"], logit_bias={3: 1}, allowed_token_ids=[4, 3])
    assert dataclasses.replace(params, n=2).stop == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_the_window_policy_needs_its_sizes_and_cannot_be_exact() -> None:
    params = SamplingParams(context_policy="window", sinks=16, window=64)
    assert (params.sinks, params.window) == (16, 64)
    for options, field in [
        ({"sinks": 16}, "window"),
        ({"window": 64}, "sinks"),
        ({"sinks": 16, "window": 64, "exact": True}, "exact"),
        ({"sinks": 16, "window": 64, "max_tokens": None}, "max_tokens"),
        ({"sinks": 1.5, "window": 64}, "sinks"),
        ({"sinks": 16, "window": 0}, "window"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(context_policy="window", **options)  # type: ignore[arg-type]
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"allowed_token_ids": [3, 2**63]}, "allowed_token_ids"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logprobs": 101}, "logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(options: dict[str, object], field: str) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="vocabulary") as caught:
        params.check_vocabulary(100)
    assert caught.value.param == field
    SamplingParams(
        stop_token_ids=[99], allowed_token_ids=[99], logit_bias={0: 1}, logprobs=100
    ).check_vocabulary(100)


@pytest.mark.parametrize(
    ("field", "strings", "message"),
    [
        ("stop", ["a"] * 129, "stop has 129 strings; at most 128 work"),
        ("stop", ["a" * 4097], "stop has 4097 characters; at most 4096 work"),
        ("bad_words", ["a"] * 4097, "bad_words has 4097 strings; at most 4096 work"),
        ("bad_words", ["a" * 9000] * 8, "bad_words has 72000 characters; at most 65536 work"),
    ],
)
def test_strings_that_would_hold_up_every_step_are_refused(
    field: str, strings: list[str], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**{field: strings})
    assert caught.value.param == field
    assert getattr(SamplingParams(**{field: ["a" * 32] * 128}), field) == ("a" * 32,) * 128
