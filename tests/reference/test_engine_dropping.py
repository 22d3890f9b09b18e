"""`context_policy="window"` end to end, against a naive reference and against itself under every schedule.

The reference keeps plain lists of keys that were never rotated, computes token by token and rotates everything anew
for every token, kept positions renumbered from 0.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from octavo.engine import Engine
from octavo.errors import InvalidRequest
from octavo.params import SamplingParams
from support.engines import Answer, alone, answers, finish, greedy, submit, together, varied

SINKS, WINDOW, BLOCK = 16, 48, 16
NEW = 150
PER_BLOCK = 8 * 1024  # bytes of a block of the tiny llama in float32


def prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def dropping(
    max_tokens: int = NEW, sinks: int = SINKS, window: int = WINDOW, **options: Any
) -> SamplingParams:
    return greedy(max_tokens, context_policy="window", sinks=sinks, window=window, **options)


class Naive:
    """A transformers model, computed one token at a time; `kept` are the positions that are still seen."""

    def __init__(self, path: object, sinks: int, window: int, block: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.base, self.head = model.model, model.lm_head
        self.sinks, self.most, self.block = sinks, sinks + window, block
        self.kept: list[int] = []
        self.length = 0
        self.caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.base.layers]

    @torch.inference_mode()
    def push(self, token: int) -> Tensor:
        """Log-probs of what follows `token`."""
        self.kept.append(self.length)
        self.length += 1
        if len(self.kept) > self.most:
            del self.kept[self.sinks : self.sinks + self.block]
        hidden = self.base.embed_tokens(torch.tensor([token]))
        rotation = self.base.rotary_emb(hidden, torch.arange(len(self.kept))[None])
        for layer, cache in zip(self.base.layers, self.caches, strict=True):
            hidden = hidden + self._attend(layer.self_attn, layer.input_layernorm(hidden), cache, rotation)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.head(self.base.norm(hidden))[0].log_softmax(-1)

    def _attend(
        self, part: Any, x: Tensor, cache: list[tuple[Tensor, Tensor]], rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        dim, plain = part.head_dim, torch.nn.Identity()
        q = getattr(part, "q_norm", plain)(part.q_proj(x).view(-1, dim))
        cache.append(
            (getattr(part, "k_norm", plain)(part.k_proj(x).view(-1, dim)), part.v_proj(x).view(-1, dim))
        )
        k, v = (torch.stack([cache[p][i] for p in self.kept], dim=1) for i in (0, 1))
        cos, sin = rotation
        _, k = apply_rotary_pos_emb(k[None], k[None], cos, sin)
        q, _ = apply_rotary_pos_emb(q[None, :, None], q[None, :, None], cos[:, -1:], sin[:, -1:])
        group = q.shape[1] // k.shape[1]
        weights = (q @ k.repeat_interleave(group, 1).transpose(-1, -2) * part.scaling).softmax(-1)
        return part.o_proj((weights @ v.repeat_interleave(group, 0)).reshape(1, -1))


@pytest.mark.parametrize(
    ("kind", "sinks", "window", "block", "length"),
    [
        ("llama", 16, 48, 16, 90),
        ("llama, llama3 rope", 0, 32, 4, 20),
        ("qwen3", 4, 60, 4, 70),
        ("multi-query", 256, 64, 16, 300),
        ("12 over 4 heads of 80", 8, 8, 8, 40),
    ],
)
def test_a_naive_reference_that_rotates_everything_anew_agrees(
    kind: str,
    sinks: int,
    window: int,
    block: int,
    length: int,
    engine_of: Callable[..., Engine],
    tiny: Callable[[str], object],
) -> None:
    engine = engine_of(kind, dtype="float32", block_size=block, max_num_batched_tokens=32, poison=True)
    live = submit(engine, "long", (prompt(length), dropping(NEW, sinks, window)))
    finish(engine)
    [answer] = answers(live.output())
    naive = Naive(tiny(kind), sinks, window, block)
    for token in prompt(length):
        expected = naive.push(token)
    for token, step in zip(answer.token_ids, answer.logprobs, strict=True):
        dropped = naive.length - len(naive.kept)
        assert token == int(expected.argmax())
        for candidate, logprob, _ in step:
            assert logprob == pytest.approx(float(expected[candidate]), abs=1e-3)
        expected = naive.push(token)
    assert len(answer.token_ids) == NEW
    assert dropped > 100
    assert live.request.receipt.dropped == [(sinks, sinks + dropped - 1, "window")]
    assert live.request.receipt.exact is False


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Several that drop, from different lengths, and two that do not."""
    wide = {"context_policy": "window", "sinks": 32, "window": 32}
    narrow = {"context_policy": "window", "sinks": 0, "window": 16}
    usual = {"context_policy": "window", "sinks": SINKS, "window": WINDOW}
    return [
        (prompt(100), greedy(90, **usual)),
        (prompt(63), greedy(40, **usual)),
        (prompt(64), varied(1, 50)),
        (prompt(130), greedy(30, **wide, temperature=0.9, seed=5, repetition_penalty=1.2)),
        (prompt(3), greedy(70, **narrow)),
        (prompt(80), greedy(20, **usual, n=2, temperature=1.1, seed=2)),
        (prompt(64), greedy(50)),
    ]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(dtype: str, engine_of: Callable[..., Engine]) -> list[list[Answer]]:
    """Each alone, computed row by row, nothing reused."""
    if dtype not in _expected:
        engine = engine_of("llama", dtype=dtype, enable_prefix_caching=False, max_num_batched_tokens=1)
        _expected[dtype] = alone(engine, asked())
    return _expected[dtype]


_expected: dict[str, list[list[Answer]]] = {}


