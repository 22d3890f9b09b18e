// What the kernels are told: plain structs over raw pointers, no framework, the same for every instruction set.
//
// Row counts and sizes are elements unless a name says bytes. `T` is the compute type, bf16 or float.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace octavo {

// Scratch that grows on demand and starts on a cache line; contents are lost when it grows.
template <class T>
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  T* reserve(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (!data_) throw std::bad_alloc();
      capacity_ = count;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

struct bf16 {
  uint16_t bits;
};

enum class DType : int { kFloat32 = 0, kBFloat16 = 1 };

// Attention reads the context in spans of this many positions, counted from position 0 of the sequence.
constexpr int kSpan = 256;
// A packed weight is cut into panels of this many output columns.
constexpr int kPanel = 32;

enum class Epilogue : int {
  kStore = 0,       // out[T] = x w
  kStoreFloat = 1,  // out[float] = x w
  kAdd = 2,         // out[float] += x w      (the residual stream)
  kSiluGated = 3,   // out[T] = silu(gate) * up; a panel holds 16 gate and the 16 matching up columns
};

struct LinearArgs {
  const void* x;       // T [rows][k], row stride k
  const void* weight;  // packed, see linear.h
  const float* bias;   // float [n] or null
  void* out;           // [rows][n], or [rows][n / 2] when gated
  int64_t rows, n, k;
  Epilogue epilogue;
};

struct NormArgs {
  const float* x;       // float [rows][dim]
  const float* weight;  // float [dim]
  void* out;            // T [rows][dim]
  int64_t rows, dim;
  float eps;
};

// Where one layer's keys and values live: `arena + block offset + layer_offset + head * head_bytes`, K then V.
//   K of a head: [block_size / P][head_dim / E][P][E]   with P = min(16, block_size)
//   V of a head: [block_size / E][head_dim][E]          with E = elements per 32 bits (2 for bf16, 1 for float)
// That is the form at compute precision, which `layer_offset` is for; stored.h has the others.
struct CacheView {
  char* arena;
  int64_t layer_offset;
  int block_size;
  int kv_heads;
  int head_dim;
};

// How a panel of keys or values is stored.
enum class Format : int { kCompute = 0, kFp8 = 1, kInt8 = 2, kInt4 = 3, kInt2 = 4 };

inline int bits_of(Format f, int compute_bits) {
  switch (f) {
    case Format::kFp8:
    case Format::kInt8: return 8;
    case Format::kInt4: return 4;
    case Format::kInt2: return 2;
    default: return compute_bits;
  }
}

// Byte offsets inside one head of a block.
struct StoredHead {
  int64_t value_codes, key_meta, value_meta, bytes;

  StoredHead(Format key, Format value, int block, int dim, int compute_bits) {
    const auto codes = [&](Format f) { return int64_t(block) * dim * bits_of(f, compute_bits) / 8; };
    const auto meta = [](Format f, int scales) -> int64_t {
      return f == Format::kCompute ? 0 : f == Format::kFp8 ? sizeof(float) : 4 * int64_t(scales);
    };
    value_codes = codes(key);
    key_meta = value_codes + codes(value);
    value_meta = key_meta + meta(key, dim);
    bytes = value_meta + meta(value, block);
    if (key != Format::kCompute || value != Format::kCompute) bytes = (bytes + 63) / 64 * 64;
  }
};

// An entry of a block table: byte offset in the arena, and from bit 56 on the formats of keys and values. Negative
// where the block is gone.
struct Entry {
  int64_t bits;
  int64_t offset() const { return bits & ((int64_t(1) << 56) - 1); }
  int64_t tag() const { return bits >> 56; }
  Format key() const { return Format(bits >> 56 & 7); }
  Format value() const { return Format(bits >> 59 & 7); }
};

// Blocks that this step fills, at compute precision, and where each goes: pairs of entries.
struct SealArgs {
  CacheView cache;
  const int64_t* from_to;  // [blocks][2]
  int64_t blocks;
};

struct WriteArgs {
  CacheView cache;
  const int64_t* blocks;     // [rows] byte offset of the block each row is written to
  const int32_t* positions;  // [rows]
  int64_t rows;
  int q_heads;
};

// q, k and v of one packed projection: head norms (or null), rotation, then K and V go to the cache.
struct RopeWriteArgs {
  WriteArgs write;
  const float* qkv;     // float [rows][(q_heads + 2 kv_heads) * head_dim]
  const float* cos;     // float [positions][head_dim / 2]
  const float* sin;
  // Rows whose sequence has dropped positions ask its sinks as if these had moved up: the query once more, rotated to
  // `moved_position`, in q_out after the rows of the step.
  const int32_t* moved_rows;
  const int32_t* moved_positions;
  int64_t moved;
  const float* q_norm;  // float [head_dim] or null
  const float* k_norm;
  float eps;
  void* q_out;          // T [rows + moved][q_heads][head_dim]
};

// K and V as another library left them: element (row, head, dim) at row * row_stride + head * head_stride + dim.
struct StoreArgs {
  WriteArgs write;
  const void* k;
  const void* v;
  int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
};

// One sequence's rows in this step: positions first_position ... first_position + rows - 1.
struct Segment {
  int32_t first_row;
  int32_t rows;
  int32_t first_position;
  int32_t blocks;          // entries in its table
  const int64_t* table;    // entries of its blocks; those of dropped blocks may be -1
  int32_t sinks;           // positions that are kept although later ones were dropped
  // With stored formats: entries, at compute precision, of the blocks its rows stand in, from that of its first row.
  const int64_t* own;
};

// Rows folded over all their spans by one worker.
struct FoldItem {
  int32_t segment;
  int32_t first;  // row inside the segment
  int32_t rows;
  int32_t own = -1;  // with stored formats: the block its rows stand in, all in the same
};

// Rows of one or several sequences that read the same physical span; each leaves one partial.
struct SpanItem {
  int32_t segment;  // whose table is read
  int32_t span;
  int32_t first_member, members;
  int32_t own = -1;  // with stored formats: the block of this span that its rows stand in, or -1
};

struct SpanMember {
  int32_t query;      // row of q
  int32_t low, high;  // the positions it sees, high excluded
  int64_t partial;    // index of the partial, in units of one query head's partial times q_heads
};

struct MergeRow {
  int32_t row;
  int32_t spans;
  int64_t first_partial;
};

// Made once per step and layer group, run once per layer.
struct AttentionPlan {
  std::vector<int64_t> tables, own;
  std::vector<Segment> segments;
  std::vector<FoldItem> folds;
  std::vector<SpanItem> spans;
  std::vector<SpanMember> members;
  std::vector<MergeRow> merges;
  int64_t partials = 0;
  int block_size = 0;
  int window = 0;      // 0: full attention
  bool stored = false;  // whether blocks are sealed in another form than they are filled in
};

struct AttentionArgs {
  CacheView cache;
  const void* q;  // T [rows + moved][q_heads][head_dim]
  void* out;      // T [rows][q_heads][head_dim]
  int q_heads;
  float scale;
  float softcap;  // 0: none
};

struct Kernels {
  const char* name;
  bool native_bf16;
  void (*linear)(DType, const LinearArgs&, int threads);
  void (*rms_norm)(DType, const NormArgs&, int threads);
  void (*rope_write)(DType, const RopeWriteArgs&, int threads);
  void (*cache_write)(DType, const StoreArgs&, int threads);
  void (*attention)(DType, const AttentionArgs&, const AttentionPlan&, int threads);
  void (*seal)(DType, const SealArgs&, int threads);
  void (*unseal)(DType, const SealArgs&, float* k, float* v);
  uint64_t (*read_pass)(const char* data, int64_t bytes, int streams, int threads);
};

}  // namespace octavo
