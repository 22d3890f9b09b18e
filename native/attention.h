// Attention over the paged cache, read where it lies.
//
// The context of a row is cut into spans of kSpan positions counted from position 0. Each span gives one partial
// (max, sum, accumulator), computed by `span_partial` whichever way the step is divided, and partials are merged in
// span order. Inside a span every element is one chain over positions (or dimensions) upwards, positions outside a
// row's own range never enter its arithmetic, not even as zero times something, so neither block size, chunking,
// company nor what recycled memory holds can change a bit.
#pragma once

#include <omp.h>

#include <algorithm>

#include "mma.h"
#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int padded_dim(int dim) { return (dim + W - 1) / W * W; }

// The running state of one (row, query head), or one span's contribution to it: max, sum, and from the next cache
// line on the accumulator.
struct Partial {
  float* data;
  float& top() const { return data[0]; }
  float& sum() const { return data[1]; }
  float* acc() const { return data + 16; }
  static int64_t floats(int dim) { return 16 + (dim + 15) / 16 * 16; }
  void reset(int dim) const {
    top() = kNothing;
    std::fill(data + 1, data + floats(dim), 0.0f);
  }
};

inline void merge(const Partial& state, const Partial& span, int dim) {
  if (span.top() == kNothing) return;
  const float top = std::max(state.top(), span.top());
  const F keep = set1(state.top() == kNothing ? 0.0f : exp2_scalar(state.top() - top));
  const F take = set1(exp2_scalar(span.top() - top));
  for (int i = 0; i < padded_dim(dim); i += W)
    store(state.acc() + i, fma(load(span.acc() + i), take, mul(load(state.acc() + i), keep)));
  float lane[W];
  store(lane, fma(set1(span.sum()), take, mul(set1(state.sum()), keep)));
  state.sum() = lane[0];
  state.top() = top;
}

template <class T>
inline void finish(const Partial& state, int dim, T* out) {
  float value[kMaxHeadDim + W];
  T narrow[kMaxHeadDim + W];
  const F scale = set1(1.0f / state.sum());
  for (int i = 0; i < padded_dim(dim); i += W) store(value + i, mul(load(state.acc() + i), scale));
  narrow_padded(value, narrow, dim);
  std::memcpy(out, narrow, sizeof(T) * dim);
}

// One register tile of query rows against one span.
template <class T>
struct Tile {
  int rows;
  const T* q[kTileRows];       // [head_dim] each
  int low[kTileRows];          // the positions each row sees, high excluded
  int high[kTileRows];
  Partial partial[kTileRows];  // written
  uint32_t* words;             // q interleaved: [head_dim / E][rows]
};

template <class T>
inline void interleave(const Tile<T>& tile, int dim) {
  const int steps = dim / Elem<T>::kPack;
  for (int k = 0; k < steps; ++k)
    for (int r = 0; r < tile.rows; ++r)
      std::memcpy(tile.words + k * tile.rows + r, tile.q[r] + k * Elem<T>::kPack, sizeof(uint32_t));
}

// Scores and probabilities of one tile over one span.
struct SpanScratch {
  alignas(64) float score[kTileRows][kSpan];
  alignas(64) float weight[kTileRows][kSpan];  // as T: the probabilities, row by row
};

template <class T>
class SpanReader {
 public:
  static constexpr int E = Elem<T>::kPack;

  SpanReader(const AttentionArgs& args, const AttentionPlan& plan, const Segment& segment, int span, int kv_head)
      : block_(plan.block_size), dim_(args.cache.head_dim), first_(span * kSpan),
        table_(segment.table), blocks_(segment.blocks),
        base_(args.cache.arena + args.cache.layer_offset + int64_t(kv_head) * 2 * block_ * dim_ * sizeof(T)) {}

  int first() const { return first_; }
  int block_size() const { return block_; }

  // The positions that will be read: blocks outside them are never dereferenced.
  void limit(int from, int to) {
    low_ = (first_ + from) / block_;
    high_ = std::min((first_ + to - 1) / block_, blocks_ - 1);
  }

  const char* block(int index) const { return base_ + table_[std::clamp(index, low_, high_)]; }
  // Keys of 16-position (or one-block) panels: the panel that holds position p of the span.
  const char* key_panel(int p) const {
    const int width = std::min(16, block_);
    const int at = first_ + p;
    return block(at / block_) + int64_t(at % block_ / width) * width * dim_ * sizeof(T);
  }
  // Values of position p of the span; p is even for bf16.
  const char* values(int p) const {
    const int at = first_ + p;
    return block(at / block_) + (int64_t(block_) + at % block_) * dim_ * sizeof(T);
  }

