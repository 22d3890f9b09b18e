// x w for a packed weight: [n / 32 panels][k steps][32 columns] words, zero columns at the end.
//
// Rows are interleaved tile by tile once per call, then every panel is multiplied with every tile. Each output
// element is one chain over k, so neither the number of rows nor the number of threads can change its bits.
#pragma once

#include <omp.h>

#include <algorithm>

#include "mma.h"

namespace octavo {
namespace OCTAVO_ISA {

template <class T>
inline int64_t steps_of(int64_t k) {
  return (k + Elem<T>::kPack - 1) / Elem<T>::kPack;
}

inline void interleave_tile(const uint32_t* x, int64_t steps, int rows, uint32_t* out) {
  for (int64_t k = 0; k < steps; ++k)
    for (int r = 0; r < rows; ++r) out[k * rows + r] = x[r * steps + k];
}

template <class T>
inline void store_columns(T* out, const float* values, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) out[c] = Elem<T>::narrow(values[c]);
}

// One finished row of a panel: `value[v]` are its kPanel sums, bias included.
template <class T>
[[gnu::always_inline]] inline void finish_row(const LinearArgs& args, int64_t row, int64_t panel, F* value) {
  const int64_t column = panel * kPanel;
  const bool whole = column + kPanel <= args.n;
  switch (args.epilogue) {
    case Epilogue::kStore: {
      T* out = static_cast<T*>(args.out) + row * args.n + column;
      if (whole) {
        for (int v = 0; v < kPanelVectors; ++v) Elem<T>::store(out + v * W, value[v]);
      } else {
        float lane[kPanel];
        for (int v = 0; v < kPanelVectors; ++v) store(lane + v * W, value[v]);
        store_columns(out, lane, args.n - column);
      }
      break;
    }
    case Epilogue::kStoreFloat:
    case Epilogue::kAdd: {
      float* out = static_cast<float*>(args.out) + row * args.n + column;
      const bool accumulate = args.epilogue == Epilogue::kAdd;
      if (whole) {
        for (int v = 0; v < kPanelVectors; ++v)
          store(out + v * W, accumulate ? add(load(out + v * W), value[v]) : value[v]);
      } else {
        float lane[kPanel];
        for (int v = 0; v < kPanelVectors; ++v) store(lane + v * W, value[v]);
        for (int64_t c = 0; c < args.n - column; ++c) out[c] = accumulate ? out[c] + lane[c] : lane[c];
      }
      break;
    }
    case Epilogue::kSiluGated: {
      constexpr int kHalf = kPanelVectors / 2;
      const int64_t width = args.n / 2, first = panel * (kPanel / 2);
      T* out = static_cast<T*>(args.out) + row * width + first;
      F gated[kHalf];
      for (int v = 0; v < kHalf; ++v) gated[v] = mul(silu(value[v]), value[v + kHalf]);
      if (first + kPanel / 2 <= width) {
        for (int v = 0; v < kHalf; ++v) Elem<T>::store(out + v * W, gated[v]);
      } else {
        float lane[kPanel / 2];
        for (int v = 0; v < kHalf; ++v) store(lane + v * W, gated[v]);
        store_columns(out, lane, width - first);
      }
      break;
    }
  }
}

constexpr int64_t kStepsAhead = 32;

// The first of a panel's tiles reads its words from memory, so it asks for them some steps ahead. The next panel of the
// same thread lies behind this one.
template <class T, int R, bool first>
inline void linear_tile(const LinearArgs& args, const uint32_t* words, int64_t row, int64_t panel) {
  const int64_t steps = steps_of<T>(args.k);
  const uint32_t* weight = static_cast<const uint32_t*>(args.weight) + panel * steps * kPanel;
  F acc[R][kPanelVectors];
  clear(acc);
  mma<T>(acc, InterleavedRows<R>{words},
         [weight](int64_t k, int v) {
           const uint32_t* at = weight + k * kPanel + v * W;
           if (first && v * W % 16 == 0) __builtin_prefetch(at + kStepsAhead * kPanel);
           return load_words(at);
         },
         steps);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    F value[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v)
      value[v] = args.bias ? add(acc[r][v], load(args.bias + panel * kPanel + v * W)) : acc[r][v];
    finish_row<T>(args, row + r, panel, value);
  }
}

template <class T>
void linear(const LinearArgs& args, int threads) {
  constexpr int64_t kRowBlock = 16 * kTileRows;  // its words stay in the second-level cache beside one panel
  const int64_t steps = steps_of<T>(args.k);
  const int64_t panels = (args.n + kPanel - 1) / kPanel;
  const int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = (args.rows + kRowBlock - 1) / kRowBlock;
  static thread_local Scratch<uint32_t> scratch;
  uint32_t* words = scratch.reserve(args.rows * steps);
  const uint32_t* x = static_cast<const uint32_t*>(args.x);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * kTileRows;
      const int rows = int(std::min<int64_t>(kTileRows, args.rows - row));
      interleave_tile(x + row * steps, steps, rows, words + row * steps);
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < panels * blocks; ++unit) {
      const int64_t panel = unit / blocks, block = unit % blocks;
      const int64_t end = std::min(args.rows, (block + 1) * kRowBlock);
      for (int64_t row = block * kRowBlock; row < end; row += kTileRows)
        with_rows(int(std::min<int64_t>(kTileRows, end - row)), [&](auto rows) {
          constexpr int R = decltype(rows)::value;
          if (row == block * kRowBlock)
            linear_tile<T, R, true>(args, words + row * steps, row, panel);
          else
            linear_tile<T, R, false>(args, words + row * steps, row, panel);
        });
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
