"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.cache.hashing import Hasher, Namespace, pack
from octavo.simulate.replica import Replica
from octavo.simulate.trace import Arrival

Router = Callable[[Arrival], int]


def least_loaded(replicas: Sequence[Replica]) -> Router:
    """The one with the fewest tokens to compute."""
    return lambda arrival: min(range(len(replicas)), key=lambda i: replicas[i].load)


def prefix(replicas: Sequence[Replica]) -> Router:
    """The one that would have computed the prompt first: what waits there, and what it does not have of this prompt.

    Only replicas that were sent a prompt with the same first block can have any of it; beside them the least loaded
    one is asked.
    """
    size = replicas[0].cache.layout.block_size
    hasher = Hasher()
    root = hasher.root(Namespace())
    sent: dict[bytes, set[int]] = {}

    def route(arrival: Arrival) -> int:
        tokens, digest, digests = pack(arrival.prompt_tokens()), root, []
        for start in range(0, (arrival.prompt - 1) // size * size * 4, size * 4):
            digest = hasher.chain(digest, tokens[start : start + size * 4])
            digests.append(digest)
        known = sent.setdefault(digests[0], set()) if digests else set()
        idlest = min(range(len(replicas)), key=lambda i: replicas[i].load)

        def to_first_token(i: int) -> tuple[int, int]:
            nodes = replicas[i].cache.index.nodes
            depth = next((d for d, name in enumerate(digests) if name not in nodes), len(digests))
            return replicas[i].load - depth * size, i

        chosen = min(known | {idlest}, key=to_first_token)
        known.add(chosen)
        return chosen

    return route


# None: in turn, which asks nothing of the replicas.
ROUTINGS: dict[str, Callable[[Sequence[Replica]], Router] | None] = {
    "round-robin": None,
    "least-loaded": least_loaded,
    "prefix": prefix,
}
