// Partials of a tile over one span some of whose blocks are stored in a smaller form.
//
// A block is read as it is stored, but for the one its rows stand in (SpanReader::entry). Scales of keys go into a copy
// of the query for each block, their zeros into the scores' start; scales of values go into the weights, their zeros
// into one number per row that is added to every dimension at the end.
#pragma once

#include "span.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kBlocksAhead = 3;  // fetched before they are read, where nobody has fetched them before

struct StoredScratch {
  static constexpr int kWidth = kMaxHeadDim + W;
  Scales keys;
  alignas(64) float query[kTileRows][kWidth], turned_query[kTileRows][kWidth];
  alignas(64) float turned_acc[kTileRows][kWidth];      // what blocks of turned values give
  alignas(64) float scaled[kWidth];                     // one row's query times the scales of one block
  alignas(64) float row[kTileRows][kWidth];             // rows as they meet the codes of one block
  // The scale of each position's values; and scale times zero, of values as they are and of turned ones.
  alignas(64) float gain[kSpan], shift[kSpan], turned_shift[kSpan];

  template <class Value>
  Value* row_of(int r) { return reinterpret_cast<Value*>(row[r]); }
};

// Scores of the tile against one block of stored keys, which are its positions [at, at + block_size) of the span.
template <class T, Format F8, int R>
inline void stored_scores(const SpanReader<T>& span, const char* head, const char* meta, int at, SpanScratch& scratch,
                          StoredScratch& stored, const char* ahead) {
  using Row = RowOf<T, F8>;
  const int dim = span.dim(), block = span.block_size();
  read_scales(F8, meta, dim, stored.keys.scale, stored.keys.shift);
  const auto& query = is_turned(F8) ? stored.turned_query : stored.query;
  F start[R];
  float unit[R];
  for (int r = 0; r < R; ++r) {
    F offset = zero();
    for (int i = 0; i < padded_dim(dim); i += W) {
      const F q = load(query[r] + i);
      offset = fma(q, load(stored.keys.shift + i), offset);
      store(stored.scaled + i, mul(q, load(stored.keys.scale + i)));
    }
    start[r] = set1(reduce_add(offset));
    unit[r] = Row::put(stored.template row_of<typename Row::Value>(r), stored.scaled, padded_dim(dim));
  }
  constexpr int kStep = kStoredPanel * 2;  // bytes of one unit of a panel
  const int units = dim / (2 * Codes<F8>::kUnits);
  const int64_t panel = int64_t(units) * kStep;
  const auto panels = [&](auto count, int p) {
    constexpr int NV = decltype(count)::value * kStoredPanel / W;
    const char* codes = head + p / kStoredPanel * panel;
    typename Row::Sum acc[R][NV];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) acc[r][v] = Row::begin(start[r]);
    mma_codes<T, F8>(acc, [&](int r) { return stored.template row_of<typename Row::Value>(r); },
                     [&](int v) { return codes + v * W / kStoredPanel * panel + v * W % kStoredPanel * 2; }, kStep, units,
                     ahead + p / kStoredPanel * panel);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) store(scratch.score[r] + at + p + v * W, Row::end(acc[r][v], unit[r], start[r]));
  };
  if (block >= 2 * kStoredPanel)
    for (int p = 0; p < block; p += 2 * kStoredPanel) panels(std::integral_constant<int, 2>{}, p);
  else
    panels(std::integral_constant<int, 1>{}, 0);
}

// The same where the keys are at compute precision; positions from `to` on are not needed.
template <class T, int R>
inline void computed_scores(const SpanReader<T>& span, const Tile<T>& tile, const char* head, int at, int to,
                            SpanScratch& scratch) {
  const int dim = span.dim();
  constexpr int64_t kStride = kStoredPanel * sizeof(uint32_t);
  constexpr int NV = kStoredPanel / W;
  for (int p = 0; p < span.block_size() && at + p < to; p += kStoredPanel) {
    const char* panel = head + int64_t(p) * dim * sizeof(T);
    F acc[R][NV];
    clear(acc);
    mma<T>(acc, InterleavedRows<R>{tile.words},
           [&](int64_t k, int v) { return load_words(panel + k * kStride + v * W * sizeof(uint32_t)); },
           dim / Elem<T>::kPack);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < NV; ++v) store(scratch.score[r] + at + p + v * W, acc[r][v]);
  }
}

