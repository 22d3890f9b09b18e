import sys

import pytest

from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.errors import ConfigError

LLAMA = CacheLayout((LayerGroup(tuple(range(30)), 3, 64),), 16, "bf16")
MIXED = CacheLayout((LayerGroup((1, 3), 2, 8, window=10), LayerGroup((0, 2, 4), 2, 8)), 4, "f32")


def test_sizes_of_a_small_llama():
    assert LLAMA.item_bytes == 2
    assert LLAMA.head_bytes(0) == 2 * 16 * 64 * 2
    assert LLAMA.layer_bytes(0) == 3 * LLAMA.head_bytes(0)
    assert LLAMA.block_bytes(0) == 30 * LLAMA.layer_bytes(0) == 368_640
    assert LLAMA.bytes_per_token == 23_040


def test_layers_lie_one_after_the_other():
    assert [MIXED.layer_offset(1, layer) for layer in (0, 2, 4)] == [0, 512, 1024]
    assert MIXED.layer_offset(0, 3) == MIXED.layer_bytes(0)


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 10, 16, 33])
def test_a_window_holds_what_its_queries_read(block_size, window):
    layout = CacheLayout((LayerGroup((0,), 1, 8, window=window),), block_size, "bf16")
    most = 0
    for position in range(100):
        reads = range(max(0, position - window + 1), position + 1)
        assert layout.first_block(0, position) == reads[0] // block_size
        most = max(most, reads[-1] // block_size - reads[0] // block_size + 1)
        assert layout.blocks_held(0, position + 1) >= most
    assert layout.blocks_held(0, 100) == most


@pytest.mark.parametrize("layout", [LLAMA, MIXED])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_longest_sequence_is_the_inverse_of_sequence_bytes(layout, blocks, extra):
    budget = blocks * sum(layout.block_sizes_bytes) + extra
    longest = layout.longest_sequence(budget)
    assert layout.sequence_bytes(longest) <= budget < layout.sequence_bytes(longest + 1)


def test_a_model_of_windows_alone_has_no_longest_sequence():
    layout = CacheLayout((LayerGroup((0,), 1, 8, window=8),), 4, "bf16")
    assert layout.longest_sequence(3 * layout.block_bytes(0)) == sys.maxsize
    assert layout.longest_sequence(2 * layout.block_bytes(0)) == 8


def test_unknown_formats_and_empty_windows_are_refused():
    with pytest.raises(ConfigError, match="int3"):
        CacheLayout(LLAMA.groups, 16, "int3")
    with pytest.raises(ConfigError, match="window=0"):
        LayerGroup((0,), 1, 8, window=0)


def heads(head_dim, value_dim=None):
    return (LayerGroup((0,), 1, head_dim, value_dim=value_dim),)


# Issue "Formats": bytes of a sealed block, metadata included, head_dim 64, block size 32, against bf16.
@pytest.mark.parametrize(("format", "share"), [("fp8", 0.55), ("int8", 0.55), ("int4", 0.31), ("int2", 0.19)])
def test_sealed_blocks_are_as_small_as_promised(format, share):
    small, whole = CacheLayout(heads(64), 32, format), CacheLayout(heads(64), 32, "bf16")
    assert small.block_sizes_bytes == whole.block_sizes_bytes == whole.sealed_sizes_bytes
    assert small.sealed_sizes_bytes[0] <= share * whole.sealed_sizes_bytes[0]


@pytest.mark.parametrize("format", ["fp8", "int8", "int4", "int2"])
def test_the_first_and_the_open_block_of_a_sequence_are_held_at_compute_precision(format):
    layout = CacheLayout((LayerGroup((0, 1), 2, 80),), 32, format)
    whole, sealed = layout.block_sizes_bytes[0], layout.sealed_sizes_bytes[0]
    held = [layout.sequence_bytes(32 * blocks) for blocks in range(1, 8)]
    assert held == [whole * min(n, 2) + sealed * (n - min(n, 2)) for n in range(1, 8)]
    assert layout.longest_sequence(held[4]) == 5 * 32
    assert layout.longest_sequence(held[4] - 1) == 4 * 32


def grown(layout, tokens):
    """The most bytes a sequence holds while it is computed one token after the other, the last one never."""
    most = 0
    for position in range(tokens):
        now, newest = 0, position // layout.block_size
        for g, (whole, sealed) in enumerate(
            zip(layout.block_sizes_bytes, layout.sealed_sizes_bytes, strict=True)
        ):
            for i in range(layout.first_block(g, position), newest + 1):
                now += whole if i in (0, newest) else sealed
            fills = (position + 1) % layout.block_size == 0 and position < tokens - 1
            if fills and newest and not layout.sealed_format(g).is_compute:
                now += sealed  # it is there in both forms
        most = max(most, now)
    return most


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8", "int4", "int2"])
@pytest.mark.parametrize(
    "windows", [(None,), (1,), (16,), (17,), (33,), (100,), (None, 24), (None, 100), (40, 90)]
)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_sequence_holds_what_it_held_while_it_grew(format, windows, block_size):
    groups = tuple(LayerGroup((g,), 1 + g, 16 + 8 * g, window=w) for g, w in enumerate(windows))
    layout = CacheLayout(groups, block_size, format)
    for tokens in (*range(1, 200), 255, 256, 257, 400):
        counted_up = -(-tokens // block_size) * block_size  # whole blocks, as the engine takes them
        assert layout.sequence_bytes(tokens) == grown(layout, counted_up), tokens
    budget = layout.sequence_bytes(300)
    longest = layout.longest_sequence(budget)
    assert longest == sys.maxsize or layout.sequence_bytes(longest + 1) > budget


def test_a_latent_layer_keeps_one_vector_per_position():
    assert CacheLayout(heads(576, value_dim=0), 16, "bf16").bytes_per_token == 1152
    assert CacheLayout(heads(128, value_dim=64), 16, "bf16").bytes_per_token == 384


def test_open_blocks_of_a_small_format_are_of_the_compute_type():
    assert CacheLayout(heads(64), 32, "int4", compute="f32").item_bytes == 4
    assert CacheLayout(heads(64), 32, "int4").item_bytes == 2


def test_bytes_per_token_never_understates():
    layout = CacheLayout(heads(2), 256, "fp8")
    assert layout.bytes_per_token * 256 >= layout.sealed_sizes_bytes[0] > (layout.bytes_per_token - 1) * 256


def test_sequences_that_fit_share_nothing():
    budget = 10 * LLAMA.sequence_bytes(33)
    assert LLAMA.sequences_that_fit(budget, 33) == LLAMA.sequences_that_fit(budget, 48) == 10
    assert LLAMA.sequences_that_fit(budget - 1, 48) == 9
