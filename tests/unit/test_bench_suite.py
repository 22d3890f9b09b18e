"""The benchmark suite on a tiny model: every line comes out, and its arithmetic is right."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from benchmarks import core, formats, peers
from benchmarks.__main__ import app, run_cache, run_waste
from benchmarks.data import AZURE_TRACE, Prompts
from benchmarks.measure import Line, alternate, markdown_rows
from benchmarks.overhead import KERNELS, clocks
from benchmarks.peers import Job, PeerResults, run_peers
from benchmarks.subjects import Subjects
from transformers import AutoConfig
from typer.testing import CliRunner

from octavo.bench.limits import MachineLimits
from octavo.kernels import _native
from octavo.model.tokenizer import Tokenizer
from unit.model_builders import LLAMA, save_model

LIMITS = MachineLimits(2, 1e9, 4e9, 2e9)
SIZES = core.Sizes(20, 50, 4, 3, 12, 4, 3, 40, 1, goals=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model("llama", **{**LLAMA, "max_position_embeddings": 512})
    return save_model(config, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def subjects(tiny: Path) -> Subjects:
    return Subjects.load(str(tiny), "float32", LIMITS)


def line(octavo: float, other: float, *, lower: bool, at_least: float | None = 2.0) -> Line:
    return Line("name", "title", "s", octavo, {"other": other, "absent": None}, "other", at_least, lower)


def test_more_than_one_means_better_whichever_way_is_better() -> None:
    assert line(30.0, 10.0, lower=False).ratio == 3.0
    assert line(10.0, 30.0, lower=True).ratio == 3.0
    assert line(10.0, 30.0, lower=True).passed is True
    assert line(30.0, 10.0, lower=True).passed is False
    assert line(30.0, 10.0, lower=True, at_least=None).passed is None
    assert line(1.0, 1.0, lower=True).times_better("absent") is None
    assert "absent: not installed" in markdown_rows([line(1.0, 2.0, lower=True)])[2]


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str, results: list[float]) -> float:
        order.append(name)
        return results.pop(0)

    a, b = [100.0, 1.0, 3.0, 2.0], [100.0, 5.0, 4.0, 9.0]
    found = alternate({"a": lambda: contender("a", a), "b": lambda: contender("b", b)}, 3)
    assert found == {"a": 2.0, "b": 5.0}
    assert "".join(order) == "baabbaab"


@pytest.mark.parametrize("name", core.LINES)
def test_every_line_of_the_suite_comes_out(name: str, subjects: Subjects) -> None:
    found = PeerResults({"one": {"decode": 7.0, "ttft": 8.0, "ttft_long": 9.0, "batch": 10.0}, "two": None})
    lines = core.LINES[name](subjects, SIZES, found)
    assert lines
    for one in lines:
        assert one.octavo > 0
        assert one.ratio > 0
        assert one.passed is None
        if one.reference == "transformers":
            assert {"one", "two"} <= set(one.others)
    subjects.engine.check()
    assert not subjects.engine.has_work


def test_requirements_hold_only_at_the_lengths_they_speak_of() -> None:
    assert core.QUICK.goal(4.0) is None
    assert core.Sizes().goal(4.0) in (4.0, None)  # None without bf16 instructions


def test_the_attention_pass_reads_what_it_claims(subjects: Subjects) -> None:
    run, nbytes = core.attention_pass(subjects, sequences=3, context=40)
    assert nbytes == 3 * 40 * subjects.engine.layout.bytes_per_token
    with clocks() as found:
        run()
    assert found.calls == subjects.engine.loaded.spec.num_layers
    assert list(found.seconds) == ["attention"]


def test_clocks_are_taken_off_again() -> None:
    plain = [getattr(_native, name) for name in KERNELS]
    with pytest.raises(RuntimeError), clocks():
        raise RuntimeError
    assert [getattr(_native, name) for name in KERNELS] == plain


def test_no_two_prompts_begin_alike(subjects: Subjects) -> None:
    drawn = [subjects.prompts.next(40) for _ in range(12)]
    assert {len(p) for p in drawn} == {40}
    assert len({tuple(p[:8]) for p in drawn}) == 12
    bare = Prompts(Tokenizer(None), 264)
    assert bare.next(10) != bare.next(10)


def test_an_engine_that_is_not_installed_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for module in ("llama_cpp", "openvino_genai"):
        if module in sys.modules or any(Path(p, module).exists() for p in sys.path):
            pytest.skip(f"{module} is installed here")
    job = Job(tmp_path / "model.gguf", 1, 1, 1, [])
    assert run_peers(job, None).by_engine == {"llama.cpp": None, "OpenVINO GenAI": None}


FAKE_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["cache_prompt"] is False and body["ignore_eos"] is True and body["temperature"] == 0
        self.answer({{"timings": {{"predicted_per_second": float(len(body["prompt"]) * body["n_predict"])}}}})

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_llama_server_is_asked_for_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "llama-server"
    program.write_text(FAKE_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(peers, "SCRIPTS", {"llama.cpp": "benchmarks.peers.llama"})
    prompts = {"prompt": [1, 2], "prompt_again": [3, 4, 5], "long_prompt": [1] * 9, "batch": [[1], [2]]}
    figures = run_peers(Job(tmp_path / "model.gguf", 1, 4, 2, [prompts] * 3), tmp_path).by_engine["llama.cpp"]
    assert figures is not None
    assert set(figures) == {"ttft", "ttft_long", "decode", "batch"}
    assert figures["decode"] == 3 * (4 + 1)


def test_an_engine_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "openvino_genai.py").write_text("raise ValueError('broken engine')")
    (tmp_path / "openvino.py").write_text("")
    monkeypatch.setattr(peers, "SCRIPTS", {"OpenVINO GenAI": "benchmarks.peers.openvino"})
    assert run_peers(Job(tmp_path / "model.gguf", 1, 1, 1, []), tmp_path).by_engine == {"OpenVINO GenAI": {}}
    assert "broken engine" in capfd.readouterr().err


def test_the_last_line_is_json(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.measure_limits", lambda: LIMITS)
    arguments = ["core", "--model", str(tiny), "--dtype", "float32", "--quick", "--markdown"]
    result = CliRunner().invoke(app, [*arguments, "--only", "ttft", "--threads", "1"])
    assert result.exit_code == 0, result.output
    rows = result.stdout.splitlines()
    assert rows[0].startswith("| |")
    suites = json.loads(rows[-1])["suites"]
    assert [one["name"] for one in suites["core"]] == ["ttft", "prefill_flops_share"]


def test_the_formats_suite_compares_with_bf16(tiny: Path) -> None:
    lines = formats.measure(str(tiny), "bfloat16", formats.QUICK, lambda text: None)
    kinds = {kind: [line for line in lines if line.name.endswith(kind)] for kind in ("attention", "step")}
    for found in kinds.values():
        assert len(found) == len(formats.FORMATS) - 1
        assert len({line.others["bf16"] for line in found}) == 1
        assert all(line.octavo > 0 and line.at_least is None for line in found)
    coarse, fine = (next(line for line in lines if line.name == f"{f}_read_share") for f in ("int8", "bf16"))
    assert 0 < coarse.octavo < math.inf
    assert 0 < fine.octavo < math.inf


def test_the_cache_suite_compares_with_no_cache(tiny: Path) -> None:
    [found] = run_cache(str(tiny), LIMITS, prompt_tokens=8, new_tokens=4)
    assert list(found.others) == ["no cache", "transformers"]
    assert (found.reference, found.at_least) == ("no cache", 10.0)
    assert found.ratio == pytest.approx(found.times_better("no cache"))


@pytest.mark.skipif(not AZURE_TRACE.exists(), reason=f"there is no {AZURE_TRACE}")
def test_the_waste_suite_passes() -> None:
    [found] = run_waste()
    assert found.passed


def test_an_unknown_line_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.measure_limits", lambda: LIMITS)
    result = CliRunner().invoke(app, ["core", "--model", str(tiny), "--only", "nothing"])
    assert result.exit_code == 2
