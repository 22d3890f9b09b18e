"""`octavo eval` as a user asks for it: one model, several cache formats, one row each."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.cache.layout import CacheLayout
from octavo.config import STORED_BLOCK_SIZE, EngineConfig, split_formats
from octavo.errors import ConfigError, show
from octavo.evaluate.loss import Losses
from octavo.evaluate.reading import Reading
from octavo.evaluate.records import RecordScore, RecordTask, ask_records
from octavo.evaluate.retrieval import DEPTHS, make_haystack, retrieved
from octavo.evaluate.text import own_text, own_tokens
from octavo.kernels import native
from octavo.model import attention
from octavo.model.load import LoadedModel, load_model
from octavo.model.pull import Notice
from octavo.model.runner import Runner
from octavo.sizing import cache_layout, context_limit

DEFAULT_FORMATS = "auto,fp8,int8,int4,int2"
DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class Row:
    """One format. `found` is by depth, None where the window is too short for the task; so is `records`."""

    layout: CacheLayout
    losses: Losses
    perplexity_increase: float
    found: tuple[bool, ...] | None
    records: RecordScore | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Shares are from 0 to 1, divergences in nats."""
        found, records = self.found, self.records
        return {
            "kv_cache_dtype": self.layout.format,
            "bytes_per_token": self.layout.bytes_per_token,
            "perplexity": _number(self.losses.perplexity),
            "perplexity_increase": _number(self.perplexity_increase),
            "kl_mean": _number(self.losses.kl_mean),
            "kl_p99": _number(self.losses.kl_p99),
            "top1_agreement": self.losses.top1_agreement,
            "needle_recall": None if found is None else sum(found) / len(found),
            "needle_depths": None if found is None else dict(zip(map(str, DEPTHS), found, strict=True)),
            "json_parsed": None if records is None else records.parsed,
            "json_fields": None if records is None else records.fields,
        }


@dataclass(frozen=True)
class Evaluation:
    """The answer to one command. `full` is the format of full precision, which all rows are compared with."""

    model: str
    text: str
    full: str
    block_size: int
    window: int
    windows: int
    rows: tuple[Row, ...]

    @property
    def positions(self) -> int:
        """Tokens that were predicted, in each format."""
        return self.rows[0].losses.positions

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "rows": [row.to_dict() for row in self.rows],
            "text": self.text,
            "full_precision": self.full,
            "block_size": self.block_size,
            "window": self.window,
            "windows": self.windows,
            "positions": self.positions,
        }


def evaluate(
    model: str,
    formats: str = DEFAULT_FORMATS,
    *,
    text: Path | None = None,
    window: int | None = None,
    max_windows: int | None = None,
    notice: Notice | None = None,
    **options: Any,
) -> Evaluation:
    """Measure `formats`, separated by commas, on non-overlapping windows of `text` (None: the one that is shipped).

    `window` is in tokens (None: 2,048, or the model's context), `max_windows` cuts the text. `options` are those of
    `EngineConfig`: prompts are read in chunks of `max_num_batched_tokens`, blocks are sealed as in an engine. Raises
    `ConfigError`, `ModelNotFound`, `ModelRefused`, and `InvalidRequest` for a text where the model has no tokenizer.
    """
    options["block_size"] = options.get("block_size") or STORED_BLOCK_SIZE
    configs = [EngineConfig.create(model, **options, kv_cache_dtype=f) for f in split_formats(formats)]
    for name, value, least in (("window", window, 2), ("max_windows", max_windows, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} must be at least {least}", param=name)
    native.set_num_threads(configs[0].num_threads or native.DEFAULT_THREADS)
    attention.register()
    loaded = load_model(model, dtype=configs[0].dtype, attn_implementation=attention.NAME, progress=notice)
    wanted = [cache_layout(config, loaded.spec, loaded.torch_dtype) for config in configs]
    layouts = list({layout.format: layout for layout in wanted}.values())
    context = context_limit(configs[0], loaded.spec)
    if window is not None and window > context:
        raise ConfigError(
            f"window={window} is more than the {context} positions the model was made for; use at most {context}",
            param="window",
        )
    window = window or min(DEFAULT_WINDOW, context)
    token_ids = _tokens(loaded, text)
    windows = [token_ids[at : at + window] for at in range(0, len(token_ids) - 1, window)][:max_windows]
    haystack = make_haystack(loaded.tokenizer, token_ids, window)
    task = RecordTask.of(loaded.tokenizer, context)
    longest = max(window, task.longest if task else 0)
    max_rows = configs[0].max_num_batched_tokens
    plain = CacheLayout(layouts[0].groups, layouts[0].block_size, layouts[0].compute)
    runner = Runner(loaded, plain, max_rows=max_rows, max_len=longest)
    smaller = [layout for layout in layouts if layout.format != plain.format]
    readings = [Reading(runner, layout, longest, max_rows) for layout in (plain, *smaller)]
    losses = measure_losses(readings[0], readings[1:], windows)
    measured = {r.layout.format: (r, loss) for r, loss in zip(readings, losses, strict=True)}
    rows = []
    for reading, loss in (measured[layout.format] for layout in layouts):
        found = None if haystack is None else retrieved(reading, haystack)
        records = None if task is None else ask_records(reading, loaded.tokenizer, task)
        change = loss.perplexity / losses[0].perplexity - 1
        rows.append(Row(reading.layout, loss, change, found, records))
    name = "shipped" if text is None else text.name
    return Evaluation(model, name, plain.format, plain.block_size, window, len(windows), tuple(rows))


def measure_losses(full: Reading, readings: Sequence[Reading], windows: Sequence[list[int]]) -> list[Losses]:
    """Losses of `full`, which the others are compared with, and of each of `readings`.

    All go through a window side by side, so that no more than two chunks of logits are held at a time.
    """
    losses = [Losses() for _ in (full, *readings)]
    for window in tqdm(windows, desc="Windows", disable=not sys.stderr.isatty(), leave=False):
        for reading in (full, *readings):
            reading.begin()
        others = [reading.read(window) for reading in readings]
        at = 1
        for truth in full.read(window):
            following = window[at : at + len(truth)]
            at += len(truth)
            losses[0].add(truth, truth, following)
            for loss, other in zip(losses[1:], others, strict=True):
                loss.add(truth, next(other), following)
    return losses


def _tokens(loaded: LoadedModel, text: Path | None) -> list[int]:
    if text is None:
        if loaded.tokenizer.hf is None:
            return own_tokens(loaded, DEFAULT_WINDOW)
        words = own_text()
    else:
        try:
            words = text.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"text={show(str(text))} cannot be read: {error}", param="text") from error
    token_ids = loaded.tokenizer.encode(words)
    if len(token_ids) < 2:
        raise ConfigError(
            f"text={show(str(text))} has {len(token_ids)} tokens; 2 are the fewest of which one can be predicted",
            param="text",
        )
    if max(token_ids) >= loaded.spec.vocab_size:
        raise ConfigError(
            f"the tokenizer makes token id {max(token_ids)} of the text, and the model knows ids from 0 to "
            f"{loaded.spec.vocab_size - 1}; use the tokenizer that the model was made with",
            param="text",
        )
    return token_ids


def _number(value: float) -> float | None:
    """JSON has no other numbers than finite ones."""
    return value if math.isfinite(value) else None
