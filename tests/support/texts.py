"""Real prompts, cut from the texts that `OCTAVO_DATA` points to."""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from support.sizes import DATA

TEXT = DATA / "text"


@cache
def passages() -> tuple[tuple[str, ...], ...]:
    """Texts by source: questions, code, a poem, an encyclopedia. Skips the test where they are missing."""
    if not TEXT.is_dir():
        pytest.skip(f"there are no texts in {TEXT}; set OCTAVO_DATA")
    questions = [json.loads(line) for line in (TEXT / "mtbench/question.jsonl").read_text().splitlines()]
    with gzip.open(TEXT / "humaneval/HumanEval.jsonl.gz", "rt") as lines:
        code = [json.loads(line)["prompt"] for line in lines]
    wiki = (TEXT / "wikitext2/wiki.test.raw").read_text()
    return (
        tuple(turn for question in questions for turn in question["turns"]),
        tuple(code),
        ((TEXT / "sonnet.txt").read_text(),),
        tuple(wiki[start : start + 20_000] for start in range(0, 400_000, 20_000)),
    )


def real_prompts(
    lengths: Sequence[int], encode: Callable[[str], list[int]], seed: int = 0
) -> list[list[int]]:
    """One prompt of each length in tokens, from each source in turn; all differ from their first tokens on."""
    chooser = random.Random(seed)
    prompts: list[list[int]] = []
    for index, length in enumerate(lengths):
        source = passages()[index % len(passages())]
        ids: list[int] = []
        while len(ids) < length:
            ids += encode(chooser.choice(source))
        if len(source) == 1:
            begin = chooser.randrange(max(1, len(ids) - length))
            ids = ids[begin:]
        prompts.append(ids[:length])
    return prompts


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """`count` lengths from `shortest` to `longest`, each the same factor above the one before."""
    ratio = (longest / shortest) ** (1 / (count - 1))
    return [round(shortest * ratio**i) for i in range(count)]
