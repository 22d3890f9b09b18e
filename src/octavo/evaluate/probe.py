"""The start-up probe of quality: what does the format of the cache cost this model?

A short text is read twice, in full precision and with blocks stored as configured. The measure is the share of a
token's likelihood that is kept, exp(-KL): text that the model would write in full precision gets a perplexity that is
larger by the factor 1 / kept. Unlike the share of equal likeliest tokens, which is reported beside it, it hardly
depends on how close the first two tokens happen to be, so that a few hundred positions are enough; unlike a divergence
in nats more of it is better, as a floor needs it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from octavo.cache.formats import FORMATS
from octavo.cache.layout import CacheLayout
from octavo.config import DEFAULT_QUALITY_FLOOR, EngineConfig, Environment
from octavo.errors import ConfigError
from octavo.evaluate.loss import Losses
from octavo.evaluate.reading import Reading
from octavo.evaluate.text import own_text_digest, own_tokens
from octavo.kept import Kept
from octavo.kernels import native
from octavo.model.load import LoadedModel
from octavo.model.runner import Runner

logger = logging.getLogger("octavo")

_LENGTH = 512


@dataclass(frozen=True)
class Quality:
    """What was found over so many `positions`: divergence in nats, share of them with the same likeliest token."""

    positions: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float

    @property
    def kept(self) -> float:
        """Share of a token's likelihood that is kept."""
        return math.exp(-self.kl_mean)

    def __str__(self) -> str:
        return (
            f"{self.kept:.1%} of a token's likelihood is kept (KL divergence {self.kl_mean:.3g} nats on average and "
            f"{self.kl_p99:.3g} at the 99th percentile, the same likeliest token at {self.top1_agreement:.1%} of "
            f"{self.positions} positions)"
        )


class QualityProbe:
    """Measures formats for one model. Whoever used `runner` before has to attach its own cache again.

    Sequences have at most `longest` tokens, steps at most `max_rows` rows.
    """

    def __init__(self, loaded: LoadedModel, runner: Runner, *, max_rows: int, longest: int) -> None:
        self._loaded = loaded
        self._runner = runner
        self._max_rows = max_rows
        self._longest = longest

    def measure(self, layout: CacheLayout) -> Quality | None:
        """What `layout` costs, found now or earlier; None if no sequence is long enough to read a stored block."""
        # The first block is never stored, and a row reads the one it stands in as it was filled.
        first = 2 * layout.block_size
        length = min(max(_LENGTH, 4 * layout.block_size), self._longest)
        if length <= first or not layout.is_stored:
            return None
        loaded = self._loaded
        facts = [loaded.digest, str(loaded.torch_dtype), layout.name, length, self._runner.fused]
        facts += [native.path(), native.module_digest(), own_text_digest()]
        kept = Kept(Environment.read().home, "quality", facts)
        try:
            return Quality(**kept.load())
        except TypeError:
            logger.info("measuring, once, what a cache in %s costs this model", layout.format)
        quality = self._measure(layout, length, first)
        kept.save(asdict(quality))
        return quality

    def _measure(self, layout: CacheLayout, length: int, first: int) -> Quality:
        token_ids = own_tokens(self._loaded, length)
        plain = CacheLayout(layout.groups, layout.block_size, layout.compute)
        full, stored = (Reading(self._runner, x, length, self._max_rows) for x in (plain, layout))
        losses, at = Losses(), first + 1
        found = stored.read(token_ids, first)
        for truth in full.read(token_ids, first):
            losses.add(truth, next(found), token_ids[at : at + len(truth)])
            at += len(truth)
        return Quality(losses.positions, losses.kl_mean, losses.kl_p99, losses.top1_agreement)


def check_quality(config: EngineConfig, layout: CacheLayout, probe: QualityProbe) -> Quality | None:
    """What the format of `layout` costs, None if it costs nothing.

    Logs a warning if that is much, for a format that blocks may be folded to as well. Raises `ConfigError` if it is
    more than `config.kv_quality_floor` allows.
    """
    quality = _judge(config, "kv_cache_dtype", replace(layout, ladder=()), probe)
    for step in layout.ladder:
        folded = CacheLayout(layout.groups, layout.block_size, step, layout.compute)
        _judge(config, "compress_under_pressure", folded, probe)
    return quality


def _judge(config: EngineConfig, option: str, layout: CacheLayout, probe: QualityProbe) -> Quality | None:
    quality, floor = probe.measure(layout), config.kv_quality_floor
    if quality is None:
        return None
    if floor is not None and quality.kept < floor:
        larger = _larger_that_keeps(layout, floor, probe)
        raise ConfigError(
            f"kv_quality_floor={floor:g}: {option}={layout.format!r} is too coarse for this model, {quality}; "
            f"{larger or 'full precision'} would do, or a floor of {math.floor(1000 * quality.kept) / 1000}",
            param="kv_quality_floor",
        )
    if quality.kept < DEFAULT_QUALITY_FLOOR:
        logger.warning(
            "%s=%r is coarse for this model: %s; `octavo eval` compares formats",
            option,
            layout.format,
            quality,
        )
    return quality


def _larger_that_keeps(layout: CacheLayout, floor: float, probe: QualityProbe) -> str | None:
    """The smallest larger format that keeps to `floor`."""
    for larger in _larger(layout):
        quality = probe.measure(larger)
        if quality is not None and quality.kept >= floor:
            return f"{larger.format}, which keeps {quality.kept:.1%},"
    return None


def _larger(layout: CacheLayout) -> Sequence[CacheLayout]:
    found = []
    for format in FORMATS.values():
        if not format.is_compute:
            try:
                other = CacheLayout(layout.groups, layout.block_size, format.name, layout.compute)
            except ConfigError:  # a head size that it cannot store
                continue
            if other.bytes_per_token > layout.bytes_per_token:
                found.append(other)
    return sorted(found, key=lambda x: x.bytes_per_token)
