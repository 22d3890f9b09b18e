"""Decoder layers of the Llama shape, fused: built from a transformers layer's weights, run by the native kernels.

    hidden (float32) ── norm ── qkv ── [head norms] rotate, write K and V ── attention ── o ──(+)── hidden
    hidden ── norm ── gate and up, gated ── down ──(+)── hidden

The residual stream stays in float32, so that a row is rounded to the compute type only where a product reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.native import (
    Epilogue,
    LayerCache,
    PackedLinear,
    Rope,
    WeightPool,
)
from octavo.model.batch import Batch

FUSED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose decoder layer has exactly this shape; SmolLM is a Llama."""

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_known(layer: Any, model_type: str) -> bool:
    """Whether `layer` has the shape above and nothing else in it."""

    def names(module: Any) -> set[str]:
        return {name for name, _ in module.named_children()}

    if model_type not in FUSED_MODEL_TYPES or names(layer) != _PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, n) for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        names(attention) <= _ATTENTION
        and names(mlp) == _MLP
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and all(type(linear) is torch.nn.Linear and linear.in_features % 2 == 0 for linear in linears)
    )


@dataclass(frozen=True)
class Workspace:
    """Buffers for the rows of one step, shared by all layers."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    q: Tensor
    attended: Tensor
    gated: Tensor

    @classmethod
    def make(cls, rows: int, layer: FusedLayer, hidden_size: int, dtype: torch.dtype) -> Workspace:
        """Room for `rows` rows of a model whose layers look like `layer`."""
        heads = (layer.q_heads, layer.head_dim)
        return cls(
            hidden=torch.empty(rows, hidden_size),
            normed=torch.empty(rows, hidden_size, dtype=dtype),
            qkv=torch.empty(rows, layer.qkv.n),
            q=torch.empty(2 * rows, *heads, dtype=dtype),  # moved queries too
            attended=torch.empty(rows, *heads, dtype=dtype),
            gated=torch.empty(rows, layer.down.k, dtype=dtype),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in vars(self).values())

    def first(self, rows: int) -> Workspace:
        """The same buffers, `rows` rows of them."""
        return Workspace(
            self.hidden[:rows],
            self.normed[:rows],
            self.qkv[:rows],
            self.q,
            self.attended[:rows],
            self.gated[:rows],
        )


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer's packed weights."""

    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    mlp_norm: Tensor
    eps: float
    rope: Rope
    q_heads: int
    head_dim: int
    scaling: float

    @classmethod
    def build(cls, layer: Any, rope: Rope, head_dim: int, scaling: float, pool: WeightPool) -> FusedLayer:
        """Pack the weights of a transformers decoder layer that `is_known`."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [p.bias for p in projections if p.bias is not None]
        gate_up = native.gate_up_rows(mlp.gate_proj.weight, mlp.up_proj.weight)
        gate_up_bias = None
        if mlp.gate_proj.bias is not None:
            gate_up_bias = native.gate_up_rows(mlp.gate_proj.bias[:, None], mlp.up_proj.bias[:, None])[:, 0]
        down = torch.nn.functional.pad(
            mlp.down_proj.weight, (0, gate_up.shape[0] // 2 - mlp.down_proj.in_features)
        )
        return cls(
            qkv=PackedLinear.pack(
                torch.cat([p.weight for p in projections]), torch.cat(biases) if biases else None, pool
            ),
            out=PackedLinear.pack(attention.o_proj.weight, attention.o_proj.bias, pool),
            gate_up=PackedLinear.pack(gate_up, gate_up_bias, pool),
            down=PackedLinear.pack(down, mlp.down_proj.bias, pool),
            input_norm=layer.input_layernorm.weight.to(torch.float32, copy=True),
            mlp_norm=layer.post_attention_layernorm.weight.to(torch.float32, copy=True),
            eps=layer.input_layernorm.variance_epsilon,
            rope=_with_head_norms(rope, attention),
            q_heads=attention.q_proj.out_features // head_dim,
            head_dim=head_dim,
            scaling=scaling,
        )

    def forward(self, work: Workspace, batch: Batch, group: int, cache: LayerCache) -> None:
        """Advance `work.hidden` by this layer of layer group `group`; K and V of the rows go to `cache`."""
        native.rms_norm(work.hidden, self.input_norm, self.eps, work.normed)
        self.qkv(work.normed, work.qkv, Epilogue.STORE_FLOAT)
        native.rope_write(cache, batch.placements[group], work.qkv, self.rope, work.q)
        native.seal(work.q.dtype, cache, batch.seals[group])
        native.attention(cache, batch.plans[group], work.q, work.attended, self.scaling)
        self.out(work.attended, work.hidden, Epilogue.ADD)
        native.rms_norm(work.hidden, self.mlp_norm, self.eps, work.normed)
        self.gate_up(work.normed, work.gated, Epilogue.SILU_GATED)
        self.down(work.gated, work.hidden, Epilogue.ADD)


def packed_layer_bytes(layer: Any) -> int:
    """Bytes `FusedLayer.build` takes from its pool, at most."""
    half = native.PANEL // 2
    total = 0
    for linear in (m for m in layer.modules() if isinstance(m, torch.nn.Linear)):
        rows = linear.out_features + native.PANEL
        total += native.packed_bytes(rows, linear.in_features + half, linear.weight.element_size())
    return total


def _with_head_norms(rope: Rope, attention: Any) -> Rope:
    if not hasattr(attention, "q_norm"):
        return rope
    q_norm, k_norm = attention.q_norm, attention.k_norm
    q_weight, k_weight = (norm.weight.to(torch.float32, copy=True) for norm in (q_norm, k_norm))
    return Rope(rope.table, q_weight, k_weight, q_norm.variance_epsilon)
