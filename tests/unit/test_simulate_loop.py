"""Virtual time: leaps are single steps, replicas are served as routed, and the cache alone finds what is known."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.plan.machine import Machine
from octavo.plan.report import make_plan
from octavo.simulate import fitted
from octavo.simulate.cache_only import cache_only
from octavo.simulate.cost import RooflineCost, StepWork, UnitCost, work_of
from octavo.simulate.fitted import FittedCost, Measured
from octavo.simulate.loop import Look, simulate
from octavo.simulate.measure import Curve, Distribution, Measures
from octavo.simulate.replica import Replica, ReplicaSpec
from octavo.simulate.report import load
from octavo.simulate.synthetic import Synthetic
from octavo.simulate.trace import Arrival, read_trace
from support.sizes import DATA, sized

CONVERSATION = DATA / "traces" / "mooncake" / "conversation_trace.jsonl"
SYNTHETIC = DATA / "traces" / "mooncake" / "synthetic_trace.jsonl"
needs_traces = pytest.mark.skipif(not CONVERSATION.exists(), reason=f"no traces at {DATA}; set OCTAVO_DATA")
FULL = (LayerGroup((0,), 1, 4),)


def spec(blocks: int = 400, format: str = "bf16", **options: Any) -> ReplicaSpec:
    """Llama-3.1-8B's times on an H100, over a cache of `blocks` blocks."""
    case = make_plan("llama-3.1-8b", "H100-80GB", context="2k", kv_cache_dtype=format).first
    layout = case.layout
    return ReplicaSpec(layout, blocks * sum(layout.block_sizes_bytes), RooflineCost(case.roofline), **options)


def outcome(measures: Measures) -> dict[str, Any]:
    """All that was counted, but for how often the cache was looked at."""
    found = asdict(measures)
    for name in ("running", "cached", "queue"):
        del found[name]
    for name in ("ttft", "itl", "waiting", "lifetime"):
        found[name]["total"] = pytest.approx(found[name]["total"], rel=1e-9)
    return found


@pytest.mark.parametrize(("blocks", "format"), [(250, "bf16"), (400, "bf16"), (4000, "bf16"), (110, "int8")])
@pytest.mark.parametrize("rate", [1.0, 8.0, 40.0])
@pytest.mark.parametrize("seqs", [4, 64])
def test_leaps_are_single_steps(blocks: int, format: str, rate: float, seqs: int) -> None:
    arrivals = list(Synthetic(sized(60, 500), rate, prompt=700, prefixes=20, shared=256, seed=3).arrivals())
    of = spec(blocks, format, max_num_seqs=seqs)
    leaping, stepping = (simulate(arrivals, of, look=Look(leaps=leaps)) for leaps in (True, False))
    assert outcome(leaping) == outcome(stepping)
    assert stepping.finished + stepping.rejected == len(arrivals)
    assert stepping.output_tokens > 0


@pytest.mark.parametrize(("blocks", "seqs"), [(60, 64), (400, 64), (4000, 3)])
def test_leaps_are_single_steps_where_requests_have_several_answers(blocks: int, seqs: int) -> None:
    made = Synthetic(sized(40, 200), 8.0, prompt=300, output=60, prefixes=20, shared=256, seed=3)
    arrivals = [replace(a, n=1 + a.index % 4) for a in made.arrivals()]
    of = spec(blocks, max_num_seqs=seqs)
    leaping, stepping = (simulate(arrivals, of, look=Look(leaps=leaps)) for leaps in (True, False))
    assert outcome(leaping) == outcome(stepping)
    assert stepping.finished == stepping.ttft.count == len(arrivals)
    assert stepping.output_tokens == sum(a.n * a.output for a in arrivals)
    assert stepping.itl.count == stepping.output_tokens - sum(a.n for a in arrivals)
    assert (stepping.preemptions > 0) is (blocks == 60)


def test_several_answers_are_decoded_side_by_side_on_one_prompt() -> None:
    """4 answers of 10 tokens take the steps of one; with 3 at a time the last one comes after them."""
    layout = CacheLayout(FULL, 4, "bf16")
    of = ReplicaSpec(layout, 100 * layout.block_bytes(0), UnitCost((None,)))
    found = simulate([Arrival(0, 0.0, 24, 10, n=4)], of, look=Look(leaps=False))
    assert (found.steps, found.output_tokens, found.finished) == (10, 40, 1)
    assert (found.ttft.count, found.itl.count, found.itl.mean) == (1, 36, 1.0)
    three_at_a_time = replace(of, max_num_seqs=3)
    assert simulate([Arrival(0, 0.0, 24, 10, n=4)], three_at_a_time).ended_at == 19.0