// acc[r] += weights times one block of stored values, NV vectors of dimensions from `vector` on.
template <class T, Format F8, int R, int NV>
inline void weigh_codes(const SpanReader<T>& span, const Tile<T>& tile, StoredScratch& stored, const float (&unit)[R],
                        const char* codes, int vector, const char* ahead) {
  using Row = RowOf<T, F8>;
  const int units = span.block_size() / (2 * Codes<F8>::kUnits);
  const auto at = [&](int r, int v) {
    return (is_turned(F8) ? stored.turned_acc[r] : tile.partial[r].acc()) + (vector + v) * W;
  };
  typename Row::Sum acc[R][NV];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = Row::begin(load(at(r, v)));
  mma_codes<T, F8>(acc, [&](int r) { return stored.template row_of<typename Row::Value>(r); },
                   [&](int v) { return codes + (vector + v) * W * 2; }, int64_t(span.dim()) * 2,
                   units, ahead + int64_t(vector) * W * 2 * units);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) store(at(r, v), Row::end(acc[r][v], unit[r], load(at(r, v))));
}

// The same for all dimensions. `weight[r]` holds the block's weights.
template <class T, Format F8, int R>
inline void stored_values(const SpanReader<T>& span, const Tile<T>& tile, const float (*weight)[kSpan], int at,
                          StoredScratch& stored, const char* codes, const char* ahead) {
  using Row = RowOf<T, F8>;
  float unit[R];
  for (int r = 0; r < R; ++r)
    unit[r] = Row::put(stored.template row_of<typename Row::Value>(r), weight[r] + at, span.block_size());
  constexpr int kWide = std::max(1, std::min(4, kAccumulators / R));
  const int vectors = padded_dim(span.dim()) / W;
  int v = 0;
  if constexpr (kWide >= 4)
    for (; v + 4 <= vectors; v += 4) weigh_codes<T, F8, R, 4>(span, tile, stored, unit, codes, v, ahead);
  if constexpr (kWide >= 2)
    for (; v + 2 <= vectors; v += 2) weigh_codes<T, F8, R, 2>(span, tile, stored, unit, codes, v, ahead);
  for (; v < vectors; ++v) weigh_codes<T, F8, R, 1>(span, tile, stored, unit, codes, v, ahead);
}

// What the zeros of a row's values give to every dimension.
struct Offsets {
  float plain = 0.0f, turned = 0.0f;
};

// One row's scores to weights as `soften` makes them, in place, each times the scale of its position's values;
// positions in [from, to) that the row does not see get 0.
inline Offsets soften_scaled(Softness soft, float* score, int from, int to, const StoredScratch& stored,
                             const Partial& out) {
  F sum = zero(), plain = zero(), turned = zero();
  for (int p = from; p < to; p += W) {
    const F e = soft.weight(score, p);
    sum = add(sum, e);
    store(score + p, mul(e, load(stored.gain + p)));
    plain = fma(e, load(stored.shift + p), plain);
    turned = fma(e, load(stored.turned_shift + p), turned);
  }
  out.top() = soft.top();
  out.sum() = reduce_add(sum);
  return {reduce_add(plain), reduce_add(turned)};
}

