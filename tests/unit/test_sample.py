"""The sampler agrees with a slow numpy reference, and a row never depends on its batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest, OctavoError
from octavo.kernels import _native
from octavo.params import SamplingParams
from octavo.sample import Choice, Logits, Sampled, Sampler, bad_word_ids, prompt_logprobs

EOS = 3


# A reference that is slow and obvious, in float64.


def reference_processed(row: Logits, choice: Choice) -> np.ndarray:
    params, output = choice.params, choice.token_ids[choice.prompt_len :]
    logits = row.astype(np.float64)
    for token in range(len(logits)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -math.inf
        if len(output) < params.min_tokens and token in (EOS, *params.stop_token_ids):
            logits[token] = -math.inf
        if any([*output, token][-len(word) :] == list(word) for word in choice.bad_words):
            logits[token] = -math.inf
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in choice.token_ids:
            penalty = params.repetition_penalty
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        if token in output:
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


def reference_order(logits: np.ndarray) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def reference_nucleus(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """Token → probability of what temperature, min_p, top_k and top_p leave, likeliest first."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p] = 0
    order = [token for token in reference_order(logits) if weights[token] > 0]
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, kept = sum(weights[order]), 0.0, []
    for token in order:
        if before >= params.top_p * total:
            break
        kept.append(token)
        before += weights[token]
    return {token: weights[token] / before for token in kept}


def choice(
    params: SamplingParams,
    output: Sequence[int] = (),
    prompt: Sequence[int] = (1, 2),
    seed: int = 7,
    index: int = 0,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> Choice:
    return Choice(params, [*prompt, *output], len(prompt), seed, index, bad_words)


def sample_one(row: Logits, state: Choice) -> Sampled:
    (result,) = Sampler([EOS]).sample(row[None], [state])
    assert isinstance(result, Sampled)
    return result


# Multiples of 1/4, so that ties are real and different logits are far apart.
coarse_rows = st.lists(st.integers(-24, 24), min_size=5, max_size=40).map(
    lambda numbers: (np.array(numbers) / 4).astype(np.float32)
)


@st.composite
def processed_choices(draw: st.DrawFn, temperature: float | None = None) -> tuple[Logits, Choice]:
    row = draw(coarse_rows)
    token = st.integers(0, len(row) - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])) if temperature is None else temperature,
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        logit_bias=draw(st.none() | st.dictionaries(token, st.sampled_from([-4.0, 2.0, 100.0]), max_size=3)),
        allowed_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=10)),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(st.lists(token, max_size=2)),
        top_k=draw(st.sampled_from([-1, 0, 1, 3, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.3])),
        logprobs=draw(st.none() | st.integers(-1, 5)),
    )
    words = draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3))
    output, prompt = draw(st.lists(token, max_size=6)), draw(st.lists(token, min_size=1, max_size=6))
    seed = draw(st.integers(0, 2**64 - 1))
    return row, choice(params, output, prompt, seed, draw(st.integers(0, 3)), words)


@settings(max_examples=300, deadline=None)
@given(processed_choices(temperature=0.0))
def test_greedy_is_the_lowest_id_of_the_largest_processed_logit(case: tuple[Logits, Choice]) -> None:
    row, state = case
    expected = reference_processed(row, state)
    (result,) = Sampler([EOS]).sample(row[None], [state])
    if expected.max() == -math.inf:
        assert isinstance(result, InvalidRequest)
    else:
        assert isinstance(result, Sampled)
        assert result.token_id == reference_order(expected)[0]


@settings(max_examples=500, deadline=None)
@given(processed_choices())
def test_a_sampled_token_is_where_the_random_number_falls(case: tuple[Logits, Choice]) -> None:
    row, state = case
    logits = reference_processed(row, state)
    (result,) = Sampler([EOS]).sample(row[None], [state])
    if logits.max() == -math.inf:
        assert isinstance(result, InvalidRequest)
        return
    assert isinstance(result, Sampled)
    nucleus = reference_nucleus(logits, state.params)
    assert result.token_id in nucleus
    tokens = list(nucleus)
    through = np.cumsum(list(nucleus.values()))
    place = tokens.index(result.token_id)
    uniform = _native.uniform(state.seed, state.index, state.position)
    assert through[place] - nucleus[result.token_id] - 1e-5 <= uniform <= through[place] + 1e-5