@pytest.mark.parametrize("blocks", [250, 4000])
@pytest.mark.parametrize("rows", [4, 8])
def test_leaps_are_single_steps_where_decoding_uses_all_tokens_of_a_step(blocks: int, rows: int) -> None:
    """Nobody of the backlog is admitted then, although more may run and there is room."""
    made = Synthetic(40, 40.0, prompt=300, output=60, prefixes=20, shared=256, seed=3)
    arrivals = list(made.arrivals())
    of = spec(blocks, max_num_batched_tokens=rows)
    leaping, stepping = (simulate(arrivals, of, look=Look(leaps=leaps)) for leaps in (True, False))
    assert outcome(leaping) == outcome(stepping)
    assert stepping.finished == len(arrivals)


def test_what_a_preemption_leaves_free_is_taken_in_the_next_step() -> None:
    """A short, important request comes at every moment, that of the preemption too, when nobody is admitted."""
    layout = CacheLayout(FULL, 4, "bf16")
    of = ReplicaSpec(layout, 20 * layout.block_bytes(0), UnitCost((None,)))
    for moment in range(40):
        arrivals = [
            Arrival(0, 0.0, 24, 50),
            Arrival(1, 0.0, 24, 50),
            Arrival(2, moment + 0.5, 2, 20, priority=-1),
        ]
        leaping, stepping = (simulate(arrivals, of, look=Look(leaps=leaps)) for leaps in (True, False))
        assert stepping.preemptions > 0
        assert outcome(leaping) == outcome(stepping)


def test_some_of_these_are_preempted_and_some_share() -> None:
    arrivals = list(Synthetic(60, 40.0, prompt=700, output=300, prefixes=20, shared=256, seed=3).arrivals())
    found = simulate(arrivals, spec(400))
    assert found.preemptions > 0
    assert found.recomputed_tokens > 0
    assert found.reused_tokens > 0
    assert found == simulate(arrivals, spec(400))


def test_most_steps_are_leapt_over() -> None:
    arrivals = list(Synthetic(20, 0.5).arrivals())
    planned = 0

    def count(leaps: bool) -> tuple[int, int]:
        nonlocal planned
        planned = 0
        replica = Replica(spec(4000), 1.0, leaps=leaps)
        plan = replica.scheduler.plan

        def counting() -> Any:
            nonlocal planned
            planned += 1
            return plan()

        replica.scheduler.plan = counting  # type: ignore[method-assign]
        for arrival in arrivals:
            replica.advance(arrival.at)
            replica.add(arrival)
        replica.advance(float("inf"))
        return planned, replica.measures.steps

    (fast, steps), (slow, same) = count(True), count(False)
    assert steps == same == slow
    assert fast < slow / 10


def test_windows_take_every_step() -> None:
    layout = CacheLayout((LayerGroup((0,), 1, 4, window=32),), 16, "bf16")
    of = ReplicaSpec(layout, 100 * layout.block_bytes(0), UnitCost((32,)))
    arrivals = [Arrival(i, 3.0 * i, 40, 50) for i in range(5)]
    found = simulate(arrivals, of)
    assert (found.finished, found.output_tokens) == (5, 250)
    assert outcome(found) == outcome(simulate(arrivals, of, look=Look(leaps=False)))


def test_steps_of_one_second_are_counted_by_hand() -> None:
    """A prompt of 20 tokens at 8 per step takes 3 steps; the second request comes in the first one's last."""
    layout = CacheLayout(FULL, 4, "bf16")
    of = ReplicaSpec(layout, 100 * layout.block_bytes(0), UnitCost((None,)), max_num_batched_tokens=8)
    found = simulate([Arrival(0, 0.0, 20, 3), Arrival(1, 2.5, 4, 1)], of)
    assert (found.ttft.count, found.ttft.total) == (2, 3.0 + 1.5)
    assert (found.itl.count, found.itl.mean) == (2, 1.0)
    assert (found.steps, found.ended_at, found.output_tokens) == (5, 5.0, 4)
    assert (found.waiting.total, found.waiting.count) == (0.5, 2)


def test_requests_of_one_moment_are_planned_together() -> None:
    layout = CacheLayout(FULL, 4, "bf16")
    of = ReplicaSpec(layout, 100 * layout.block_bytes(0), UnitCost((None,)))
    found = simulate([Arrival(i, 7.0, 10, 1) for i in range(5)], of)
    assert (found.steps, found.ttft.most, found.ended_at) == (1, 1.0, 8.0)


