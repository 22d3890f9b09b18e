// Partials of a tile of query rows over one span of the cache, read where it lies, at compute precision.
#pragma once

#include "ahead.h"
#include "partial.h"

namespace octavo {
namespace OCTAVO_ISA {

// Scores and probabilities of one tile over one span.
struct SpanScratch {
  alignas(64) float score[kTileRows][kSpan];
  alignas(64) float weight[kTileRows][kSpan];  // as T: the probabilities, row by row
};

template <class T>
class SpanReader {
 public:
  static constexpr int E = Elem<T>::kPack;

  // `own` is the block that the rows stand in, read at compute precision; -1 where they stand elsewhere, or where all
  // blocks are read so.
  SpanReader(const AttentionArgs& args, const AttentionPlan& plan, const Segment& segment, int span, int kv_head, int own)
      : cache_(args.cache), head_(kv_head), block_(plan.block_size), dim_(args.cache.head_dim), first_(span * kSpan),
        table_(segment.table), blocks_(segment.blocks), own_(own), stored_(plan.stored),
        own_entry_(own < 0 ? -1 : segment.own[own - segment.first_position / plan.block_size]),
        base_(args.cache.arena + args.cache.layer_offset + int64_t(kv_head) * 2 * block_ * dim_ * sizeof(T)),
        at_(args.cache) {}

  int first() const { return first_; }
  int block_size() const { return block_; }
  int dim() const { return dim_; }

  // The positions that will be read: blocks outside them are never dereferenced.
  void limit(int from, int to) {
    low_ = (first_ + from) / block_;
    high_ = std::min((first_ + to - 1) / block_, blocks_ - 1);
  }
  int low_block() const { return low_; }
  int high_block() const { return high_; }

  Entry entry(int index) const { return {index == own_ ? own_entry_ : table_[std::clamp(index, low_, high_)]}; }
  // A block at compute precision.
  const char* block(int index) const { return base_ + entry(index).bits; }
  // A block in any form: where the keys and values of the head lie.
  const StoredBlock& stored(int index) {
    at_.find<T>(cache_, entry(index), head_);
    return at_;
  }
  // Whether the sequence has such a block, whose reading can be prepared.
  bool has(int index) const { return index < blocks_ && table_[index] >= 0; }
  // Keys of 16-position (or one-block) panels: the panel that holds position p of the span.
  const char* key_panel(int p) const {
    const int width = std::min(16, block_);
    const int at = first_ + p;
    return block(at / block_) + int64_t(at % block_ / width) * width * dim_ * sizeof(T);
  }
  // Values of position p of the span; p is even for bf16.
  const char* values(int p) const {
    const int at = first_ + p, index = at / block_;
    const char* all = stored_ ? StoredBlock(cache_).find<T>(cache_, entry(index), head_).values()
                              : block(index) + int64_t(block_) * dim_ * sizeof(T);
    return all + int64_t(at % block_) * dim_ * sizeof(T);
  }

