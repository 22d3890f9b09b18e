"""Traces: three kinds, one line at a time, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.simulate.synthetic import Synthetic
from octavo.simulate.trace import MOST_TOKENS, Arrival, read_trace

MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 1000, "input_length": 1030, "output_length": 7, "hash_ids": [70, 80, 90]},
    {"timestamp": 3500, "input_length": 1024, "output_length": 1, "hash_ids": [70, 81]},
]
LOG: list[dict[str, Any]] = [
    {
        "timestamp": 900,
        "input_length": 21,
        "output_length": 9,
        "hash_ids": [5, 6],
        "output_hash_ids": [8],
        "block_size": 8,
        "n": 1,
        "priority": -1,
    },
    {"timestamp": 100, "input_length": 10, "output_length": 20, "hash_ids": [5], "block_size": 8},
    {
        "timestamp": 2000,
        "input_length": 26,
        "output_length": 1,
        "hash_ids": [5, 6, 8],
        "output_hash_ids": [],
        "block_size": 8,
    },
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_mooncake(tmp_path: Path) -> None:
    first, second = read_trace(jsonl(tmp_path / "t.jsonl", MOONCAKE))
    assert (first.at, first.prompt, first.output) == (0, 1030, 7)
    assert (second.at, second.prompt, second.output) == (2.5, 1024, 1)
    one, two = first.prompt_tokens(), second.prompt_tokens()
    assert (len(one), len(two)) == (1030, 1024)
    assert one[:512] == two[:512]
    assert not set(one[512:]) & set(two[512:])
    assert first.output_token(1030) not in one + two


def test_a_request_log_is_sorted_and_goes_on_over_answers(tmp_path: Path) -> None:
    early, middle, late = read_trace(jsonl(tmp_path / "log.jsonl", LOG))
    assert [a.at for a in (early, middle, late)] == pytest.approx([0, 0.8, 1.9])
    assert (middle.prompt, middle.priority, early.priority) == (21, -1, 0)
    whole = middle.prompt_tokens() + [middle.output_token(p) for p in range(21, 30)]
    assert whole[:24] == late.prompt_tokens()[:24]
    assert early.prompt_tokens()[:8] == whole[:8]
    assert early.prompt_tokens()[8] == early.output_token(10)
    assert len({whole[0], whole[8], whole[16], whole[24], early.output_token(10)}) == 5


def test_several_answers_share_the_prompt_and_nothing_else(tmp_path: Path) -> None:
    """A log has the tokens of all answers together, and the blocks of the first."""
    rows = [LOG[0] | {"n": 4, "output_length": 401}, LOG[2] | {"n": 3}]
    first, second = read_trace(jsonl(tmp_path / "log.jsonl", rows))
    assert [(a.n, a.output) for a in (first, second)] == [(4, 101), (3, 1)]
    one, *others = ([first.output_token(p, choice) for p in range(21, 40)] for choice in range(4))
    assert one == [first.output_token(p) for p in range(21, 40)]
    assert one[:3] == second.prompt_tokens()[21:24]
    sets = [set(one), *map(set, others), {second.output_token(26, 1)}, set(first.prompt_tokens()[:16])]
    assert sum(map(len, sets)) == len(set.union(*sets))


def test_azure(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    first, second = read_trace(file)
    assert (first.at, first.prompt, first.output) == (0, 374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-6)
    assert not set(first.prompt_tokens()) & set(second.prompt_tokens())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": "soon"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"input_length": None}, "input_length"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1.5}, "input_length"),
        ({"input_length": MOST_TOKENS + 1, "hash_ids": []}, "input_length"),
        ({"input_length": "9" * 5000}, "input_length"),
        ({"output_length": -1}, "output_length"),
        ({"output_length": MOST_TOKENS + 1}, "output_length"),
        ({"hash_ids": [1]}, "hash_ids"),
        ({"hash_ids": "1,2"}, "hash_ids"),
        ({"hash_ids": [1, "2"]}, "hash_ids"),
        ({"block_size": 0}, "block_size"),
        ({"output_hash_ids": 3}, "output_hash_ids"),
        ({"priority": "high"}, "priority"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2.0}, "n"),
    ],
)
def test_a_broken_line_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    broken = {k: v for k, v in (MOONCAKE[1] | change).items() if v is not None}
    with pytest.raises(ConfigError, match=rf"line 2: {field} ") as error:
        read_trace(jsonl(tmp_path / "t.jsonl", [MOONCAKE[0], broken]))
    assert error.value.param == field


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timestamp": 1', "line 1: not JSON"),
        ("{}\n[]", "line 1: timestamp is missing"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n[1]', "line 2: not a JSON object"),
        ("", "holds no request"),
        (" \n" * 5000, "holds no request"),
        ('[{"timestamp": 0}]', "JSON array, and one object per line"),
        ("[" * 100_000, "JSON array"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n' + "[" * 100_000, "line 2: not JSON"),
        ('""', "line 1: TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens\n", "line 1: GeneratedTokens is missing"),
        (AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46.x,1,1\n", "line 4: TIMESTAMP"),
        (AZURE + "2023-11-16 18:15:46.1e5,1,1\n", "line 4: TIMESTAMP"),
        (AZURE + f"2023-11-16 18:15:46,{'9' * 5000},1\n", "line 4: ContextTokens is"),
        (AZURE + f"2023-11-16 18:15:46,1,{MOST_TOKENS + 1}\n", f"GeneratedTokens .* to {MOST_TOKENS}"),
        (AZURE + f"{'9' * 200_000},1,1\n", "line 4: not CSV: field larger"),
        (AZURE + "2023-11-16 18:15:46,,1\n", "line 4: ContextTokens"),
        (AZURE + "2023-11-16 18:15:46,12\n", "line 4: GeneratedTokens is missing"),
        ("\0\1", "TIMESTAMP is missing"),
    ],
    ids=lambda value: ascii(value[-40:]),
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


@pytest.mark.parametrize("before", ["\ufeff", "\n" * 5000, "\ufeff \n"], ids=["mark", "blank", "both"])
@pytest.mark.parametrize("text", [AZURE, "\n".join(map(json.dumps, MOONCAKE))], ids=["csv", "jsonl"])
def test_what_comes_before_a_trace_is_skipped_and_counted(tmp_path: Path, text: str, before: str) -> None:
    plain, file, broken = (tmp_path / name for name in ("plain", "trace", "broken"))
    plain.write_text(text)
    file.write_text(before + text, encoding="utf-8")
    assert read_trace(file) == read_trace(plain)
    broken.write_text(f"{before}{text.rstrip()}\nx", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line {(before + text.rstrip()).count(chr(10)) + 2}:"):
        read_trace(broken)


def test_times_may_have_a_zone(tmp_path: Path) -> None:
    """As in Azure's traces of 2024."""
    file = tmp_path / "azure.csv"
    times = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01", "2024-05-10 02:00:03+02:00")
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{t},1,1" for t in times)]))
    assert [a.at for a in read_trace(file)] == pytest.approx([0, 0.99007, 2.99007], abs=1e-6)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


def test_errors_are_json_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(tmp_path / "t.jsonl", [MOONCAKE[0], {"timestamp": 1}])
    assert main(["simulate", str(file), "--cache-only", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["param"] == "input_length"
    assert "line 2" in error["message"]


def test_made_up_traces_have_the_means_they_are_told() -> None:
    made = list(Synthetic(20_000, rate=5.0).arrivals())
    assert made == list(Synthetic(20_000, rate=5.0).arrivals())
    assert sum(a.prompt for a in made) / len(made) == pytest.approx(1000, rel=0.02)
    assert sum(a.output for a in made) / len(made) == pytest.approx(100, rel=0.02)
    assert made[-1].at == pytest.approx(4000, rel=0.03)
    tokens = [a.prompt_tokens()[:512] for a in made[:50]]
    assert len({t[0] for t in tokens}) < 50
    assert all(len(set(t)) == 1 for t in tokens)


def test_tokens_without_blocks_are_unique() -> None:
    one, two = Arrival(0, 0, 3, 2), Arrival(1, 0, 3, 2)
    assert set(one.prompt_tokens()) == {one.output_token(3)}
    assert one.output_token(3) != two.output_token(3)