def test_a_request_that_can_never_run_is_rejected_and_a_long_answer_ends_at_the_limit() -> None:
    layout = CacheLayout(FULL, 4, "bf16")
    of = ReplicaSpec(layout, 10 * layout.block_bytes(0), UnitCost((None,)))
    found = simulate([Arrival(0, 0.0, 40, 1), Arrival(1, 0.0, 30, 100)], of)
    assert (found.rejected, found.finished, found.output_tokens) == (1, 1, 10)


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix"])
def test_every_request_is_served_however_it_is_routed(routing: str) -> None:
    arrivals = list(Synthetic(80, 30.0, prefixes=6, shared=256, seed=1).arrivals())
    found = simulate(arrivals, spec(600), replicas=4, routing=routing)
    assert (found.finished, found.rejected) == (80, 0)
    assert found.output_tokens == sum(a.output for a in arrivals)
    assert found.prompt_tokens == sum(a.prompt for a in arrivals)
    assert found.ttft.count == found.waiting.count == 80
    assert found.itl.count == found.output_tokens - 80


def test_load_is_what_is_left_to_compute() -> None:
    replica = Replica(spec(400), 1.0)
    made = Synthetic(50, 20.0, prompt=600, output=200, prefixes=5, shared=256, seed=2)
    for arrival in (replace(a, n=1 + a.index % 2) for a in made.arrivals()):
        replica.advance(arrival.at)
        replica.add(arrival)
        assert replica.load >= replica.outstanding
    replica.advance(float("inf"))
    assert (replica.load, replica.outstanding) == (0, 0)
    assert replica.measures.preemptions > 0


def test_processes_change_nothing() -> None:
    arrivals = list(Synthetic(40, 30.0, prefixes=6, shared=256).arrivals())
    alone, two = (simulate(arrivals, spec(600), replicas=3, processes=n) for n in (1, 2))
    assert alone == two


@needs_traces
def test_prefix_routing_beats_round_robin_in_hits_and_time_to_the_first_token() -> None:
    """On the Mooncake conversation trace over 8 replicas; the whole of it is in docs/simulate.md."""
    arrivals = load(CONVERSATION, requests=sized(250, 4000))
    case = make_plan("llama-3.1-8b", "H100-80GB", context="32k", block_size=256).first
    of = ReplicaSpec(case.layout, case.cache_bytes, RooflineCost(case.roofline), max_num_batched_tokens=2048)
    turns, prefix = (
        simulate(arrivals, of, replicas=8, routing=routing) for routing in ("round-robin", "prefix")
    )
    assert prefix.prompt_tokens == turns.prompt_tokens
    assert prefix.reused_tokens > 1.5 * turns.reused_tokens
    assert prefix.ttft.mean is not None
    assert turns.ttft.mean is not None
    assert prefix.ttft.mean < turns.ttft.mean


