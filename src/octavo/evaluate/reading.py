"""A sequence read on a cache of its own, in the chunks and the format that an engine would compute it in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout
from octavo.cache.manager import CacheManager
from octavo.memory import ArenaMemory
from octavo.model.batch import Piece
from octavo.model.runner import Runner


class Reading:
    """One sequence of at most `longest` tokens at a time, in steps of at most `max_rows` rows.

    The formats of `layout` need not be those `runner` was made with, so that several can be read side by side on one
    set of weights. Whoever used `runner` before has to attach its own cache again.
    """

    def __init__(self, runner: Runner, layout: CacheLayout, longest: int, max_rows: int) -> None:
        self.layout = layout
        self._runner = runner
        self._max_rows = max_rows
        each = sum(layout.block_sizes_bytes) + sum(layout.sealed_sizes_bytes)
        nbytes = layout.num_blocks(longest) * each
        self._memory = ArenaMemory(nbytes, layout)
        self._cache = CacheManager(layout, nbytes, enable_prefix_caching=False, memory=self._memory)
        self._lease = self._cache.lease(Namespace())
        self.token_ids: list[int] = []

    def begin(self) -> None:
        """Forget the sequence read so far."""
        self._cache.release(self._lease)
        self._lease = self._cache.lease(Namespace())
        self.token_ids = []

    def rewind(self, length: int) -> None:
        """Be where the first `length` tokens had been read, by reading them again."""
        token_ids = self.token_ids[:length]
        self.begin()
        for _ in self.read(token_ids, length):
            pass

    def read(self, token_ids: Sequence[int], first: int = 0) -> Iterator[Tensor]:
        """Go on with `token_ids`. Yields, chunk by chunk, the float32 logits `[rows, vocabulary]` of those from number
        `first` on."""
        for at in range(0, len(token_ids), self._max_rows):
            chunk = list(token_ids[at : at + self._max_rows])
            wanted = range(min(max(0, first - at), len(chunk)), len(chunk))
            if len(wanted):
                yield self._step(chunk, wanted)  # and not kept here: they are large
            else:
                self._step(chunk, wanted)

    def _step(self, chunk: list[int], wanted: range) -> Tensor:
        start = len(self.token_ids)
        self.token_ids += chunk
        stop = len(self.token_ids)
        if not self._cache.extend(self._lease, stop):
            raise ValueError(f"{stop} tokens are more than this cache was made for")
        self._runner.attach(self._memory.address, self.layout)
        logits = self._runner.forward([Piece.of(self._lease, chunk, start, self.layout)], wanted)
        self._cache.commit(self._lease, self.token_ids, stop)
        return logits

    def last(self, token_ids: Sequence[int]) -> Tensor:
        """Go on with `token_ids`; returns the logits `[vocabulary]` of the last."""
        [logits] = self.read(token_ids, len(token_ids) - 1)
        return logits[0]
