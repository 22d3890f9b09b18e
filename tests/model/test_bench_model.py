"""`octavo bench cache` on the real SmolLM2, a few tokens of it."""

from __future__ import annotations

import pytest

from octavo.bench.cache import measure_cache
from octavo.bench.limits import MachineLimits
from octavo.errors import ModelNotFound
from octavo.kernels import native

pytestmark = pytest.mark.model


def test_smollm2_says_the_same_with_and_without_a_cache() -> None:
    limits = MachineLimits(native.num_threads(), 1e9, 1e9, 1e9)
    try:
        report = measure_cache("smollm2", prompt_tokens=24, new_tokens=8, limits=limits)
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    assert report.same_tokens == {"no cache": 8, "transformers": 8, "octavo": 8}
    assert [sum(run.positions) for run in report.runs] == [sum(range(24, 32)), 31, 31]
