"""Which blocks are being computed right now, so that nobody computes them a second time."""

from __future__ import annotations

from octavo.schedule.request import Sequence


class Filling:
    """Digests of the blocks that running sequences are about to fill from tokens known already.

    A sequence whose next block is among them waits until it is published, or until its filler is preempted or
    cancelled, when the first one waiting takes over. A digest that stands for other content costs a wait,
    never an answer.
    """

    def __init__(self) -> None:
        self._fillers: dict[bytes, Sequence] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._fillers

    def start(self, sequence: Sequence) -> None:
        """`sequence` was admitted and fills every hashed block that it did not find."""
        lease = sequence.lease
        sequence.filling = lease.sealed
        for digest in lease.digests[lease.sealed :]:
            self._fillers.setdefault(digest, sequence)

    def sealed(self, sequence: Sequence) -> None:
        """`sequence` has sealed blocks up to `lease.sealed`."""
        self._end(sequence, sequence.lease.sealed)

    def stop(self, sequence: Sequence) -> None:
        """`sequence` fills nothing any more."""
        self._end(sequence, len(sequence.lease.digests))

    def _end(self, sequence: Sequence, until: int) -> None:
        for digest in sequence.lease.digests[sequence.filling : until]:
            if self._fillers.get(digest) is sequence:
                del self._fillers[digest]
        sequence.filling = max(sequence.filling, until)
