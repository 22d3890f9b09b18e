"""Every kind of model, fused or not, against transformers on tiny random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.engine import Engine
from support.engines import Answer, greedy, submit, together
from support.tiny import FUSED, KINDS, WINDOW

LENGTHS = (1, 5, 40, 150)
NEW = 24


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]


def transformers_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def assert_agrees(reference: Any, prompt: list[int], answer: Answer) -> None:
    """Token for token what `generate` gives, and its log-probs within 1e-3."""
    ids = torch.tensor([prompt])
    whole = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert answer.token_ids == tuple(whole[0, len(prompt) :].tolist())
    with torch.inference_mode():
        expected = reference(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, step in zip(expected, answer.logprobs, strict=True):
        for token, logprob, _ in step:
            assert logprob == pytest.approx(row[token].item(), abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(
    kind: str, engine_of: Callable[..., Engine], tiny: Callable[[str], Path]
) -> None:
    engine = engine_of(kind, dtype="float32", max_num_batched_tokens=64)
    assert engine.runner.fused == (kind in FUSED)
    assert engine.runner.exact
    reference = transformers_model(tiny(kind))
    found = together(engine, [(prompt, greedy(NEW)) for prompt in prompts()])
    for prompt, [answer] in zip(prompts(), found, strict=True):
        assert_agrees(reference, prompt, answer)


@pytest.mark.parametrize("kind", ["llama, biases", "qwen2, mixed windows", "qwen3"])
def test_fused_and_unfused_agree(kind: str, engine_of: Callable[..., Engine]) -> None:
    requests = [(prompt, greedy(NEW)) for prompt in prompts()]
    fused = together(engine_of(kind, dtype="float32"), requests)
    unfused_engine = engine_of(kind, dtype="float32", fuse=False, max_num_batched_tokens=64)
    assert not unfused_engine.runner.fused
    for [one], [other] in zip(fused, together(unfused_engine, requests), strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative == pytest.approx(other.cumulative, abs=1e-3)


@pytest.mark.parametrize("kind", ["mistral, window", "qwen2, mixed windows", "gemma2"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefix caching", "prefix caching"])
def test_blocks_behind_a_window_are_given_back(
    kind: str, caching: bool, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of(kind, block_size=8, enable_prefix_caching=caching, max_num_batched_tokens=50)
    layout = engine.layout
    windowed = [g for g, group in enumerate(layout.groups) if group.window is not None]
    assert [layout.groups[g].window for g in windowed] == [WINDOW]
    [prompt] = prompts()[-1:]
    live = submit(engine, "long", (prompt, greedy(NEW)))
    decoding_steps = 0
    while engine.has_work:
        engine.step()
        if not live.answers or live.finished:
            continue
        decoding_steps += 1
        computed = live.request.sequences[0].num_computed
        at_most = sum(
            (WINDOW // 8 + 1 if g in windowed else -(-computed // 8)) * layout.block_bytes(g)
            for g in range(len(layout.groups))
        )
        stats = engine.stats()
        assert 0 < stats.bytes_running <= at_most
        assert (stats.bytes_cached > 0) == caching
        engine.check()
    assert decoding_steps == NEW - 1
