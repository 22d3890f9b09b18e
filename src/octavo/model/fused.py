"""A whole model of fused layers: embedding, layers, final norm and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.cache.layout import CacheLayout
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels import native
from octavo.kernels.native import Epilogue, LayerCache, PackedLinear, Rope, WeightPool
from octavo.model.batch import Batch, Piece, make_batch
from octavo.model.layers import FusedLayer, Workspace, is_known, packed_layer_bytes
from octavo.model.load import LoadedModel
from octavo.model.rope import RopeTable


def can_fuse(loaded: LoadedModel) -> bool:
    """Whether every decoder layer has a shape that `layers.py` knows."""
    layers = getattr(loaded.model.base_model, "layers", ())
    return len(layers) == loaded.spec.num_layers and all(is_known(x, loaded.spec.model_type) for x in layers)


class FusedModel:
    """Runs `loaded` with packed weights. The transformers layers are emptied, so that weights are held once."""

    def __init__(self, loaded: LoadedModel, layout: CacheLayout, max_rows: int, max_len: int) -> None:
        base: Any = loaded.model.base_model
        head: Any = loaded.model.get_output_embeddings()
        spec = loaded.spec
        itemsize = loaded.torch_dtype.itemsize
        head_bytes = native.packed_bytes(head.out_features, head.in_features, itemsize)
        self._pool = WeightPool(sum(packed_layer_bytes(layer) for layer in base.layers) + head_bytes)
        self._layout = layout
        self._eps: float = base.norm.variance_epsilon
        self._rope = RopeTable(base.rotary_emb, max_len)
        rope = Rope(self._rope)
        self._layers = []
        for i, part in enumerate(spec.layers):
            self._layers.append(
                FusedLayer.build(base.layers[i], rope, part.head_dim, part.scaling, self._pool)
            )
            base.layers[i] = torch.nn.Identity()
        self._head = PackedLinear.pack(head.weight, head.bias, self._pool)
        loaded.model.set_output_embeddings(torch.nn.Identity())
        # One view that is left would keep the whole mapped checkpoint in memory.
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data.clone()
        self._embedding: Tensor = base.embed_tokens.weight
        self._norm: Tensor = base.norm.weight.float()
        try:
            self._work = Workspace.make(max_rows, self._layers[0], spec.hidden_size, loaded.torch_dtype)
        except RuntimeError as error:  # torch's way of saying that there is no memory
            raise ConfigError(
                f"max_num_batched_tokens={max_rows}: there is no memory for the rows of such a step; "
                f"{EngineConfig.max_num_batched_tokens} is the default",
                param="max_num_batched_tokens",
            ) from error
        self._groups = [
            next(g for g, x in enumerate(layout.groups) if i in x.layers) for i in range(len(self._layers))
        ]
        self._caches: list[LayerCache] = []

    @property
    def weights_bytes(self) -> int:
        """Bytes of packed weights and the embedding."""
        return self._pool.nbytes + self._embedding.nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the rows of a step and of the rotation tables."""
        return self._work.nbytes + self._rope.nbytes

    def attach(self, arena: int, layout: CacheLayout) -> None:
        """Read and write the cache at address `arena` from now on, whose blocks lie as in `layout`."""
        self._layout = layout
        self._caches = [
            LayerCache(
                arena,
                self._layout.layer_offset(g, i),
                self._layout.block_size,
                self._layout.groups[g].num_kv_heads,
                layer.head_dim,
                layer.q_heads,
            )
            for i, (g, layer) in enumerate(zip(self._groups, self._layers, strict=True))
        ]

    def forward(self, pieces: list[Piece], rows: list[int]) -> Tensor:
        """Compute `pieces` and return the float32 logits `[len(rows), vocabulary]` of the given rows."""
        batch = make_batch(pieces, self._layout)
        self._rope.reach(int(batch.positions.max()) + 1)
        work = self._work.first(len(batch))
        self._embed(batch, work.hidden)
        for layer, group, cache in zip(self._layers, self._groups, self._caches, strict=True):
            layer.forward(work, batch, group, cache)
        if not rows:
            return torch.empty(0, self._head.n)
        wanted = work.hidden if len(rows) == len(batch) else work.hidden[rows]
        normed = torch.empty(len(rows), wanted.shape[1], dtype=work.normed.dtype)
        native.rms_norm(wanted, self._norm, self._eps, normed)
        logits = torch.empty(len(rows), self._head.n)
        self._head(normed, logits, Epilogue.STORE_FLOAT)
        return logits

    def _embed(self, batch: Batch, out: Tensor) -> None:
        out.copy_(self._embedding[batch.token_ids])
