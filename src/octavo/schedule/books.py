"""What happens to requests, entered wherever it counts: in the receipt of the one, in the totals, in the event log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from octavo.cache.events import Event
from octavo.cache.manager import CacheManager
from octavo.cache.receipt import Miss
from octavo.schedule.request import Request, Sequence
from octavo.schedule.totals import Totals


class Books:
    """The accounts of one scheduler. Every entry that a receipt gets is made in `totals` too, so that they stay the
    sum of all receipts."""

    def __init__(self, cache: CacheManager) -> None:
        self.totals = Totals()
        self._cache = cache

    def handed_in(self, count: int = 1) -> None:
        """So many requests came, whether they are let in or not."""
        self.totals.started += count

    def refused(self, count: int = 1) -> None:
        """So many of those that came are not let in."""
        self.totals.rejected += count

    def added(self, request: Request) -> None:
        """`request` is let in and waits."""
        self.totals.prompt_tokens += len(request.prompt_token_ids)

    def started(self, sequence: Sequence, reused: int, miss: Miss) -> None:
        """`sequence` runs from position `reused` on: those before were found, and `miss` says why no more."""
        request, receipt, cache = sequence.request, sequence.request.receipt, self._cache
        accounts, tokens = (receipt, self.totals), len(sequence.token_ids)
        receipt.exact &= sequence.lease.pedigree
        self.totals.compressed_tokens += receipt.compress(cache.folded_positions(sequence.lease).total())
        if receipt.miss is None:
            assert request.admitted_at is not None
            receipt.miss = miss
            queued_ms = 1000 * (request.admitted_at - request.arrived_at)
            for account in accounts:
                account.admit(reused, tokens - reused, queued_ms)
            self.totals.queried_tokens += tokens if sequence.lease.reuse else 0
        if sequence.preempted:
            sequence.preempted = False
            self._log("resumed", "room", sequence)
        if (known := sequence.ever_computed) < reused:
            # Where it resumes, others may have computed meanwhile what it had not.
            folded = cache.folded_positions(sequence.lease, cache.layout.num_blocks(known))
            formats = Counter(self._written(known, reused))
            formats[cache.layout.format] -= folded.total()
            formats.update(folded)
            for account in accounts:
                account.write(formats)
            sequence.ever_computed = reused

    def computed(self, sequence: Sequence, start: int, stop: int, blocks: int, tokens: int) -> None:
        """A step computed positions `start .. stop - 1` of `sequence`, sealed `blocks` and sampled `tokens`."""
        receipt = sequence.request.receipt
        fresh = max(0, stop - max(start, sequence.ever_computed))
        sequence.ever_computed = max(sequence.ever_computed, stop)
        formats = self._written(stop - fresh, stop)
        for account in (receipt, self.totals):
            account.step(stop - start - fresh, blocks, tokens)
            account.write(formats)
        drops = sequence.lease.drops
        if drops is not None and (dropped := drops.dropped(stop - 1)):
            self.totals.dropped_positions += receipt.drop(drops.sinks, drops.sinks + dropped - 1)

    def preempted(self, sequence: Sequence, reason: str) -> None:
        """The blocks of `sequence` were taken."""
        sequence.preempted = True
        for account in (sequence.request.receipt, self.totals):
            account.preemptions += 1
        self._log("preempted", reason, sequence)

    def ended(self, request: Request) -> None:
        """All choices of `request` have ended."""
        reason = request.finish_reason
        assert reason is not None
        if reason == "abort":
            self.totals.cancelled += 1
        else:
            self.totals.finished[reason] += 1

    def _written(self, start: int, stop: int) -> Mapping[str, int]:
        """Positions by format once `start .. stop - 1` are there too, less what they were before."""
        layout = self._cache.layout
        if not layout.is_stored:
            return {layout.format: stop - start}
        formats = layout.formats_of(stop)
        formats.subtract(layout.formats_of(start))
        return formats

    def _log(self, kind: str, reason: str, sequence: Sequence) -> None:
        cache, name = self._cache, sequence.request.request_id
        tokens, owner = len(sequence.token_ids), sequence.lease.owner
        cache.pool.log.add(
            Event(cache.clock(), kind, reason, name, sequence.index, tokens=tokens, owner=owner)
        )
