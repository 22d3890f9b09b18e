"""SmolLM2 against transformers, on real prompts: tokens and log-probs in float32, closeness in bf16."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo import LLM
from support.engines import greedy
from support.sizes import sized
from support.texts import real_prompts, spread

pytestmark = pytest.mark.model

COUNT, LONGEST, NEW = sized((5, 250, 16), (20, 1500, 64))
LENGTHS = spread(COUNT, 5, LONGEST)
CLOSE = 0.5  # nats: where the two likeliest tokens are this close, bf16 may choose the other


@dataclass(frozen=True)
class Truth:
    """What transformers says in float32: the prompt, its greedy answer, and log-probs of everything.

    `own[i]` is the log-prob of token i + 1 of prompt and answer, `gaps[i]` that of the answer's token i to the
    likeliest other one.
    """

    prompt: list[int]
    answer: list[int]
    own: Tensor
    gaps: Tensor

    @property
    def whole(self) -> list[int]:
        return [*self.prompt, *self.answer]


def logprobs_of(model: Any, ids: list[int]) -> Tensor:
    """Log-softmax rows `[len(ids) - 1, vocabulary]` that predict `ids[1:]`."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1)


def own_logprobs(rows: Tensor, ids: list[int]) -> Tensor:
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def load(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def find_truth(model: Any, prompt: list[int]) -> Truth:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    whole = out[0].tolist()
    rows = logprobs_of(model, whole)
    top = rows[len(prompt) - 1 :].topk(2).values
    return Truth(prompt, whole[len(prompt) :], own_logprobs(rows, whole), top[:, 0] - top[:, 1])


@pytest.fixture(scope="module")
def truths(smollm2_f32: LLM) -> list[Truth]:
    model = load(smollm2_f32.model_path, torch.float32)
    prompts = real_prompts(LENGTHS, smollm2_f32.engine.tokenizer.encode, seed=5)
    return [find_truth(model, prompt) for prompt in prompts]


def teacher_forced(llm: LLM, truths: list[Truth]) -> list[Tensor]:
    """Log-probs of the tokens of prompts and answers, each given those before it."""
    outputs = llm.generate([truth.whole for truth in truths], greedy(1, prompt_logprobs=0))
    found = []
    for truth, output in zip(truths, outputs, strict=True):
        assert output.prompt_logprobs is not None
        rows = zip(truth.whole[1:], output.prompt_logprobs[1:], strict=True)
        found.append(torch.tensor([entries[token].logprob for token, entries in rows if entries]))
    return found


def test_float32_is_token_for_token_and_within_a_thousandth(smollm2_f32: LLM, truths: list[Truth]) -> None:
    outputs = smollm2_f32.generate([truth.prompt for truth in truths], greedy(NEW))
    for truth, output in zip(truths, outputs, strict=True):
        [completion] = output.outputs
        assert completion.token_ids == truth.answer
        assert completion.logprobs is not None
        expected = truth.own[len(truth.prompt) - 1 :].tolist()
        for token, step, logprob, gap in zip(
            truth.answer, completion.logprobs, expected, truth.gaps.tolist(), strict=True
        ):
            assert step[token].logprob == pytest.approx(logprob, abs=1e-3)
            [second] = [entry.logprob for entry in step.values() if entry.rank == 2]
            assert step[token].logprob - second == pytest.approx(gap, abs=2e-3)
    for truth, own in zip(truths, teacher_forced(smollm2_f32, truths), strict=True):
        torch.testing.assert_close(own, truth.own, rtol=0, atol=1e-3)


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def test_bf16_differs_only_where_two_tokens_are_close(smollm2_bf16: LLM, truths: list[Truth]) -> None:
    outputs = smollm2_bf16.generate([truth.prompt for truth in truths], greedy(NEW))
    gaps = []
    for truth, output in zip(truths, outputs, strict=True):
        at = first_difference(output.outputs[0].token_ids, truth.answer)
        if at is not None:
            gaps.append(truth.gaps[at].item())
    print(f"{len(gaps)} of {COUNT} prompts differ, at gaps of {sorted(round(gap, 3) for gap in gaps)} nats")
    assert all(gap < CLOSE for gap in gaps)
    assert len(gaps) <= COUNT / 2


def test_bf16_is_no_further_from_float32_than_that_of_transformers(
    smollm2_bf16: LLM, truths: list[Truth]
) -> None:
    model = load(smollm2_bf16.model_path, torch.bfloat16)
    theirs = [own_logprobs(logprobs_of(model, truth.whole), truth.whole) for truth in truths]
    ours = teacher_forced(smollm2_bf16, truths)
    means = {}
    for name, found in (("octavo", ours), ("transformers", theirs)):
        apart = torch.cat([abs(own - truth.own) for own, truth in zip(found, truths, strict=True)])
        answers = torch.cat([abs(o - t.own)[-NEW:] for o, t in zip(found, truths, strict=True)])
        means[name] = apart.mean().item(), answers.mean().item()
        print(
            f"{name}: mean difference {means[name][0]:.5f} nats over {len(apart)} tokens, "
            f"{means[name][1]:.5f} over the {len(answers)} of the answers"
        )
    assert means["octavo"][0] <= means["transformers"][0]
    assert means["octavo"][1] <= means["transformers"][1]
