"""The kernels again, slow and obvious, in torch: what the native ones must agree with.

Signatures follow `octavo.kernels.native`, except that attention gets a sequence's keys and values as plain
tensors. `read_cache` is the inverse of the cache layout, written from its description and not from the native code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.config import SPAN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [rows, k]` times `weight [n, k]`, accumulated in float64 and given as float32 `[rows, n]`."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).float()


def silu_gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(x gate) * (x up)` in float32, `[rows, n]`."""
    g = linear(x, gate)
    return g * torch.sigmoid(g) * linear(x, up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of float32 `x`, in float32."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x [rows, heads, head_dim]` by `cos, sin [rows, head_dim / 2]`, halves paired."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def turn(x: Tensor) -> Tensor:
    """`x` times a Hadamard matrix of unit length along its last dimension, in groups as long as the largest power of
    two that divides it (QuaRot, arXiv 2404.00456). Twice is not at all."""
    matrix, group = torch.ones(1, 1, dtype=x.dtype), x.shape[-1] & -x.shape[-1]
    while len(matrix) < group:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    turned: Tensor = x.reshape(*x.shape[:-1], -1, group) @ matrix / group**0.5
    return turned.reshape(x.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of `q [rows, q_heads, d]` over `k, v [context, kv_heads, d]`, whole, in float32.

    `positions [rows]` says where each row stands; a window of w lets it see itself and the w - 1 before.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,chd->hrc", q.float(), keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(positions, k.shape[0], window), float("-inf"))
    return torch.einsum("hrc,chd->rhd", scores.softmax(-1), values)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """`attention` in the order the design fixes: one partial per span of 256 positions, merged in span order.

    Probabilities are rounded to the type of `v` before they weigh it, as the native kernel does.
    """
    group = q.shape[1] // k.shape[1]
    top = torch.full((q.shape[1], q.shape[0]), float("-inf"))
    total = torch.zeros_like(top)
    acc = torch.zeros(q.shape[1], q.shape[0], q.shape[2])
    for first in range(0, k.shape[0], SPAN):
        keys = k[first : first + SPAN].float().repeat_interleave(group, dim=1)
        values = v[first : first + SPAN].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("rhd,chd->hrc", q.float(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        visible = _visible(positions - first, keys.shape[0], window)
        scores = scores.masked_fill(~visible, float("-inf"))
        span_top = scores.amax(-1)
        weights = torch.where(visible, (scores - span_top[..., None]).exp(), 0.0)
        new_top = torch.maximum(top, span_top)
        keep, take = (top - new_top).exp().nan_to_num(0.0), (span_top - new_top).exp().nan_to_num(0.0)
        total = total * keep + weights.sum(-1) * take
        weighed = torch.einsum("hrc,chd->hrd", weights.to(v.dtype).float(), values)
        acc = acc * keep[..., None] + weighed * take[..., None]
        top = new_top
    return (acc / total[..., None]).transpose(0, 1)


def _visible(positions: Tensor, context: int, window: int | None) -> Tensor:
    at = torch.arange(context)
    visible = at[None] <= positions[:, None]
    return visible if window is None else visible & (at[None] > positions[:, None] - window)


def read_cache(
    arena: Tensor,
    blocks: list[int],
    layer_offset: int,
    length: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor]:
    """Keys and values `[length, kv_heads, head_dim]` of one sequence and layer.

    `arena` is the whole buffer seen in the compute type; `blocks` are byte offsets. A head of a block holds K as
    `[block_size / P][head_dim / E][P][E]` with `P = min(16, block_size)`, then V as
    `[block_size / E][head_dim][E]`; E is 2 for bf16 and 1 for float32.
    """
    size = arena.element_size()
    pack = 2 if size == 2 else 1
    panel = min(16, block_size)
    plane = block_size * head_dim
    keys, values = [], []
    for offset in blocks:
        start = (offset + layer_offset) // size
        data = arena[start : start + kv_heads * 2 * plane].view(kv_heads, 2, plane)
        k = data[:, 0].view(kv_heads, block_size // panel, head_dim // pack, panel, pack)
        keys.append(k.permute(1, 3, 0, 2, 4).reshape(block_size, kv_heads, head_dim))
        v = data[:, 1].view(kv_heads, block_size // pack, head_dim, pack)
        values.append(v.permute(1, 3, 0, 2).reshape(block_size, kv_heads, head_dim))
    return torch.cat(keys)[:length], torch.cat(values)[:length]
