import numpy as np
import numpy.typing as npt

class HugeBuffer:
    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class AttentionPlan:
    @property
    def span_items(self) -> int: ...
    @property
    def span_members(self) -> int: ...
    @property
    def fold_items(self) -> int: ...

def paths() -> list[str]: ...
def path() -> str: ...
def native_bf16() -> bool: ...
def select(name: str) -> None: ...
def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def observed_threads() -> int: ...
def pack(weight: int, out: int, n: int, k: int, itemsize: int) -> None: ...
def linear(
    dtype: int, x: int, weight: int, bias: int, out: int, rows: int, n: int, k: int, epilogue: int, /
) -> None: ...
def rms_norm(dtype: int, x: int, weight: int, out: int, rows: int, dim: int, eps: float, /) -> None: ...
def rope_write(
    dtype: int,
    arena: int,
    layer_offset: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    q_heads: int,
    blocks: int,
    positions: int,
    rows: int,
    qkv: int,
    cos: int,
    sin: int,
    moved_rows: int,
    moved_positions: int,
    moved: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    q_out: int,
    /,
) -> None: ...
def cache_write(
    dtype: int,
    arena: int,
    layer_offset: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    blocks: int,
    positions: int,
    rows: int,
    k: int,
    v: int,
    k_row: int,
    k_head: int,
    v_row: int,
    v_head: int,
    /,
) -> None: ...
def make_plan(
    segments: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int64],
    dropped: npt.NDArray[np.int32],
    own: npt.NDArray[np.int64],
    block_size: int,
    window: int,
    kv_heads: int,
) -> AttentionPlan: ...
def stored_head_bytes(itemsize: int, keys: int, values: int, block_size: int, head_dim: int) -> int: ...
def seal(
    dtype: int,
    arena: int,
    layer_offset: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    from_to: npt.NDArray[np.int64],
    /,
) -> None: ...
def unseal(
    dtype: int,
    arena: int,
    layer_offset: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    from_to: npt.NDArray[np.int64],
    k: int,
    v: int,
    /,
) -> None: ...
def attention(
    dtype: int,
    plan: AttentionPlan,
    arena: int,
    layer_offset: int,
    kv_heads: int,
    head_dim: int,
    q_heads: int,
    q: int,
    out: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def move(to: int, from_: int, n: int, /) -> None: ...
def fill(to: int, byte: int, n: int, /) -> None: ...
def read_pass(address: int, nbytes: int, streams: int) -> int: ...
def sample_rows(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int32],
    draws: npt.NDArray[np.float64],
    tokens: npt.NDArray[np.int32],
) -> None: ...
def describe_rows(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int32],
    tokens: npt.NDArray[np.int32],
    log_prob: npt.NDArray[np.float64],
    rank: npt.NDArray[np.int32],
    top_ids: npt.NDArray[np.int32],
    top_log_prob: npt.NDArray[np.float64],
) -> None: ...
def uniform(seed: int, choice: int, position: int) -> float: ...
def philox(counter: list[int], key0: int, key1: int) -> list[int]: ...
