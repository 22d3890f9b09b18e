"""`octavo eval` on tiny models: its numbers are those of transformers, of the engine, and of naive arithmetic."""

import json
import math
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.errors import ConfigError, InvalidRequest
from octavo.evaluate.loss import Losses
from octavo.evaluate.records import RecordScore, RecordTask, ask_records, judge_records
from octavo.evaluate.report import Evaluation, evaluate
from octavo.evaluate.retrieval import DEPTHS, make_haystack, retrieved
from octavo.evaluate.text import own_text
from octavo.model.tokenizer import Tokenizer
from unit.model_builders import byte_tokenizer

ONE = {"num_threads": 1, "max_windows": 2}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path_factory.getbasetemp() / "evaluate"))


def theirs(model: Path, windows: Sequence[list[int]]) -> float:
    """Perplexity by transformers, in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    losses = []
    for window in windows:
        with torch.inference_mode():
            rows = loaded(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
        losses.append(-rows.gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    return math.exp(torch.cat(losses).double().mean())


def windows_of(window: int, count: int) -> list[list[int]]:
    token_ids = Tokenizer(byte_tokenizer(prepend_bos=False)).encode(own_text())
    return [token_ids[i * window : (i + 1) * window] for i in range(count)]


@pytest.mark.parametrize("kind", ["llama", "mistral, window", "gpt2"])
def test_the_perplexity_is_that_of_transformers(kind: str, tiny: Callable[[str], Path]) -> None:
    model = tiny(kind)
    expected = theirs(model, windows_of(300, 2))
    for options in ({}, {"max_num_batched_tokens": 64, "block_size": 16}):
        [row] = evaluate(str(model), "auto", window=300, dtype="float32", **ONE, **options).rows
        assert row.losses.perplexity == pytest.approx(expected, rel=1e-5)
    [row] = evaluate(str(model), "bf16", window=300, dtype="bfloat16", **ONE).rows
    assert row.losses.perplexity == pytest.approx(expected, rel=5e-3)


@pytest.fixture(scope="module")
def evaluation(tiny: Callable[[str], Path]) -> Evaluation:
    formats = "int2,bf16,int8,k=int8,v=int4,int4,auto"
    return evaluate(str(tiny("qwen2")), formats, window=500, dtype="bfloat16", **ONE)


def test_a_row_is_what_the_engine_computes_with_that_format(
    evaluation: Evaluation, tiny: Callable[[str], Path]
) -> None:
    for row in evaluation.rows:
        options = {"kv_cache_dtype": row.layout.format, "block_size": 32, "max_num_batched_tokens": 100}
        with LLM(tiny("qwen2"), dtype="bfloat16", num_threads=1, kv_cache_memory="8MiB", **options) as llm:
            outputs = llm.generate(windows_of(500, 2), SamplingParams(max_tokens=1, prompt_logprobs=0))
        nll = 0.0
        for window, output in zip(windows_of(500, 2), outputs, strict=True):
            assert output.prompt_logprobs is not None
            steps = zip(window[1:], output.prompt_logprobs[1:], strict=True)
            nll -= sum(entries[token].logprob for token, entries in steps if entries)
        assert row.losses.nll == pytest.approx(nll, rel=1e-6)
        assert row.losses.positions == 998


def test_rows_are_as_asked_for_and_full_precision_loses_nothing(evaluation: Evaluation) -> None:
    report = json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    rows = {row["kv_cache_dtype"]: row for row in report["rows"]}
    assert list(rows) == ["int2", "bf16", "int8", "k=int8,v=int4", "int4"]
    assert report["full_precision"] == "bf16"
    assert (report["windows"], report["window"], report["positions"]) == (2, 500, 998)
    full = rows["bf16"]
    assert (full["kl_mean"], full["kl_p99"], full["top1_agreement"]) == (0, 0, 1)
    assert full["perplexity_increase"] == 0
    losses = [rows[name]["kl_mean"] for name in ("bf16", "int8", "k=int8,v=int4", "int4", "int2")]
    assert losses == sorted(losses)
    assert 0 < losses[1] < 0.001 < losses[-1]
    for row, found in zip(evaluation.rows, report["rows"], strict=True):
        assert found["bytes_per_token"] == row.layout.bytes_per_token
        assert found["kl_mean"] < found["kl_p99"] or found is full
        assert found["perplexity"] / full["perplexity"] - 1 == pytest.approx(found["perplexity_increase"])
        assert found["needle_recall"] is None  # facts and questions would be most of such a window
    assert [rows[name]["bytes_per_token"] for name in rows] == [56, 256, 152, 120, 88]


def test_losses_are_those_of_naive_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    full, found = (3 * torch.randn(500, 40, generator=generator) for _ in range(2))
    full[:, 7] = found[:, 7] = -math.inf  # a token that cannot come
    following = torch.randint(7, (500,), generator=generator).tolist()
    losses = Losses()
    for first in range(0, 500, 130):
        part = slice(first, first + 130)
        losses.add(full[part], found[part], following[part])
    p, q = full.double().softmax(-1), found.double().softmax(-1)
    keep = [i for i in range(40) if i != 7]
    kl = (p * (p / q).log())[:, keep].sum(-1)
    assert losses.kl_mean == pytest.approx(float(kl.mean()), rel=1e-5)
    assert losses.kl_p99 == pytest.approx(
        float(kl.sort().values[494]), rel=1e-5
    )  # 495 of 500 are at most this
    assert losses.top1_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert losses.perplexity == pytest.approx(
        math.exp(-float(q[range(500), following].log().mean())), rel=1e-5
    )
    assert losses.positions == 500


class Scripted:
    """A reading whose model goes on as `writes` says, by the number of prompts it has read; `after` ends a prompt."""

    def __init__(self, writes: Sequence[list[int]], after: list[int]) -> None:
        self._writes = writes
        self._after = after
        self.token_ids: list[int] = []
        self.steps = 0

    def begin(self) -> None:
        self.token_ids = []

    def rewind(self, length: int) -> None:
        del self.token_ids[length:]

    def _likeliest(self, position: int) -> int:
        """What the model takes for the token after the one at `position`, if it wrote what was read since a prompt."""
        ends = [
            i + len(self._after)
            for i in range(position + 2 - len(self._after))
            if self.token_ids[i : i + len(self._after)] == self._after
        ]
        if not ends:
            return 0
        written = self._writes[len(ends) - SHOWN - 1] if len(ends) > SHOWN else []
        at = position + 1 - ends[-1]
        agrees = self.token_ids[ends[-1] : position + 1] == written[:at]
        return written[at] if agrees and at < len(written) else 0

    def read(self, token_ids: Sequence[int], first: int = 0) -> Iterator[Tensor]:
        start = len(self.token_ids)
        self.token_ids += token_ids
        found = [self._likeliest(start + i) for i in range(first, len(token_ids))]
        for at in range(0, len(found), 50):
            yield torch.nn.functional.one_hot(torch.tensor(found[at : at + 50]), 300).float()

    def last(self, token_ids: Sequence[int]) -> Tensor:
        self.steps += 1
        [rows] = self.read(token_ids, len(token_ids) - 1)
        return rows[0]


class Knowing:
    """A reading whose model takes `token_ids` for what comes, whatever it reads."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._predicts = [*token_ids, 0]

    def begin(self) -> None:
        pass

    def read(self, token_ids: Sequence[int], first: int = 0) -> Iterator[Tensor]:
        following = self._predicts[first + 1 :]
        for at in range(0, len(following), 50):
            yield torch.nn.functional.one_hot(torch.tensor(following[at : at + 50]), 300).float()