 private:
  const CacheView& cache_;
  int head_, block_, dim_, first_;
  const int64_t* table_;
  int blocks_, own_;
  bool stored_;
  int64_t own_entry_;
  const char* base_;
  int low_ = 0, high_ = 0;
  StoredBlock at_;
};

// score[r][from ... to) of kPanel positions at a time; P = width of a key panel.
template <class T, int R, int P>
inline void scores(const SpanReader<T>& span, const uint32_t* words, int dim, int from, int to, SpanScratch& scratch,
                   Ahead<T>& ahead) {
  constexpr int kPieces = P >= W ? 1 : W / P;
  constexpr int64_t kStride = int64_t(P) * sizeof(uint32_t);
  // Few rows fetch keys two steps ahead, and values while keys are used. More leave time to fetch the next span.
  const int64_t panel_bytes = int64_t(P) * dim * sizeof(T);
  for (int p = from; p < to; p += kPanel) {
    if constexpr (waits_for_memory(R))
      for (int at = p; at < p + kPanel && at < to; at += P) {
        if (at + 2 * kPanel < to) prefetch(span.key_panel(at + 2 * kPanel), panel_bytes);
        prefetch(span.values(at), panel_bytes);
      }
    else
      ahead.fetch();
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

// Turns one row's scores in [from, to) into weights: scaled (by a positive number), capped, masked to [low, high).
// Exponents are those of 2, so the row's top is in units of ln 2.
class Softness {
 public:
  Softness() = default;
  Softness(float* score, int low, int high, int from, int to, const AttentionArgs& args) : low_(low), high_(high) {
    const float cap = args.softcap;
    if (cap > 0.0f)
      for (int p = from; p < to; p += W) store(score + p, tanh(mul(load(score + p), set1(args.scale / cap))));
    F top = set1(kNothing);
    for (int p = from; p < to; p += W) top = max(masked(load(score + p), set1(kNothing), p), top);
    unit_ = (cap > 0.0f ? cap : args.scale) * kLog2E;
    top_ = reduce_max(top) * unit_;
  }

  float top() const { return top_; }

  // Weights of the W positions from p on.
  F weight(const float* score, int p) const {
    return masked(exp2(fma(load(score + p), set1(unit_), set1(-top_))), zero(), p);
  }

 private:
  F masked(F x, F other, int p) const {
    return p < low_ || p + W > high_ ? keep_lanes(x, other, std::clamp(low_ - p, 0, W), std::clamp(high_ - p, 0, W)) : x;
  }
  int low_, high_;
  float unit_, top_;
};

// The weights of one row in [from, to); `out` gets their top and sum.
template <class T>
inline void soften(Softness soft, const float* score, T* weight, int from, int to, const Partial& out) {
  F sum = zero();
  for (int p = from; p < to; p += W) {
    const F e = soft.weight(score, p);
    Elem<T>::store(weight + p, e);
    sum = add(sum, e);
  }
  out.top() = soft.top();
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

// What every row sees of positions [from, to), which are at compute precision: together where all rows see them.
template <class T, int R>
inline void weigh_range(const SpanReader<T>& span, const Tile<T>& tile, const T* weight, int dim, const int (&low)[R],
                        const int (&high)[R], int from, int to) {
  constexpr int E = Elem<T>::kPack;
  int common_from = from, common_to = to, first[R], last[R];
  for (int r = 0; r < R; ++r) {
    first[r] = std::max(low[r], from);
    last[r] = std::min(high[r], to);
    common_from = std::max(common_from, first[r]);
    common_to = std::min(common_to, last[r]);
  }
  const int even_from = (common_from + E - 1) / E * E, even_to = common_to / E * E;
  const bool shared = even_from < even_to;
  for (int r = 0; r < R; ++r)
    weigh_edge(span, tile.partial[r], weight + r * kSpan, dim, first[r], shared ? std::min(even_from, last[r]) : last[r]);
  if (!shared) return;
  weigh_all<T, R>(span, tile, weight, dim, even_from, even_to);
  for (int r = 0; r < R; ++r) weigh_edge(span, tile.partial[r], weight + r * kSpan, dim, even_to, last[r]);
}

// Positions of the span that each row sees, and that any row sees; all partials are empty from now on.
template <class T, int R>
inline std::pair<int, int> visible_range(const SpanReader<T>& span, const Tile<T>& tile, int (&low)[R], int (&high)[R]) {
  int from = kSpan, to = 0;
  for (int r = 0; r < R; ++r) {
    high[r] = std::clamp(tile.high[r] - span.first(), 0, kSpan);
    low[r] = std::clamp(tile.low[r] - span.first(), 0, kSpan);
    tile.partial[r].reset(span.dim());
    if (low[r] >= high[r]) continue;
    from = std::min(from, low[r]);
    to = std::max(to, high[r]);
  }
  return {from, to};
}

// Partials of one tile over one span. Rows whose range misses the span get an empty partial.
template <class T, int R>
inline void span_partial(const AttentionArgs& args, SpanReader<T>& span, const Tile<T>& tile, SpanScratch& scratch,
                         Ahead<T>& ahead) {
  const int dim = args.cache.head_dim;
  int low[R], high[R];
  const auto [from, to] = visible_range<T, R>(span, tile, low, high);
  if (from >= to) return;
  span.limit(from, to);
  const int start = from / kPanel * kPanel;
  switch (std::min(16, span.block_size())) {
    case 16: scores<T, R, 16>(span, tile.words, dim, start, to, scratch, ahead); break;
    case 8: scores<T, R, 8>(span, tile.words, dim, start, to, scratch, ahead); break;
    default: scores<T, R, 4>(span, tile.words, dim, start, to, scratch, ahead); break;
  }
  T* weight = reinterpret_cast<T*>(scratch.weight);
  const int end = (to + W - 1) / W * W;
  Softness soft[R];  // of all rows first: the tops of one are found while those of another are still reduced
  for (int r = 0; r < R; ++r)
    if (low[r] < high[r]) soft[r] = Softness(scratch.score[r], low[r], high[r], start, end, args);
  for (int r = 0; r < R; ++r)
    if (low[r] < high[r]) soften(soft[r], scratch.score[r], weight + r * kSpan, start, end, tile.partial[r]);
  weigh_range<T, R>(span, tile, weight, dim, low, high, 0, kSpan);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
