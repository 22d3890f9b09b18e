"""Virtual time: arrivals in their order, each to a replica, and replicas that run on between them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from octavo.simulate.measure import Measures
from octavo.simulate.replica import Replica, ReplicaSpec
from octavo.simulate.routing import ROUTINGS
from octavo.simulate.trace import Arrival


def simulate(
    arrivals: Iterable[Arrival],
    spec: ReplicaSpec,
    *,
    replicas: int = 1,
    routing: str = "round-robin",
    width: float = 1.0,
    leaps: bool = True,
    lifetimes: bool = True,
) -> Measures:
    """Serve `arrivals`, ordered by time, and count. `width` is the resolution of curves in seconds."""
    fleet = [Replica(spec, width, leaps=leaps, lifetimes=lifetimes) for _ in range(replicas)]
    if routing == "round-robin":
        _apart(arrivals, fleet)
    else:
        _together(arrivals, fleet, routing)
    total = Measures(width)
    for replica in fleet:
        replica.cache.check()
        total.merge(replica.measures)
    return total


def _apart(arrivals: Iterable[Arrival], fleet: list[Replica]) -> None:
    """Replicas that get their requests in turn know nothing of each other: each runs up to its own next arrival."""
    for number, arrival in enumerate(arrivals):
        replica = fleet[number % len(fleet)]
        replica.advance(arrival.at)
        replica.add(arrival)
    for replica in fleet:
        replica.advance(inf)


def _together(arrivals: Iterable[Arrival], fleet: list[Replica], routing: str) -> None:
    """All replicas stand at the time of an arrival when it is routed."""
    route = ROUTINGS[routing](fleet)
    events: list[tuple[float, int]] = []
    listed = [False] * len(fleet)

    def look(i: int) -> None:
        at = fleet[i].next_at
        if at is not None and not listed[i]:
            listed[i] = True
            heapq.heappush(events, (at, i))

    for arrival in arrivals:
        while events and events[0][0] < arrival.at:
            _, i = heapq.heappop(events)
            listed[i] = False
            fleet[i].advance(arrival.at)
            look(i)
        chosen = route(arrival)
        fleet[chosen].advance(arrival.at)
        fleet[chosen].add(arrival)
        look(chosen)
    for replica in fleet:
        replica.advance(inf)