SHOWN = 4  # records that are there before the first is asked for


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(prepend_bos=False))


def test_nothing_of_a_chunk_is_kept_but_numbers() -> None:
    losses, rows = Losses(), torch.randn(130, 50)
    for _ in range(3):
        losses.add(rows, rows, [1] * 130)
    assert losses.positions == 390
    assert {type(kept) for kept in vars(losses).values()} == {int, float, array}
    assert len(losses.kl) == 390


def test_needles_stand_at_their_depths_and_each_is_judged_by_all_of_its_tokens(tokenizer: Tokenizer) -> None:
    haystack = make_haystack(tokenizer, tokenizer.encode("Hay. "), 2000)
    assert haystack is not None
    assert len(haystack.token_ids) == 2000
    text = tokenizer.decode(haystack.token_ids[: haystack.questions])
    questions = tokenizer.decode(haystack.token_ids[haystack.questions :])
    places = [
        text.index(f"\n\nThe secret number of {place}") for place in ("Arden", "Brill", "Corvo", "Delph")
    ]
    spread = (len(text) - places[0]) / 4
    assert places[0] == 0
    for i, place in enumerate(places):
        assert place == pytest.approx(i * spread, abs=60)
    assert text.endswith(".\n\n")
    for answer in haystack.answers:
        code = tokenizer.decode([haystack.token_ids[p] for p in answer])
        assert code.strip().isdigit()
        assert text.count(code) == questions.count(code) == 1
    everything = Knowing(haystack.token_ids)
    assert retrieved(everything, haystack) == (True,) * len(DEPTHS)  # type: ignore[arg-type]
    for i, answer in enumerate(haystack.answers):
        for p in answer:
            wrong = list(haystack.token_ids)
            wrong[p] += 1
            found = retrieved(Knowing(wrong), haystack)  # type: ignore[arg-type]
            assert found == tuple(j != i for j in range(len(DEPTHS)))


def test_a_window_that_holds_little_hay_has_no_needles(tokenizer: Tokenizer) -> None:
    assert make_haystack(tokenizer, [1, 2, 3], 600) is None
    assert make_haystack(Tokenizer(None), [1, 2, 3], 6000) is None