@settings(max_examples=200, deadline=None)
@given(coarse_rows, st.integers(-1, 5), st.integers(0, 10**6))
def test_log_probs_are_of_the_raw_logits_with_ranks_by_value_and_id(row: Logits, k: int, seed: int) -> None:
    state = choice(SamplingParams(logprobs=k, temperature=2.0, repetition_penalty=1.5), seed=seed)
    result = sample_one(row, state)
    wide = row.astype(np.float64)
    expected = wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    order = reference_order(wide)
    width = len(row) if k == -1 else min(k, len(row))
    assert [token for token, _, _ in result.top] == [
        result.token_id,
        *(token for token in order[:width] if token != result.token_id),
    ]
    for token, logprob, rank in result.top:
        assert logprob == pytest.approx(expected[token], abs=1e-6)
        assert order[rank - 1] == token
    assert result.logprob == result.top[0][1]


def test_log_probs_over_a_large_vocabulary_are_accurate() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 15, 16, 17, 255, 257, 49_152):
        row = rng.normal(0, 6, size).astype(np.float32)
        wide = row.astype(np.float64)
        normaliser = wide.max() + np.log(np.exp(wide - wide.max()).sum())
        ((_, logprob, _), *_) = prompt_logprobs(row[None], [size - 1], 0)[0]
        assert logprob == pytest.approx(wide[-1] - normaliser, abs=2e-6)


def test_sampling_follows_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    params = SamplingParams()
    batch = np.repeat(row[None], 4000, axis=0)
    states = [choice(params, seed=seed) for seed in range(4000)]
    counts = Counter(
        result.token_id for result in Sampler().sample(batch, states) if isinstance(result, Sampled)
    )
    for token, probability in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_a_large_row_is_sampled_as_the_reference_says() -> None:
    rng = np.random.default_rng(1)
    for spread in (0.0, 0.02, 1.0, 5.0):
        row = (np.round(rng.normal(0, spread, 49_152) * 1024) / 1024).astype(np.float32)
        for options in ({}, {"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.95, "top_k": 300, "min_p": 0.01}):
            state = choice(SamplingParams(**options), seed=int(spread * 100))  # type: ignore[arg-type]
            nucleus = reference_nucleus(row.astype(np.float64), state.params)
            through = np.cumsum(list(nucleus.values()))
            place = list(nucleus).index(sample_one(row, state).token_id)
            uniform = _native.uniform(state.seed, 0, state.position)
            before = through[place - 1] if place else 0.0
            assert before - 1e-5 <= uniform <= through[place] + 1e-5


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = _native.num_threads()
    _native.set_num_threads(2)
    yield
    _native.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_row_gives_the_same_bits_in_any_batch_at_any_place_with_any_number_of_threads() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (12, 1003)).astype(np.float32)
    kinds = [
        SamplingParams(temperature=0, logprobs=4),
        SamplingParams(top_p=0.9, logprobs=0),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3, top_k=20),
        SamplingParams(min_tokens=5, stop_token_ids=[5], min_p=0.02, logprobs=-1),
    ]

    def state(i: int) -> Choice:
        return choice(kinds[i % 4], output=[i, i, 9], seed=i)

    sampler = Sampler([EOS])
    together = sampler.sample(logits, [state(i) for i in range(12)])
    order = list(rng.permutation(12))
    shuffled = sampler.sample(logits[order], [state(i) for i in order])
    _native.set_num_threads(1)
    for place, i in enumerate(order):
        alone = sampler.sample(logits[i : i + 1], [state(i)])
        assert alone[0] == together[i] == shuffled[place]


def test_rows_of_a_wider_buffer_are_read_in_place_and_not_changed() -> None:
    wide = np.random.default_rng(3).normal(0, 2, (4, 64)).astype(np.float32)
    view, before = wide[1:3, :50], wide.copy()
    states = [choice(SamplingParams(logprobs=2)), choice(SamplingParams(presence_penalty=1.0), [5, 6])]
    assert Sampler().sample(view, states) == Sampler().sample(np.ascontiguousarray(view), states)
    assert np.array_equal(wide, before)


