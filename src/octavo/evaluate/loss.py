"""What one way of computing logits loses against another, position by position."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SLICE = 64  # rows that are compared at a time, so that what is made on the way stays small


@dataclass
class Losses:
    """Sums over positions, and the divergence at each.

    `nll` is the negative log-likelihood of the tokens that really follow, `kl` the Kullback-Leibler divergence from the
    full-precision distribution, both in nats; `agreed` counts positions where both have the same likeliest token.
    """

    positions: int = 0
    nll: float = 0.0
    agreed: int = 0
    kl: array[float] = field(default_factory=lambda: array("d"))

    def add(self, full: Tensor, found: Tensor, following: Sequence[int]) -> None:
        """Rows of logits `[rows, vocabulary]` in full precision and as `found`, and the tokens that follow each.

        Rows beyond these tokens are left out.
        """
        targets = torch.tensor(following, dtype=torch.long)
        for first in range(0, len(following), _SLICE):
            rows = slice(first, min(first + _SLICE, len(following)))
            truth = full[rows].log_softmax(-1)
            other = truth if found is full else found[rows].log_softmax(-1)
            self.nll -= float(other.gather(1, targets[rows, None]).double().sum())
            # A token that cannot come has no part in the divergence, rather than 0 times infinity.
            apart = torch.where(truth.isneginf(), 0.0, truth - other)
            # As numbers: small tensors kept between the large ones that come and go would tear holes into the heap,
            # and each hole is lost.
            self.kl.extend((truth.exp() * apart).sum(-1).tolist())
            self.agreed += int((truth.argmax(-1) == other.argmax(-1)).sum())
        self.positions += len(following)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        mean = self.nll / self.positions
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def kl_mean(self) -> float:
        """Nats, over all positions."""
        return math.fsum(self.kl) / self.positions

    @property
    def kl_p99(self) -> float:
        """The divergence that 99 % of the positions do not exceed."""
        return sorted(self.kl)[math.ceil(0.99 * self.positions) - 1]

    @property
    def top1_agreement(self) -> float:
        """Share of the positions with the same likeliest token."""
        return self.agreed / self.positions