 private:
  int block_, dim_, first_;
  const int64_t* table_;
  int blocks_;
  const char* base_;
  int low_ = 0, high_ = 0;
};

inline void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// score[r][from ... to) of kPanel positions at a time; P = width of a key panel.
template <class T, int R, int P>
inline void scores(const SpanReader<T>& span, const uint32_t* words, int dim, int from, int to, SpanScratch& scratch) {
  constexpr int kPieces = P >= W ? 1 : W / P;
  constexpr int64_t kStride = int64_t(P) * sizeof(uint32_t);
  // With few rows the memory is what one waits for: keys are fetched two steps ahead, values while keys are used.
  constexpr bool kFetch = R * 2 <= kTileRows;
  const int64_t panel_bytes = int64_t(P) * dim * sizeof(T);
  for (int p = from; p < to; p += kPanel) {
    if (kFetch)
      for (int at = p; at < p + kPanel && at < to; at += P) {
        if (at + 2 * kPanel < to) prefetch(span.key_panel(at + 2 * kPanel), panel_bytes);
        prefetch(span.values(at), panel_bytes);
      }
    const char* piece[kPanelVectors][kPieces];
    for (int v = 0; v < kPanelVectors; ++v)
      for (int i = 0; i < kPieces; ++i) {
        const int at = p + v * W + i * P;
        piece[v][i] = span.key_panel(at) + (P > W ? at % P * int64_t(sizeof(uint32_t)) : 0);
      }
    F acc[R][kPanelVectors];
    clear(acc);
    mma<T>(acc, InterleavedRows<R>{words},
           [&piece](int64_t k, int v) { return load_pieces<P>(piece[v], k * kStride); }, dim / Elem<T>::kPack);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kPanelVectors; ++v) store(scratch.score[r] + p + v * W, acc[r][v]);
  }
}

// One row's scores to weights: scaled (by a positive number), capped, masked to [low, high); returns nothing outside
// [from, to) untouched. Exponents are those of 2, so the row's top is in units of ln 2.
template <class T>
inline void soften(float* score, T* weight, int low, int high, int from, int to, float scale, float cap,
                   const Partial& out) {
  const auto masked = [&](F s, F other, int p) {
    return p < low || p + W > high ? keep_lanes(s, other, std::clamp(low - p, 0, W), std::clamp(high - p, 0, W)) : s;
  };
  if (cap > 0.0f) {
    for (int p = from; p < to; p += W)
      store(score + p, tanh(mul(load(score + p), set1(scale / cap))));
    scale = cap;
  }
  F top = set1(kNothing);
  for (int p = from; p < to; p += W) top = max(masked(load(score + p), set1(kNothing), p), top);
  const F unit = set1(scale * kLog2E);
  out.top() = reduce_max(top) * (scale * kLog2E);
  const F shift = set1(-out.top());
  F sum = zero();
  for (int p = from; p < to; p += W) {
    const F e = masked(exp2(fma(load(score + p), unit, shift)), zero(), p);
    Elem<T>::store(weight + p, e);
    sum = add(sum, e);
  }
  out.sum() = reduce_add(sum);
}

