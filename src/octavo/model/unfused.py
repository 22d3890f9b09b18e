"""Any causal LM of transformers, run as it is, with attention over Octavo's cache."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from octavo.cache.layout import CacheLayout
from octavo.kernels.native import LayerCache
from octavo.model import attention
from octavo.model.batch import Piece, make_batch
from octavo.model.load import LoadedModel
from octavo.model.spec import LayerSpec


class UnfusedModel:
    """Runs `loaded` through transformers' own forward.

    Its operations may give a row other bits in other company. With `tile` set, rows are computed that many at a
    time, the last tile padded, so that every operation always sees one shape; a tile of 1 leaves no company at all.
    """

    tile: int | None = None

    def __init__(self, loaded: LoadedModel, layout: CacheLayout) -> None:
        self._model = loaded.model
        self._dtype = loaded.torch_dtype
        self._layout = layout
        self._spec = loaded.spec
        self._vocab_size = loaded.model.get_output_embeddings().weight.shape[0]
        self._sparse_head = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._caches: tuple[tuple[int, LayerCache, LayerSpec], ...] = ()

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.nbytes for p in self._model.parameters())

    def attach(self, arena: int, layout: CacheLayout) -> None:
        """Read and write the cache at address `arena` from now on, whose blocks lie as in `layout`."""
        self._layout = layout
        caches = []
        for i, part in enumerate(self._spec.layers):
            g = next(g for g, group in enumerate(layout.groups) if i in group.layers)
            heads = self._spec.num_attention_heads
            cache = LayerCache(
                arena, layout.layer_offset(g, i), layout.block_size, part.num_kv_heads, part.head_dim, heads
            )
            caches.append((g, cache, part))
        self._caches = tuple(caches)

    def forward(self, pieces: list[Piece], rows: list[int]) -> Tensor:
        """Compute `pieces` and return the float32 logits `[len(rows), vocabulary]` of the given rows."""
        wanted = set(rows)
        logits: list[Tensor] = []
        first = 0
        for tile in self._tiles(pieces):
            count = sum(len(p.token_ids) for p in tile)
            logits.extend(self._run(tile, [r - first for r in range(first, first + count) if r in wanted]))
            first += count
        return torch.stack(logits) if logits else torch.empty(0, self._vocab_size)

    def _tiles(self, pieces: list[Piece]) -> list[list[Piece]]:
        if self.tile is None:
            return [pieces]
        tiles: list[list[Piece]] = [[]]
        room = self.tile
        for piece in pieces:
            first = 0
            while first < len(piece.token_ids):
                if not room:
                    tiles.append([])
                    room = self.tile
                last = min(first + room, len(piece.token_ids))
                tiles[-1].append(piece.cut(first, last))
                room -= last - first
                first = last
        return tiles

    def _run(self, pieces: list[Piece], rows: list[int]) -> Tensor:
        batch = make_batch(pieces, self._layout)
        padding = 0 if self.tile is None else self.tile - len(batch)
        token_ids = torch.nn.functional.pad(batch.token_ids, (0, padding))
        positions = torch.nn.functional.pad(torch.from_numpy(batch.positions).long(), (0, padding))
        # With a tile the head sees the whole tile too: its shape must not depend on how many rows are sampled.
        keep = self._sparse_head and self.tile is None
        options = {"logits_to_keep": torch.tensor(rows, dtype=torch.long)} if keep and rows else {}
        with attention.running(batch, self._caches, self._dtype), torch.inference_mode():
            logits = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **options
            ).logits[0]
            chosen: Tensor = logits if options else logits[rows]
        return chosen.float()
