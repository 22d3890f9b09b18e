// One span's contribution to a row's attention, and how contributions are put together.
#pragma once

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
  const F keep = state.top() == kNothing ? zero() : exp2(set1(state.top() - top));
  const F take = exp2(set1(span.top() - top));
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

}  // namespace OCTAVO_ISA
}  // namespace octavo
