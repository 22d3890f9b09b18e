"""Virtual time: arrivals in their order, each to a replica, and replicas that run on between them."""

from __future__ import annotations

import heapq
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from octavo.simulate.measure import Measures
from octavo.simulate.replica import Replica, ReplicaSpec
from octavo.simulate.routing import ROUTINGS, Router
from octavo.simulate.trace import Arrival


@dataclass(frozen=True)
class Look:
    """What is looked at: curves in steps of `width` seconds, and how long blocks live, for which every step is taken by
    itself. So it is with `leaps=False`, with the same outcome."""

    width: float = 1.0
    lifetimes: bool = False
    leaps: bool = True

    def replica(self, spec: ReplicaSpec) -> Replica:
        """A fresh one."""
        return Replica(spec, self.width, leaps=self.leaps, lifetimes=self.lifetimes)


def simulate(
    arrivals: Iterable[Arrival],
    spec: ReplicaSpec,
    *,
    replicas: int = 1,
    routing: str = "round-robin",
    look: Look = Look(),
    processes: int = 1,
) -> Measures:
    """Serve `arrivals`, ordered by time, and count.

    With round-robin routing replicas know nothing of each other: they are simulated one after the other, in up to
    `processes` processes, and only one per process is in memory.
    """
    total = Measures(look.width)
    ordered, routed = list(arrivals), ROUTINGS[routing]
    if routed is None:
        parts = _apart(ordered, spec, replicas, look, processes)
    else:
        fleet = [look.replica(spec) for _ in range(replicas)]
        parts = _together(ordered, fleet, routed(fleet))
    for measures in parts:
        total.merge(measures)
    return total


def _alone(spec: ReplicaSpec, look: Look, arrivals: Sequence[Arrival]) -> Measures:
    replica = look.replica(spec)
    for arrival in arrivals:
        replica.advance(arrival.at)
        replica.add(arrival)
    replica.advance(inf)
    replica.cache.check()
    return replica.measures


def _apart(
    arrivals: list[Arrival], spec: ReplicaSpec, replicas: int, look: Look, processes: int
) -> Iterator[Measures]:
    shares = (arrivals[i::replicas] for i in range(replicas))
    if processes == 1:
        yield from (_alone(spec, look, share) for share in shares)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(partial(_alone, spec, look), shares)


def _together(arrivals: list[Arrival], fleet: list[Replica], route: Router) -> Iterator[Measures]:
    """All replicas stand at the time of an arrival when it is routed."""
    events: list[tuple[float, int]] = []
    listed = [False] * len(fleet)

    def expect(i: int) -> None:
        at = fleet[i].next_at
        if at is not None and not listed[i]:
            listed[i] = True
            heapq.heappush(events, (at, i))

    for arrival in arrivals:
        while events and events[0][0] < arrival.at:
            _, i = heapq.heappop(events)
            listed[i] = False
            fleet[i].advance(arrival.at)
            expect(i)
        chosen = route(arrival)
        fleet[chosen].advance(arrival.at)
        fleet[chosen].add(arrival)
        expect(chosen)
    for replica in fleet:
        replica.advance(inf)
        replica.cache.check()
        yield replica.measures