// `ahead` is fetched meanwhile; `fetched` says that somebody has fetched this span so.
template <class T, int R>
inline void stored_partial(const AttentionArgs& args, SpanReader<T>& span, const Tile<T>& tile, SpanScratch& scratch,
                           Ahead<T>& ahead, bool fetched) {
  static thread_local StoredScratch stored;
  const int dim = args.cache.head_dim, block = span.block_size();
  int low[R], high[R];
  const auto range = visible_range<T, R>(span, tile, low, high);
  const int from = range.first, to = range.second;
  if (from >= to) return;
  span.limit(from, to);
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < dim; ++i) stored.query[r][i] = Elem<T>::widen(tile.q[r][i]);
    std::fill(stored.query[r] + dim, stored.query[r] + padded_dim(dim), 0.0f);
  }
  std::fill(stored.keys.scale + dim, stored.keys.scale + padded_dim(dim), 0.0f);
  std::fill(stored.keys.shift + dim, stored.keys.shift + padded_dim(dim), 0.0f);
  const auto fetch = [&](int b) {
    if (waits_for_memory(R) && !fetched && b <= span.high_block())
      prefetch(span.stored(b).keys(), span.stored(b).bytes());
  };
  // What the pass over `codes` bytes will not fetch by itself is fetched at once.
  const auto share = [&](int64_t codes) -> const char* {
    if (!waits_for_memory(R)) return nullptr;
    const auto [at, bytes] = ahead.take(reinterpret_cast<const char*>(stored.row));
    if (bytes > codes) prefetch(at + codes, bytes - codes);
    return at;
  };
  for (int b = 0; b < kBlocksAhead; ++b) fetch(span.low_block() + b);
  bool turned_keys = false, turned_values = false;
  for (int b = span.low_block(); b <= span.high_block(); ++b) {
    fetch(b + kBlocksAhead);
    const StoredBlock& one = span.stored(b);
    const int at = b * block - span.first();
    const char* next = share(one.key() == Format::kCompute ? 0 : one.values() - one.keys());
    if (is_turned(one.key()) && !turned_keys)
      for (int r = 0; r < R; ++r) {
        std::copy_n(stored.query[r], padded_dim(dim), stored.turned_query[r]);
        turn(stored.turned_query[r], dim);
      }
    turned_keys |= is_turned(one.key());
    turned_values |= is_turned(one.value());
    if (one.key() == Format::kCompute) computed_scores<T, R>(span, tile, one.keys(), at, to, scratch);
    with_format(one.key(), [&](auto f) {
      stored_scores<T, decltype(f)::value, R>(span, one.keys(), one.key_scales(), at, scratch, stored, next);
    });
    std::fill(stored.gain + at, stored.gain + at + block, 1.0f);
    std::fill(stored.shift + at, stored.shift + at + block, 0.0f);
    std::fill(stored.turned_shift + at, stored.turned_shift + at + block, 0.0f);
    with_format(one.value(), [&](auto f) {
      float* shift = is_turned(decltype(f)::value) ? stored.turned_shift : stored.shift;
      read_scales(decltype(f)::value, one.value_scales(), block, stored.gain + at, shift + at);
    });
  }
  const int start = span.low_block() * block - span.first();
  const int end = (span.high_block() + 1) * block - span.first();
  Softness soft[R];
  for (int r = 0; r < R; ++r)
    if (low[r] < high[r]) soft[r] = Softness(scratch.score[r], low[r], high[r], start, end, args);
  Offsets offset[R];
  for (int r = 0; r < R; ++r)
    if (low[r] < high[r]) offset[r] = soften_scaled(soft[r], scratch.score[r], start, end, stored, tile.partial[r]);
  if (turned_values)
    for (int r = 0; r < R; ++r) std::fill_n(stored.turned_acc[r], padded_dim(dim), 0.0f);
  for (int b = span.low_block(); b <= span.high_block(); ++b) {
    const StoredBlock& one = span.stored(b);
    const int at = b * block - span.first();
    const char* next = share(one.value() == Format::kCompute ? 0 : one.key_scales() - one.values());
    if (one.value() == Format::kCompute) {
      T* weight = reinterpret_cast<T*>(scratch.weight);
      const int past = std::min(at + block, to);
      for (int r = 0; r < R; ++r)
        for (int p = at; p < past; p += W) Elem<T>::store(weight + r * kSpan + p, load(scratch.score[r] + p));
      weigh_range<T, R>(span, tile, weight, dim, low, high, at, past);
    }
    with_format(one.value(), [&](auto f) {
      stored_values<T, decltype(f)::value, R>(span, tile, scratch.score, at, stored, one.values(), next);
    });
  }
  const auto add_to = [dim](float* sum, float offset, const float* more) {
    for (int i = 0; i < padded_dim(dim); i += W) {
      const F x = add(load(sum + i), set1(offset));
      store(sum + i, more ? add(x, load(more + i)) : x);
    }
  };
  for (int r = 0; r < R; ++r) {
    if (turned_values) {
      add_to(stored.turned_acc[r], offset[r].turned, nullptr);
      turn(stored.turned_acc[r], dim);
    }
    add_to(tile.partial[r].acc(), offset[r].plain, turned_values ? stored.turned_acc[r] : nullptr);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