def test_answers_do_not_depend_on_the_schedule(
    dtype: str, expected: list[list[Answer]], engine_of: Callable[..., Engine]
) -> None:
    for budget, threads in ((4, 1), (16, 2), (64, 1), (512, 2)):
        engine = engine_of(
            "llama", dtype=dtype, max_num_batched_tokens=budget, num_threads=threads, poison=True
        )
        for _ in ("cold", "warm"):
            assert together(engine, asked()) == expected


def test_answers_do_not_depend_on_preemption(
    dtype: str, expected: list[list[Answer]], engine_of: Callable[..., Engine]
) -> None:
    """Every request at least three times: while it is prefilled, generates, and computes again."""
    engine = engine_of("llama", dtype=dtype, max_num_batched_tokens=40, poison=True)
    for period in (2, 7):
        lives = [submit(engine, f"{period}, {i}", one) for i, one in enumerate(asked())]
        while engine.has_work:
            engine.step()
            for sequence in list(engine.scheduler.running):
                request = sequence.request
                if request.receipt.preemptions < 3 and (engine.steps + request.arrival) % period == 0:
                    engine.scheduler.preempt(sequence)
                    engine.check()
        engine.check()
        assert [answers(live.output()) for live in lives] == expected
        assert all(live.request.receipt.preemptions >= 3 for live in lives)
        assert lives[0].request.receipt.dropped == [(16, 143, "window")]


def test_answers_do_not_depend_on_a_full_pool(
    expected: list[list[Answer]], dtype: str, engine_of: Callable[..., Engine]
) -> None:
    block = PER_BLOCK if dtype == "float32" else PER_BLOCK // 2
    for blocks in (9, 12):
        engine = engine_of(
            "llama", dtype=dtype, kv_cache_memory=blocks * block, max_num_batched_tokens=64, poison=True
        )
        assert engine.scheduler.limits.arena == blocks * BLOCK
        assert together(engine, asked()) == expected
        assert engine.scheduler.totals.preemptions > 0


def test_several_times_the_context_in_a_pool_of_what_is_kept(engine_of: Callable[..., Engine]) -> None:
    kept = (SINKS + WINDOW) // BLOCK
    engine = engine_of(
        "llama", dtype="float32", kv_cache_memory=kept * PER_BLOCK, max_model_len=64, poison=True
    )
    live = submit(engine, "endless", (prompt(50), dropping(400)))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, sum(engine.stats().blocks.values()))
    engine.check()
    assert most <= kept
    [answer] = answers(live.output())
    assert (len(answer.token_ids), answer.finish_reason) == (400, "length")
    receipt = live.request.receipt
    assert receipt.to_dict()["dropped"] == [[16, 415, "window"]]
    assert receipt.preemptions == 0
    roomy = engine_of("llama", dtype="float32")
    assert together(roomy, [(prompt(50), dropping(400))]) == [[answer]]


@pytest.mark.parametrize(("length", "new"), [(10, 20), (10, 55), (64, 1)])
def test_nothing_changes_before_something_is_dropped(
    length: int, new: int, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of("llama", dtype="float32", max_num_batched_tokens=32)
    live = submit(engine, "short", (prompt(length), dropping(new)))
    finish(engine)
    assert answers(live.output()) == together(engine, [(prompt(length), greedy(new))])[0]
    assert live.request.receipt.dropped == []
    assert live.request.receipt.exact is True


def test_one_position_more_and_the_first_block_is_dropped(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="float32", max_num_batched_tokens=32)
    live = submit(engine, "just", (prompt(10), dropping(SINKS + WINDOW - 10 + 2)))
    finish(engine)
    assert live.request.receipt.dropped == [(16, 31, "window")]
    assert live.request.receipt.exact is False


def test_prompt_logprobs_follow_the_rule(
    engine_of: Callable[..., Engine], tiny: Callable[[str], object]
) -> None:
    engine = engine_of("llama", dtype="float32", max_num_batched_tokens=32)
    live = submit(engine, "scored", (prompt(150), dropping(1, prompt_logprobs=0)))
    finish(engine)
    read = live.output().prompt_logprobs
    assert read is not None
    naive = Naive(tiny("llama"), SINKS, WINDOW, BLOCK)
    for token, entries in zip(prompt(150)[1:], read[1:], strict=True):
        row = naive.push(prompt(150)[naive.length])
        assert entries is not None
        assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"sinks": 10}, "sinks", r"sinks=10 .* block_size=16 .*sinks=16 works"),
        ({"window": 40}, "window", r"window=40 .* block_size=16 .*window=48 works"),
        ({"window": 1024}, "window", r"window=1024 .* at most 1024; window=1008 works"),
        ({"sinks": 2048}, "sinks", r"sinks=2048 .* at most 1024; sinks=976 with window=48 works"),
        ({"max_tokens": 1 << 24}, "max_tokens", r"max_tokens=16777216 .*max_tokens=16777211 works"),
    ],
)
def test_an_impossible_rule_is_refused(
    options: dict[str, int], param: str, message: str, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of("llama", dtype="float32")
    asked = {"sinks": SINKS, "window": WINDOW, "max_tokens": 5, **options}
    with pytest.raises(InvalidRequest, match=message) as error:
        engine.prepare("r", prompt(5), dropping(**asked))
    assert error.value.param == param


@pytest.mark.parametrize(("kind", "why"), [("gpt2", "transformers"), ("mistral, window", "sliding window")])
def test_models_that_cannot_drop_say_so(kind: str, why: str, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(kind, dtype="float32")
    with pytest.raises(InvalidRequest, match=why) as error:
        engine.prepare("r", prompt(5), dropping(5))
    assert error.value.param == "context_policy"