def test_answer_0_of_3_is_the_answer_of_1_and_the_others_have_streams_of_their_own() -> None:
    row = np.zeros(50_000, np.float32)
    params = SamplingParams(n=3)
    batch = np.repeat(row[None], 3, axis=0)
    forked = [r.token_id for r in Sampler().sample(batch, [choice(params, index=i) for i in range(3)])]  # type: ignore[union-attr]
    assert forked[0] == sample_one(row, choice(SamplingParams())).token_id
    assert len(set(forked)) == 3


def test_philox_gives_the_published_known_answers() -> None:
    assert _native.philox([0] * 4, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _native.philox([ones] * 4, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits_of_pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    answer = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert _native.philox(digits_of_pi, 0xA4093822, 0x299F31D0) == answer


def test_the_random_number_depends_on_every_bit_of_seed_choice_and_position() -> None:
    arguments = [(0, 0, 0)]
    for place in range(3):
        for bit in range(64):
            changed = [0, 0, 0]
            changed[place] = 1 << bit
            arguments.append(tuple(changed))  # type: ignore[arg-type]
    numbers = [_native.uniform(*each) for each in arguments]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)


def test_masked_entries_are_never_sampled_at_any_temperature() -> None:
    row = np.full(100, -np.inf, np.float32)
    row[[17, 40]] = [1.0, -2.0]
    for temperature in (1e-300, 1e-6, 1.0, 1e30, 1e300):
        params = SamplingParams(temperature=temperature)
        tokens = {sample_one(row, choice(params, seed=seed)).token_id for seed in range(40)}
        assert tokens == ({17} if temperature < 0.1 else {17, 40})


def test_a_row_without_any_token_left_is_refused_and_its_neighbours_are_not() -> None:
    logits = np.zeros((3, 8), np.float32)
    nothing = SamplingParams(allowed_token_ids=[EOS], min_tokens=2)
    results = Sampler([EOS]).sample(
        logits, [choice(SamplingParams()), choice(nothing), choice(SamplingParams())]
    )
    assert isinstance(results[1], InvalidRequest)
    assert results[1].param == "allowed_token_ids"
    assert results[0] == results[2] == sample_one(logits[0], choice(SamplingParams()))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_row_is_an_internal_error_of_that_row_alone(value: float) -> None:
    logits = np.zeros((2, 40), np.float32)
    logits[0, 37] = value
    for params in (SamplingParams(temperature=0), SamplingParams()):
        broken, sound = Sampler().sample(logits, [choice(params), choice(params)])
        assert type(broken) is OctavoError
        assert isinstance(sound, Sampled)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(np.zeros((0, 8), np.float32), []) == []


def test_tokens_are_counted_as_they_come() -> None:
    state = choice(SamplingParams(presence_penalty=1.0), [4, 4])
    assert state.output_counts() == {4: 2}
    assert list(state.seen(8)) == [1, 2, 4]
    state.token_ids += [4, 5]
    assert state.output_counts() == state.output_counts() == {4: 3, 5: 1}
    assert list(state.seen(8)) == [1, 2, 4, 5]


def test_a_bad_word_is_masked_only_after_its_beginning_in_the_answer() -> None:
    row = np.array([0, 1, 2, 3, 4, 5], np.float32)
    greedy = SamplingParams(temperature=0)
    word = [(4, 5)]
    assert sample_one(row, choice(greedy, [4], bad_words=word)).token_id == 4
    assert sample_one(row, choice(greedy, [], prompt=[4], bad_words=word)).token_id == 5
    assert sample_one(row, choice(greedy, [4, 1], bad_words=word)).token_id == 5


def test_a_bad_word_is_taken_with_and_without_a_space_before_it() -> None:
    words = {"cat": [7], " cat": [8], "dogs": [1, 2], " dogs": [3, 1, 2], "x": [5], " x": [5]}
    assert bad_word_ids(["cat"], words.__getitem__) == ((7,), (8,))
    assert bad_word_ids(["dogs", " x"], words.__getitem__) == ((1, 2), (5,))


def test_prompt_log_probs_name_the_given_token_and_the_likeliest() -> None:
    logits = np.array([[0, 1, 2], [5, 0, 5]], np.float32)
    first, second = prompt_logprobs(logits, [0, 2], 1)
    assert [(token, rank) for token, _, rank in first] == [(0, 3), (2, 1)]
    assert [(token, rank) for token, _, rank in second] == [(2, 2), (0, 1)]
    assert sum(math.exp(p) for _, p, _ in prompt_logprobs(logits, [0, 2], -1)[0]) == pytest.approx(1)
