// The register tile under every product here: projections, scores and weighted values.
#pragma once

#include <array>
#include <utility>

#include "vec.h"

namespace octavo {
namespace OCTAVO_ISA {

// acc[r][v] += sum over k of a(k, r) * b(k, v): one word (a value, or a bf16 pair) of R rows against NV vectors of
// columns. k runs upwards for every element, whatever R and NV are, which is what makes a row's bits its own.
template <class T, int R, int NV, class A, class B>
[[gnu::always_inline]] inline void mma(F (&acc)[R][NV], const A& a, const B& b, int64_t steps) {
  for (int64_t k = 0; k < steps; ++k) {
    U column[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) column[v] = b(k, v);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const U word = set1_word(a(k, r));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = Elem<T>::step(acc[r][v], word, column[v]);
    }
  }
}

template <int R, int NV>
[[gnu::always_inline]] inline void clear(F (&acc)[R][NV]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
}

// Rows interleaved word by word: [k][R].
template <int R>
struct InterleavedRows {
  const uint32_t* words;
  uint32_t operator()(int64_t k, int r) const { return words[k * R + r]; }
};

// Calls body(std::integral_constant<int, R>) with R = rows, for 1 <= rows <= kTileRows.
template <class Body, int... I>
inline void with_rows_impl(int rows, Body&& body, std::integer_sequence<int, I...>) {
  ((rows == I + 1 ? (body(std::integral_constant<int, I + 1>{}), 0) : 0), ...);
}
template <class Body>
inline void with_rows(int rows, Body&& body) {
  with_rows_impl(rows, static_cast<Body&&>(body), std::make_integer_sequence<int, kTileRows>{});
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
