"""`python -m benchmarks.folding`: what folding under pressure saves, and what it costs.

An arena for a number of conversations serves more of them, turn by turn. What it has lost is computed again; what it
has folded is read with less precision. Each ladder is one run of the same prompts; the answers are held against those
of an arena that is large enough. The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.data import Prompts
from octavo.bench.generate import greedy
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.live import LiveRequest

LADDERS = ("", "int8", "int8,int4", "int8,int4,int2")
RUNNING = 4
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Sizes:
    """An arena for `room` conversations serves `conversations` of `turns` turns, each of `asked` and `new` tokens."""

    room: int = 20
    conversations: int = 32
    turns: int = 3
    asked: int = 100
    new: int = 16

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.turns * (self.asked + self.new)


QUICK = Sizes(room=3, conversations=5, turns=2, asked=70, new=8)


@dataclass(frozen=True)
class Run:
    """One ladder. Tokens: `again` were computed that a large arena would have had, `compressed` read from folded
    blocks. `lost` counts turns whose conversation was reclaimed in part, `folded` blocks by format, `same` is the share
    of generated tokens before an answer parts from that of the large arena."""

    ladder: str
    again: int
    compressed: int
    lost: int
    folded: dict[str, int]
    same: float


def answer(engine: Engine, prompts: list[list[int]], new: int) -> list[LiveRequest]:
    """One turn of all conversations."""
    lives = [engine.prepare(str(i), prompt, greedy(new)) for i, prompt in enumerate(prompts)]
    for live in lives:
        engine.submit(live)
    while engine.has_work:
        engine.step()
    engine.check()
    return lives


def tokens_of(live: LiveRequest) -> list[int]:
    """What was generated."""
    return live.output().outputs[0].token_ids


def script_of(engine: Engine, sizes: Sizes) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Prompts and answers by turn and conversation, where nothing is ever short."""
    texts = Prompts(engine.tokenizer, engine.loaded.spec.vocab_size)
    histories: list[list[int]] = [[] for _ in range(sizes.conversations)]
    prompts, answers = [], []
    for _ in range(sizes.turns):
        histories = [[*history, *texts.next(sizes.asked)] for history in histories]
        prompts.append(histories)
        answers.append([tokens_of(live) for live in answer(engine, histories, sizes.new)])
        histories = [[*h, *a] for h, a in zip(histories, answers[-1], strict=True)]
    return prompts, answers


def measure(model: str, dtype: str, sizes: Sizes) -> list[Run]:
    """One run per ladder."""
    options = {"dtype": dtype, "block_size": BLOCK_SIZE, "max_num_seqs": RUNNING}
    ample = Engine(EngineConfig.create(model, kv_cache_memory="1GiB", **options))
    prompts, right = script_of(ample, sizes)
    computed = ample.totals().computed_tokens
    memory = sizes.room * ample.layout.sequence_bytes(sizes.longest)
    runs = []
    for ladder in LADDERS:
        engine = Engine(
            EngineConfig.create(model, kv_cache_memory=memory, compress_under_pressure=ladder, **options)
        )
        lives = [answer(engine, turn, sizes.new) for turn in prompts]
        pairs = [
            (tokens_of(live), expected)
            for turn, answers in zip(lives, right, strict=True)
            for live, expected in zip(turn, answers, strict=True)
        ]
        totals, receipts = engine.totals(), [live.request.receipt for turn in lives for live in turn]
        runs.append(
            Run(
                ladder,
                totals.computed_tokens - computed,
                engine.scheduler.totals.compressed_tokens,
                sum(r.miss is not None and r.miss.reason == "reclaimed" for r in receipts),
                totals.folded_blocks,
                sum(map(agreement, pairs)) / len(pairs),
            )
        )
    return runs


def agreement(pair: tuple[list[int], list[int]]) -> float:
    """The share of an answer before it parts from the right one."""
    mine, right = pair
    same = next((i for i, (a, b) in enumerate(zip(mine, right, strict=True)) if a != b), len(right))
    return same / len(right)


def plot(runs: list[Run], sizes: Sizes, path: Path) -> None:
    """Tokens computed again against answers that stay the same."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points: dict[tuple[int, float], list[str]] = {}
    for run in runs:
        points.setdefault((run.again, 100 * run.same), []).append(run.ladder or "off")
    axes.plot(*zip(*points, strict=True), "o", color="#3b6ea5")
    for point, ladders in points.items():
        axes.annotate("\n".join(ladders), point, xytext=(8, -4), textcoords="offset points", va="top")
    axes.set_xlabel("prompt tokens computed again")
    axes.set_ylabel("% of an answer before it differs")
    axes.set_title(f"{sizes.conversations} conversations of {sizes.longest} tokens, room for {sizes.room}")
    axes.grid(alpha=0.3)
    axes.margins(0.25)
    figure.savefig(path, dpi=150)


def main(
    model: str = "smollm2",
    dtype: str = "bfloat16",
    room: Annotated[int, typer.Option(help="Conversations that the arena holds.")] = Sizes.room,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    picture: Annotated[Path | None, typer.Option("--plot")] = None,
) -> None:
    """Measure every ladder on MODEL; draw the trade-off where `--plot` says."""
    sizes = QUICK if quick else Sizes(room=room)
    runs = measure(model, dtype, sizes)
    for run in runs:
        print(
            f"{run.ladder or 'off':16} {run.lost:4} turns lost, {run.again:6} tokens again, "
            f"{run.compressed:6} compressed, {run.same:.3f} the same, folded {run.folded}"
        )
    if picture is not None:
        plot(runs, sizes, picture)
    print(json.dumps({"sizes": asdict(sizes), "runs": [asdict(run) for run in runs]}))


if __name__ == "__main__":
    typer.run(main)
