"""What a scheduler has done since it began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from octavo.cache.receipt import Receipt


@dataclass(slots=True)
class Totals(Receipt):
    """The sum of all receipts, and what became of the requests.

    `started` counts every request that was handed in, `rejected` those of them that were refused, `finished` those
    that ended by themselves, by reason, `cancelled` those that were aborted; the others run or wait.
    `queried_tokens` are prompt tokens that the cache was asked for, at first admission.
    """

    started: int = 0
    rejected: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    queried_tokens: int = 0
    dropped_positions: int = 0
