"""What cache formats cost SmolLM2 on WikiText-2, against the marks they are held to, and what its perplexity is."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM
from octavo.config import DEFAULT_QUALITY_FLOOR
from octavo.errors import ConfigError, ModelNotFound
from octavo.evaluate.report import Evaluation, Row, evaluate
from support.sizes import DATA, sized

pytestmark = pytest.mark.model

TEXT = DATA / "text" / "wikitext2" / "wiki.test.raw"
WINDOW = sized(512, 2048)
MAX_WINDOWS = sized(1, None)
MARKS = {"int8": 0.005, "fp8": 0.01, "int4": 0.03}
"""The most that perplexity may rise."""


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    if not TEXT.exists():
        pytest.skip(f"there is no WikiText-2 at {TEXT}; set OCTAVO_DATA")
    try:
        return evaluate(
            "smollm2",
            "bf16,int8,fp8,int4,int2",
            text=TEXT,
            window=WINDOW,
            max_windows=MAX_WINDOWS,
            dtype="bfloat16",
        )
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


def row(evaluation: Evaluation, format: str) -> Row:
    return next(row for row in evaluation.rows if row.layout.format == format)


def test_perplexity_rises_no_more_than_the_marks(evaluation: Evaluation) -> None:
    for found in evaluation.rows:
        print(found.to_dict())
    for format, mark in MARKS.items():
        assert row(evaluation, format).perplexity_increase <= mark
    # Two bits are reported whatever they cost; here only that the cost is seen, and is far from that of four.
    coarse, fine = (row(evaluation, format).losses for format in ("int2", "int4"))
    assert coarse.kl_mean > 10 * fine.kl_mean > 0
    assert coarse.top1_agreement < 0.9 < fine.top1_agreement


def test_retrieval_and_json_work_in_full_precision_and_with_eight_bits(evaluation: Evaluation) -> None:
    for format in ("bf16", "int8"):
        found = row(evaluation, format)
        assert found.found is not None
        assert found.records is not None
        assert sum(found.found) >= 2
        assert found.records.parsed == 1
        assert found.records.fields >= 0.9


def test_the_perplexity_is_that_of_transformers(evaluation: Evaluation, smollm2_bf16: LLM) -> None:
    token_ids = smollm2_bf16.engine.tokenizer.encode(TEXT.read_text())
    model = AutoModelForCausalLM.from_pretrained(smollm2_bf16.model_path, dtype=torch.bfloat16).eval()
    nll, positions = 0.0, 0
    for first in range(0, len(token_ids) - 1, WINDOW)[:MAX_WINDOWS]:
        window = token_ids[first : first + WINDOW]
        with torch.inference_mode():
            logits = model(torch.tensor([window]), use_cache=False).logits[0, :-1]
        for rows, following in zip(logits.split(256), torch.tensor(window[1:]).split(256), strict=True):
            nll -= float(rows.float().log_softmax(-1).gather(1, following[:, None]).double().sum())
        positions += len(window) - 1
    assert positions == evaluation.positions
    print(f"transformers: perplexity {math.exp(nll / positions)} over {positions} tokens")
    assert row(evaluation, "bf16").losses.perplexity == pytest.approx(math.exp(nll / positions), rel=5e-3)


def test_two_bits_are_refused_by_the_default_floor_and_four_are_not() -> None:
    options = {"dtype": "bfloat16", "kv_cache_memory": "64MiB", "kv_quality_floor": "default"}
    try:
        with LLM("smollm2", kv_cache_dtype="int4", **options) as llm:
            assert llm.engine.quality is not None
            assert llm.engine.quality.kept > DEFAULT_QUALITY_FLOOR
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    with pytest.raises(
        ConfigError, match=r"kv_quality_floor=0\.97: kv_cache_dtype='int2' is too coarse"
    ) as caught:
        LLM("smollm2", kv_cache_dtype="int2", **options)
    print(caught.value.message)
    assert "; int4, which keeps 99" in caught.value.message
