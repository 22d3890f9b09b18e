"""Runs steps: from a plan's chunks to the logits that are wanted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.cache.layout import CacheLayout
from octavo.config import Environment
from octavo.model.batch import Piece
from octavo.model.fused import FusedModel, can_fuse
from octavo.model.heap import give_back
from octavo.model.load import LoadedModel
from octavo.model.probe import TILES, Verdict, VerdictStore, probe
from octavo.model.unfused import UnfusedModel

# Tiles all have one shape, so that wider steps of an unfused model would show nothing more.
_PROBED_ROWS = 64


class Runner:
    """A loaded model on one cache.

    `max_rows` is the most rows of a step, `max_len` the longest sequence. `fuse=False` runs through transformers even
    what could be fused. Consumes `loaded.model`. After construction the exactness probe has spoken: see `exact`.
    """

    def __init__(
        self, loaded: LoadedModel, layout: CacheLayout, *, max_rows: int, max_len: int, fuse: bool = True
    ) -> None:
        self.fused = fuse and can_fuse(loaded)
        self._layout = layout
        self._model: FusedModel | UnfusedModel
        if self.fused:
            self._model = FusedModel(loaded, layout, max_rows, max_len)
        else:
            self._model = UnfusedModel(loaded, layout)
        give_back()
        self._verdict = self._judge(loaded, layout, max_rows)
        if isinstance(self._model, UnfusedModel):
            self._model.tile = self._verdict.tile

    def _judge(self, loaded: LoadedModel, layout: CacheLayout, max_rows: int) -> Verdict:
        if not self.fused:
            max_rows = _PROBED_ROWS
        store = VerdictStore(
            Environment.read().home,
            loaded.digest,
            loaded.torch_dtype,
            layout.block_size,
            max_rows,
            self.fused,
        )
        if (known := store.load()) is not None:
            return known
        verdict = Verdict(None, exact=False)
        for tile in TILES if isinstance(self._model, UnfusedModel) else (None,):
            if isinstance(self._model, UnfusedModel):
                self._model.tile = tile
            spec = loaded.spec
            if probe(self._model, layout, spec.vocab_size, max_rows, spec.max_position_embeddings):
                verdict = Verdict(tile, exact=True)
                break
        store.save(verdict)
        return verdict

    @property
    def exact(self) -> bool:
        """Whether the same request gets the same bits whatever the schedule, as probed on this machine."""
        return self._verdict.exact

    @property
    def tile(self) -> int | None:
        """Rows per pass where the model needs a fixed number; None where it does not."""
        return self._verdict.tile

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they are held now."""
        return self._model.weights_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes that steps need besides weights and cache; 0 where transformers takes and frees them by itself."""
        return self._model.scratch_bytes if isinstance(self._model, FusedModel) else 0

    def attach(self, arena: int, layout: CacheLayout | None = None) -> None:
        """Use the cache at address `arena`. Its blocks lie as in `layout` (None: the runner's own), which may differ
        from that in its formats and block size."""
        self._model.attach(arena, layout or self._layout)

    def forward(self, pieces: Sequence[Piece], rows: Sequence[int]) -> Tensor:
        """Compute all `pieces`, writing K and V; returns float32 logits `[len(rows), vocabulary]`.

        `rows` are ascending row numbers of the step, in the order of the pieces.
        """
        return self._model.forward(list(pieces), list(rows))
