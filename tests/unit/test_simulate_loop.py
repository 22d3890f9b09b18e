"""Virtual time: leaps are single steps, replicas are served as routed, and the cache alone finds what is known."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.plan.report import make_plan
from octavo.simulate.cache_only import cache_only
from octavo.simulate.cost import RooflineCost, StepWork, UnitCost, work_of
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


@pytest.mark.parametrize("rate", [1.0, 40.0])
def test_leaps_are_single_steps_where_steps_spread(rate: float) -> None:
    arrivals = list(Synthetic(60, rate, prompt=700, prefixes=20, shared=256, seed=3).arrivals())
    spread = replace(UnitCost((None,)), spread=(0.5, 0.9, 1.6))
    of = replace(spec(400), cost=spread)
    leaping, stepping = (simulate(arrivals, of, look=Look(leaps=leaps)) for leaps in (True, False))
    assert outcome(leaping) == outcome(stepping)
    times = {round(stepping.itl.percentile(share) or 0.0, 1) for share in (0.1, 0.5, 0.9)}
    assert times == {0.5, 0.9, 1.6}
    assert stepping.itl.mean == pytest.approx(1.0, rel=0.05)  # steps count as often as they have rows


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
    assert prefix.reused_tokens > 1.3 * turns.reused_tokens
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


def left_to_do(replica: Replica, arrivals: dict[str, Arrival]) -> int:
    """Tokens that are neither computed nor found, counted from nothing but what the scheduler has."""
    left = 0
    for name, request in replica.scheduler.requests.items():
        arrival = arrivals[name]
        left += (arrival.n - len(request.sequences)) * arrival.output
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                left += arrival.prompt + arrival.output - sequence.num_computed
    return left


@pytest.mark.parametrize(("blocks", "seqs"), [(60, 64), (400, 64), (4000, 3)])
@pytest.mark.parametrize("leaps", [True, False])
def test_the_load_is_what_is_left_to_compute(blocks: int, seqs: int, leaps: bool) -> None:
    made = Synthetic(40, 8.0, prompt=300, output=60, prefixes=3, shared=256, seed=3)
    arrivals = {str(a.index): replace(a, n=1 + a.index % 4) for a in made.arrivals()}
    replica = Replica(spec(blocks, max_num_seqs=seqs), 1.0, leaps=leaps)
    for arrival in arrivals.values():
        replica.advance(arrival.at)
        replica.add(arrival)
        if replica._plan is None:  # between steps; what is found in the next one is found when it begins
            assert replica.load == left_to_do(replica, arrivals)
    replica.advance(float("inf"))
    assert replica.measures.reused_tokens > 0
    assert (replica.measures.preemptions > 0) is (blocks == 60)
    assert (replica.load, replica.outstanding) == (0, 0)


def test_what_was_found_is_no_load() -> None:
    layout = CacheLayout(FULL, 4, "bf16")
    replica = Replica(ReplicaSpec(layout, 100 * layout.block_bytes(0), UnitCost((None,))), 1.0)
    replica.add(Arrival(0, 0.0, 40, 1, 4, tuple(range(10))))
    replica.advance(5.0)
    replica.add(Arrival(1, 5.0, 40, 100, 4, tuple(range(10))))
    replica.advance(5.5)
    assert replica.load == 4 + 100  # the last block of a prompt is computed


def test_a_prompt_of_any_length_is_rejected_before_it_is_made() -> None:
    layout = CacheLayout(FULL, 4, "bf16")
    of = ReplicaSpec(layout, 100 * layout.block_bytes(0), UnitCost((None,)))
    found = simulate([Arrival(0, 0.0, 10**15, 1), Arrival(1, 0.0, 10, 1)], of)
    assert (found.rejected, found.finished) == (1, 1)


@pytest.mark.parametrize("count", [400, 3_000, 50_000])
def test_curves_grow_coarser_not_longer(count: int) -> None:
    whole, halves = Curve(0.5), (Curve(0.5), Curve(0.5))
    for at in range(count):
        for curve in (whole, halves[at * 2 >= count]):
            curve.add(at / 2, float(at))
    assert len(whole.points()) <= 500
    assert whole.points()[0] == (0.0, (whole.width / 0.5 - 1) / 2)
    for order in (halves, halves[::-1]):
        merged = Curve(0.5)
        for curve in order:
            merged.merge(curve)
        assert merged.points() == whole.points()


def test_curves_are_means_of_equal_times() -> None:
    curve, other = Curve(2.0), Curve(2.0)
    curve.add(0.5, 1.0)
    curve.add(1.5, 3.0)
    other.add(4.1, 5.0)
    other.add(0.1, 2.0)
    curve.merge(other)
    assert curve.points() == [(0.0, 2.0), (4.0, 5.0)]