RIGHT = [
    '{"name": "Jonas Falk", "age": 62, "trade": "postman", "town": "Bergen", "crowns": 340}',
    '{"name": "Clara Weiss", "age": 38, "trade": "weaver", "town": "Ulm", "crowns": 95}',
    '{"name": "Ravi Menon", "age": 47, "trade": "doctor", "town": "Kochi", "crowns": 510}',
    '{"name": "Elsa Holm", "age": 25, "trade": "painter", "town": "Visby", "crowns": 66}',
]


def test_records_are_judged_by_parse_and_fields() -> None:
    assert judge_records([f" {right}\nLine: more" for right in RIGHT]) == RecordScore(1, 1)
    odd = ["", "[1, 2]", RIGHT[2].replace("47", '"47"'), RIGHT[3].replace("}", "")]
    assert judge_records(odd) == RecordScore(1 / 4, 4 / 20)
    assert judge_records([right.replace("age", "Age") for right in RIGHT]) == RecordScore(1, 16 / 20)


def test_records_are_written_until_the_line_the_limit_or_the_end(tokenizer: Tokenizer) -> None:
    task = RecordTask.of(tokenizer, 10_000)
    assert task is not None
    end = tokenizer.eos_token_ids[0]
    answers = [
        tokenizer.encode(f" {RIGHT[0]}\n\n"),
        [*tokenizer.encode(RIGHT[1]), end],
        tokenizer.encode("no end " * 100),
        tokenizer.encode(f" {RIGHT[3].replace('25', '52')}\n"),
    ]
    reading = Scripted(answers, tokenizer.encode("\nJSON:"))
    assert ask_records(reading, tokenizer, task) == RecordScore(3 / 4, 14 / 20)  # type: ignore[arg-type]
    text = tokenizer.decode(reading.token_ids)
    assert text.count("Line: ") == 8
    assert text.count(RIGHT[0]) == 1
    # Nothing was decoded for the first; the others step from where they leave the right answer.
    limit, differs = len(task.right[2]) + 16, RIGHT[3].index("25") + 1
    assert reading.steps == len(RIGHT[1]) + (limit - 1) + (len(answers[3]) - differs - 1)
    assert len(reading.token_ids) <= task.longest
    assert RecordTask.of(tokenizer, task.longest) == task
    assert RecordTask.of(tokenizer, task.longest - 1) is None


def test_what_cannot_be_measured_is_refused_by_name(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"window": 1}, "window=1 must be at least 2"),
        ({"window": 1025}, "window=1025 is more than the 1024 positions"),
        ({"max_windows": 0}, "max_windows=0"),
        ({"text": tmp_path / "none.txt"}, "cannot be read"),
        ({"text": tmp_path / "odd.txt"}, "cannot be read"),
        ({"text": tmp_path / "one.txt"}, "has 1 tokens"),
        ({"formats": "int8,int3"}, "kv_cache_dtype='int3'"),
        ({"formats": "int8,"}, "kv_cache_dtype=''"),
        ({"formats": "f32", "dtype": "bfloat16"}, "compute type 'bf16'"),
        ({"block_size": 8, "formats": "int8"}, "block_size=8"),
    ]
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            evaluate(str(tiny("llama")), **{"num_threads": 1, **options})


def test_a_model_without_a_tokenizer_is_measured_on_drawn_tokens(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    place = tmp_path / "model"
    shutil.copytree(tiny("llama"), place, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        evaluate(str(place), text=tmp_path / "text.txt", num_threads=1)
    found = evaluate(str(place), "auto,int2", window=128, **ONE)
    assert found.positions == 2 * 127
    assert found.rows[1].losses.kl_mean > 0
    assert found.rows[0].records is None


def test_the_command_prints_a_table_or_json_and_draws(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(own_text()[:1200])
    drawing = tmp_path / "eval.svg"
    command = ["eval", str(tiny("llama")), "--kv-cache-dtype", "auto,k=int8,v=int4", "--text"]
    command += [str(tmp_path / "text.txt"), "--window", "200", "--num-threads", "1", "--dtype", "bfloat16"]
    assert main([*command, "--json", "--plot", str(drawing)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["kv_cache_dtype"] for row in report["rows"]] == ["bf16", "k=int8,v=int4"]
    assert (report["windows"], report["positions"]) == (6, 6 * 199)
    assert "k=int8,v=int4" in drawing.read_text()
    assert main([*command, "--max-windows", "1"]) == 0
    table = capsys.readouterr().out
    assert "199 tokens predicted in 1 window of 200" in table
    assert f"{report['rows'][1]['bytes_per_token']:,}" in table
    assert main([*command, "--plot", str(tmp_path / "eval.nothing"), "--max-windows", "1"]) == 1
    assert "plot=" in capsys.readouterr().err