@needs_traces
@pytest.mark.parametrize(
    ("trace", "capacity", "percent"),
    [
        *((SYNTHETIC, c, p) for c, p in sized([("30000", 62.7)], [("1k", 8.5), ("5k", 28.4), ("10k", 43.5)])),
        *((SYNTHETIC, c, p) for c, p in sized([], [("30k", 62.7), ("unlimited", 63.8)])),
        *(
            (CONVERSATION, c, p)
            for c, p in sized(
                [], [("1k", 4.5), ("5k", 11.9), ("10k", 21.5), ("30k", 33.1), ("unlimited", 36.6)]
            )
        ),
    ],
)
def test_hit_rates_of_the_mooncake_traces(
    trace: Path, capacity: str, percent: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source: the README of the traces, plain LRU over sealed blocks of 512 tokens."""
    assert main(["simulate", str(trace), "--cache-only", "--capacity", capacity, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == (3_993 if trace == SYNTHETIC else 12_031)
    assert 100 * found["hit_rate"] == pytest.approx(percent, abs=0.06)


@needs_traces
def test_with_room_for_all_the_cache_alone_finds_every_known_prefix() -> None:
    arrivals = read_trace(CONVERSATION)[:500]
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for arrival in arrivals:
        prefixes = [arrival.ids[: i + 1] for i in range(arrival.full)]
        reusable = prefixes[: len(arrival.ids) - 1]
        hits += next((i for i, prefix in enumerate(reusable) if prefix not in seen), len(reusable))
        seen.update(prefixes)
    assert cache_only(arrivals, None).hits == hits > 0


def test_the_cache_alone_needs_prefixes_and_room() -> None:
    with pytest.raises(ConfigError, match="nothing of shared prefixes"):
        cache_only([Arrival(0, 0.0, 5, 5)], None)
    with pytest.raises(ConfigError, match="longest request, which has 3"):
        cache_only([Arrival(0, 0.0, 20, 5, 8, (1, 2, 3))], 2)


def test_work_of_a_plan_counts_windows() -> None:
    class Part:
        def __init__(self, start: int, stop: int, sample: bool) -> None:
            self.start, self.stop, self.sample = start, stop, sample

    chunks: Any = [Part(0, 10, False), Part(99, 100, True)]
    assert work_of(chunks, (None, 4)) == StepWork(2, 11, 1, (110, 14), (100, 4), (55, 34))


def test_distributions_are_exact_in_the_mean_and_close_in_the_tail() -> None:
    values = [0.001 * (i + 1) for i in range(1000)]
    parts = [Distribution(), Distribution()]
    for i, value in enumerate(values):
        parts[i % 2].add(value, 1 + i % 2)
    parts[0].merge(parts[1])
    everything = sorted(value for i, value in enumerate(values) for _ in range(1 + i % 2))
    assert parts[0].mean == pytest.approx(sum(everything) / len(everything))
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = everything[max(0, int(share * len(everything)) - 1)]
        assert parts[0].percentile(share) == pytest.approx(exact, rel=0.004)
    assert Distribution().to_dict() == {"mean": None, "p50": None, "p95": None, "p99": None}
    zero = Distribution()
    zero.add(0.0)
    assert zero.percentile(0.5) == 0.0


def test_curves_are_means_of_equal_times() -> None:
    curve, other = Curve(2.0), Curve(2.0)
    curve.add(0.5, 1.0)
    curve.add(1.5, 3.0)
    other.add(4.1, 5.0)
    other.add(0.1, 2.0)
    curve.merge(other)
    assert curve.points() == [(0.0, 2.0), (4.0, 5.0)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {
            "timestamp": 300 * a.index,
            "input_length": a.prompt,
            "output_length": a.output,
            "hash_ids": [a.index % 5, *range(10 + 9 * a.index, 10 + 9 * a.index + a.prompt // 128 - 1)],
            "block_size": 128,
        }
        for a in Synthetic(40, 3.0, prompt=400, output=30, shared=128).arrivals()
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_json_holds_the_contract(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-3.1-8b", "--hardware", "H100", "--capacity", "300"]
    assert main(["simulate", str(trace), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 40
    assert 0 < found["hit_rate"] < 1
    for name in ("ttft_s", "itl_s", "waiting_s"):
        assert set(found[name]) == {"mean", "p50", "p95", "p99"}
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p95"] <= found["ttft_s"]["p99"]
    assert found["output_tokens_per_s"] == found["output_tokens"] / found["duration_s"]
    assert found["preemptions"] == 0
    assert found["capacity_blocks"] == 300
    assert found["block_lifetime_s"]["mean"] > 0
    assert all(0 <= share <= 1 for _, share in found["occupancy"]["running"])
    assert "rows" not in found


def test_the_context_of_the_model_bounds_prompts_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """smollm2 has 8,192 positions."""
    file = tmp_path / "long.csv"
    lengths = [(8192, 1), (8191, 5), (8190, 5), (100, 9000)]
    lines = [f"2023-11-16 18:15:46.0,{prompt},{output}" for prompt, output in lengths]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    arguments = ["--model", "smollm2", "--hardware", "cpu", "--capacity", "10k", "--no-lifetimes", "--json"]
    assert main(["simulate", str(file), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rejected"], found["requests"]) == (1, 3)
    assert found["output_tokens"] == 1 + 2 + 8092


def test_sweeps_have_a_row_each_and_are_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.png"
    arguments = [
        "--model",
        "smollm2",
        "--hardware",
        "cpu",
        "--capacity",
        "100,1k",
        "--cache-policy",
        "lru,cost",
    ]
    arguments += ["--replicas", "1,2", "--routing", "round-robin,prefix", "--requests", "15", "--speed", "2"]
    assert main(["simulate", str(trace), *arguments, "--json", "--plot", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 16
    settings = {(r["capacity_blocks"], r["cache_policy"], r["replicas"], r["routing"]) for r in found["rows"]}
    assert len(settings) == 16
    assert all(row["requests"] == 15 for row in found["rows"])
    assert file.stat().st_size > 10_000


def test_people_read_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--cache-only", "--capacity", "100,unlimited"]) == 0
    assert "unlimited" in capsys.readouterr().out
    arguments = [
        "--model",
        "smollm2",
        "--hardware",
        "cpu",
        "--routing",
        "round-robin,prefix",
        "--replicas",
        "2",
    ]
    assert main(["simulate", str(trace), *arguments]) == 0
    text = capsys.readouterr().out
    for words in ("round-robin", "prefix", "40 requests", "roofline"):
        assert words in text


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of smollm2 in bf16 take a second, on as many threads as there are processors."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    kept = Machine("a CPU", 1, 20e9, 400e9, 190e9, 350 << 20)
    monkeypatch.setattr("octavo.plan.hardware.this_machine", lambda environment, notice: kept)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    cost = FittedCost((None,), (1.0,), (1, 2), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0)
    fitted.save(cost, tmp_path / "home", Measured("smollm2-135m", "bf16", 3))


@pytest.mark.usefixtures("calibrated")
def test_a_calibration_is_for_its_compute_type_threads_and_no_smaller_format(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*options: str) -> list[tuple[str, bool]]:
        """Where the times of each row are from, and whether they are those of the calibration."""
        arguments = ["--model", "smollm2", "--capacity", "300", "--requests", "3", *options]
        assert main(["simulate", str(trace), *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return [(row["cost"], row["itl_s"]["mean"] >= 1) for row in found.get("rows", [found])]

    here, not_here = ("calibration", True), ("roofline", False)
    assert rows("--hardware", "this", "--kv-cache-dtype", "bf16,int8,f32") == [here, not_here, not_here]
    assert rows("--hardware", "this", "--weights", "f32") == [not_here]
    assert rows("--hardware", "this", "--weights", "int4", "--kv-cache-dtype", "int4") == [not_here]
    assert rows("--hardware", "this", "--num-threads", "3") == [here]
    assert rows("--hardware", "cpu") == [not_here]
    for options in (["--num-threads", "2"], ["--num-threads", "3", "--hardware", "cpu"]):
        assert main(["simulate", str(trace), "--model", "smollm2", *options, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["error"]["param"] == "num_threads"


@pytest.mark.usefixtures("calibrated")
def test_people_read_which_times_are_calibrated(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "smollm2", "--capacity", "300", "--requests", "2", "--kv-cache-dtype"]
    assert main(["simulate", str(trace), *arguments, "bf16"]) == 0
    assert "step times from calibration" in capsys.readouterr().out
    assert main(["simulate", str(trace), *arguments, "bf16,int8"]) == 0
    text = capsys.readouterr().out
    assert "step times as said below" in text
    assert "cali" in text  # narrow tables wrap
    assert "roof" in text


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ([], "model"),
        (["--model", "nope"], "model"),
        (["--model", "smollm2", "--hardware", "2xH100"], "hardware"),
        (["--model", "llama-3-70b", "--hardware", "H100"], "hardware"),
        (["--model", "smollm2", "--hardware", "cpu", "--kv-cache-dtype", "int3"], "kv_cache_dtype"),
        (["--model", "smollm2", "--hardware", "cpu", "--capacity", "some"], "capacity"),
        (["--model", "smollm2", "--hardware", "cpu", "--replicas", "0"], "replicas"),
        (["--model", "smollm2", "--hardware", "cpu", "--routing", "best"], "routing"),
        (["--model", "smollm2", "--hardware", "cpu", "--cache-policy", "fifo"], "cache_policy"),
        (["--model", "smollm2", "--hardware", "cpu", "--max-num-seqs", "0"], "max_num_seqs"),
        (["--model", "smollm2", "--hardware", "cpu", "--processes", "0"], "processes"),
        (["--model", "smollm2", "--hardware", "cpu", "--processes", "2", "--routing", "prefix"], "processes"),
        (["--model", "smollm2", "--hardware", "cpu", "--num-threads", "0"], "num_threads"),
        (["--requests", "0", "--cache-only"], "requests"),
        (["--speed", "-1", "--cache-only"], "speed"),
        (["--speed", "nan", "--cache-only"], "speed"),
        (["--cache-only", "--capacity", "1"], "capacity"),
        (["--cache-only", "--plot", "x.png"], "plot"),
    ],
)
def test_bad_input_is_named(
    trace: Path, arguments: list[str], param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), *arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_a_trace_comes_faster_or_in_part(trace: Path) -> None:
    whole, fast, part = load(trace), load(trace, speed=3.0), load(trace, requests=7)
    assert [a.at for a in fast] == pytest.approx([a.at / 3 for a in whole])
    assert part == whole[:7]
    assert replace(fast[3], at=whole[3].at) == whole[3]