// acc[r] += weights of [from, to) times values, NV vectors of dimensions from `vector` on; from and to are even.
template <class T, int R, int NV>
inline void weigh(const SpanReader<T>& span, const Tile<T>& tile, const T* weight, int dim, int vector, int from,
                  int to) {
  constexpr int E = Elem<T>::kPack;
  F acc[R][NV];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = load(tile.partial[r].acc() + (vector + v) * W);
  const int64_t stride = int64_t(dim) * sizeof(uint32_t);
  const int block = span.block_size();
  for (int p = from; p < to;) {
    const int next = std::min(to, (span.first() + p) / block * block + block - span.first());
    const char* values = span.values(p) + int64_t(vector) * W * sizeof(uint32_t);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(weight) + p / E;
    mma<T>(acc, [words](int64_t k, int r) { return words[r * (kSpan / E) + k]; },
           [values, stride](int64_t k, int v) { return load_words(values + k * stride + v * W * sizeof(uint32_t)); },
           (next - p) / E);
    p = next;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(tile.partial[r].acc() + (vector + v) * W, acc[r][v]);
}

// The same for one row at the ragged ends, where the tile's rows do not all see the same positions.
template <class T>
inline void weigh_edge(const SpanReader<T>& span, const Partial& out, const T* weight, int dim, int from, int to) {
  constexpr int E = Elem<T>::kPack;
  for (int p = from / E * E; p < to; p += E) {
    uint32_t word, mask = 0xffffffffu;
    std::memcpy(&word, weight + p, sizeof word);
    if (E == 2 && p < from) mask &= 0xffff0000u;
    if (E == 2 && p + 2 > to) mask &= 0x0000ffffu;
    const char* values = span.values(p);
    for (int i = 0; i < padded_dim(dim); i += W) {
      const U v = and_words(load_words(values + i * sizeof(uint32_t)), set1_word(mask));
      store(out.acc() + i, Elem<T>::step(load(out.acc() + i), set1_word(word), v));
    }
  }
}

template <class T, int R>
inline void weigh_all(const SpanReader<T>& span, const Tile<T>& tile, const T* weight, int dim, int from, int to) {
  constexpr int kWide = std::max(1, std::min(8, kAccumulators / R));
  const int vectors = padded_dim(dim) / W;
  int v = 0;
  if constexpr (kWide >= 8)
    for (; v + 8 <= vectors; v += 8) weigh<T, R, 8>(span, tile, weight, dim, v, from, to);
  if constexpr (kWide >= 4)
    for (; v + 4 <= vectors; v += 4) weigh<T, R, 4>(span, tile, weight, dim, v, from, to);
  if constexpr (kWide >= 2)
    for (; v + 2 <= vectors; v += 2) weigh<T, R, 2>(span, tile, weight, dim, v, from, to);
  for (; v < vectors; ++v) weigh<T, R, 1>(span, tile, weight, dim, v, from, to);
}

// Partials of one tile over one span. Rows whose range misses the span get an empty partial.
template <class T, int R>
inline void span_partial(const AttentionArgs& args, SpanReader<T>& span, const Tile<T>& tile, SpanScratch& scratch) {
  constexpr int E = Elem<T>::kPack;
  const int dim = args.cache.head_dim;
  int low[R], high[R];
  int from = kSpan, to = 0, common_from = 0, common_to = kSpan;
  for (int r = 0; r < R; ++r) {
    high[r] = std::clamp(tile.high[r] - span.first(), 0, kSpan);
    low[r] = std::clamp(tile.low[r] - span.first(), 0, kSpan);
    tile.partial[r].reset(dim);
    common_from = std::max(common_from, low[r]);
    common_to = std::min(common_to, high[r]);
    if (low[r] >= high[r]) continue;
    from = std::min(from, low[r]);
    to = std::max(to, high[r]);
  }
  if (from >= to) return;
  span.limit(from, to);
  const int start = from / kPanel * kPanel;
  switch (std::min(16, span.block_size())) {
    case 16: scores<T, R, 16>(span, tile.words, dim, start, to, scratch); break;
    case 8: scores<T, R, 8>(span, tile.words, dim, start, to, scratch); break;
    default: scores<T, R, 4>(span, tile.words, dim, start, to, scratch); break;
  }
  T* weight = reinterpret_cast<T*>(scratch.weight);
  for (int r = 0; r < R; ++r)
    if (low[r] < high[r])
      soften(scratch.score[r], weight + r * kSpan, low[r], high[r], start, (to + W - 1) / W * W, args.scale,
             args.softcap, tile.partial[r]);
  const int even_from = (common_from + E - 1) / E * E, even_to = common_to / E * E;
  const bool shared = even_from < even_to;
  for (int r = 0; r < R; ++r)
    weigh_edge(span, tile.partial[r], weight + r * kSpan, dim, low[r], shared ? std::min(even_from, high[r]) : high[r]);
  if (!shared) return;
  weigh_all<T, R>(span, tile, weight, dim, even_from, even_to);
  for (int r = 0; r < R; ++r)
    weigh_edge(span, tile.partial[r], weight + r * kSpan, dim, even_to, high[r]);
}

// What one thread keeps from call to call.
struct Worker {
  SpanScratch scratch;
  Scratch<float> partials, states;
  Scratch<uint32_t> words;
};

template <class T>
void fold_item(const AttentionArgs& args, const AttentionPlan& plan, const FoldItem& item, int kv_head,
               Worker& worker) {
  const Segment& segment = plan.segments[item.segment];
  const int dim = args.cache.head_dim, group = args.q_heads / args.cache.kv_heads;
  const int count = item.rows * group;
  const int64_t size = Partial::floats(dim);
  float* partials = worker.partials.reserve(kTileRows * size);
  float* states = worker.states.reserve(count * size);
  uint32_t* words = worker.words.reserve(size_t(count) * dim);
  const auto fill = [&](Tile<T>& tile, int first) {
    tile.rows = std::min(kTileRows, count - first);
    tile.words = words + first * (dim / Elem<T>::kPack);
    for (int r = 0; r < tile.rows; ++r) {
      const int row = item.first + (first + r) / group, head = kv_head * group + (first + r) % group;
      tile.q[r] = static_cast<const T*>(args.q) + (int64_t(segment.first_row + row) * args.q_heads + head) * dim;
      tile.high[r] = segment.first_position + row + 1;
      tile.low[r] = plan.window ? std::max(0, tile.high[r] - plan.window) : 0;
      tile.partial[r] = Partial{partials + r * size};
    }
  };
  Tile<T> tile;
  for (int first = 0; first < count; first += kTileRows) {
    fill(tile, first);
    interleave(tile, dim);
    for (int r = 0; r < tile.rows; ++r) Partial{states + (first + r) * size}.reset(dim);
  }
  const int oldest = segment.first_position + item.first, newest = oldest + item.rows - 1;
  const int first_span = plan.window ? std::max(0, oldest + 1 - plan.window) / kSpan : 0;
  for (int s = first_span; s <= newest / kSpan; ++s) {
    SpanReader<T> span(args, plan, segment, s, kv_head);
    for (int first = 0; first < count; first += kTileRows) {
      fill(tile, first);
      with_rows(tile.rows, [&](auto rows) {
        span_partial<T, decltype(rows)::value>(args, span, tile, worker.scratch);
      });
      for (int r = 0; r < tile.rows; ++r)
        merge(Partial{states + (first + r) * size}, tile.partial[r], dim);
    }
  }
  for (int i = 0; i < count; ++i) {
    const int64_t row = segment.first_row + item.first + i / group;
    finish(Partial{states + i * size}, dim,
           static_cast<T*>(args.out) + (row * args.q_heads + kv_head * group + i % group) * dim);
  }
}

template <class T>
void span_item(const AttentionArgs& args, const AttentionPlan& plan, const SpanItem& item, int kv_head,
               float* partials, Worker& worker) {
  const int dim = args.cache.head_dim, group = args.q_heads / args.cache.kv_heads;
  const int64_t size = Partial::floats(dim);
  SpanReader<T> span(args, plan, plan.segments[item.segment], item.span, kv_head);
  Tile<T> tile;
  tile.words = worker.words.reserve(size_t(kTileRows) * dim);
  for (int first = 0; first < item.members * group; first += kTileRows) {
    tile.rows = std::min(kTileRows, item.members * group - first);
    for (int r = 0; r < tile.rows; ++r) {
      const SpanMember& member = plan.members[item.first_member + (first + r) / group];
      const int head = kv_head * group + (first + r) % group;
      tile.q[r] = static_cast<const T*>(args.q) + (int64_t(member.query) * args.q_heads + head) * dim;
      tile.low[r] = member.low;
      tile.high[r] = member.high;
      tile.partial[r] = Partial{partials + (member.partial * args.q_heads + head) * size};
    }
    interleave(tile, dim);
    with_rows(tile.rows, [&](auto rows) {
      span_partial<T, decltype(rows)::value>(args, span, tile, worker.scratch);
    });
  }
}

template <class T>
void merge_row(const AttentionArgs& args, const MergeRow& row, int head, const float* partials, Worker& worker) {
  const int dim = args.cache.head_dim;
  const int64_t size = Partial::floats(dim);
  const Partial state{worker.states.reserve(size)};
  state.reset(dim);
  for (int s = 0; s < row.spans; ++s)
    merge(state, Partial{const_cast<float*>(partials) + ((row.first_partial + s) * args.q_heads + head) * size}, dim);
  finish(state, dim, static_cast<T*>(args.out) + (int64_t(row.row) * args.q_heads + head) * dim);
}

template <class T>
void attention(const AttentionArgs& args, const AttentionPlan& plan, int threads) {
  static thread_local Scratch<float> shared;
  const int heads = args.cache.kv_heads;
  const size_t needed = size_t(plan.partials) * args.q_heads * Partial::floats(args.cache.head_dim);
  float* partials = shared.reserve(needed);
  const int64_t folds = int64_t(plan.folds.size()) * heads, spans = int64_t(plan.spans.size()) * heads;
  const int64_t merges = int64_t(plan.merges.size()) * args.q_heads;
#pragma omp parallel num_threads(threads)
  {
    static thread_local Worker worker;
    // The last rows of a chunk have the longest context, so they go first.
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < folds; ++i)
      fold_item<T>(args, plan, plan.folds[plan.folds.size() - 1 - i / heads], int(i % heads), worker);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < spans; ++i)
      span_item<T>(args, plan, plan.spans[i / heads], int(i % heads), partials, worker);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < merges; ++i)
      merge_row<T>(args, plan.merges[i / args.q_heads], int(i % args.q_heads), partials, worker);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
