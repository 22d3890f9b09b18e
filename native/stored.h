// Sealed blocks in 8, 4 or 2 bits: where their parts lie, and how they are read.
//
//   head  = codes of K, codes of V, scales and zero points of K, those of V; a multiple of 64 bytes
//   codes = K [block_size / 16][head_dim / 2U][16][2], V [block_size / 2U][head_dim][2]
//
// A byte holds U codes, lowest bits first: those of U consecutive pairs (of dimensions for K, of positions for V).
// Keys have a scale per dimension of the block, values one per position (KIVI, arXiv 2402.02750):
// x = scale * (code + zero), scale in bf16, zero in sixteenths as int16. fp8 (e4m3) has one float32 scale for all keys
// of the block's head and one for all values, and no zero.
//
// Scales are multiplied into the query, or the weights, before these meet codes. Codes of 4 and 2 bits and e4m3 values
// are numbers that bf16 holds exactly, and are read as pairs of bf16. Codes of 8 bits are read as 16-bit integers: the
// row is rounded to such integers too, 32767 of them to its largest, and the sum of the products is exact.
//
// With 4 and 2 bits a head's keys and values are turned by a Hadamard matrix before they are stored (QuaRot, arXiv
// 2404.00456), which spreads what stands out over all dimensions; the query is turned too, and the answer turned back.
#pragma once

#include <algorithm>

#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kStoredPanel = 16;  // positions of a panel of keys

// One head of one layer of a block, wherever and however it is stored.
class StoredBlock {
 public:
  explicit StoredBlock(const CacheView& c) : parts_(Format::kCompute, Format::kCompute, c.block_size, c.head_dim, 16) {}

  template <class T>
  StoredBlock& find(const CacheView& c, const Entry& entry, int head) {
    if (entry.tag() != tag_) {  // blocks of one form mostly follow each other
      tag_ = entry.tag();
      const auto parts = [&](Format k, Format v) { return StoredHead(k, v, c.block_size, c.head_dim, 8 * sizeof(T)); };
      parts_ = parts(entry.key(), entry.value());
      const int64_t layer = c.layer_offset / (c.kv_heads * parts(Format::kCompute, Format::kCompute).bytes);
      skip_ = (layer * c.kv_heads + head) * parts_.bytes;
    }
    entry_ = entry;
    base_ = c.arena + entry.offset() + skip_;
    return *this;
  }

  Format key() const { return entry_.key(); }
  Format value() const { return entry_.value(); }
  char* keys() const { return base_; }
  char* values() const { return base_ + parts_.value_codes; }
  char* key_scales() const { return base_ + parts_.key_meta; }
  char* value_scales() const { return base_ + parts_.value_meta; }
  int64_t bytes() const { return parts_.bytes; }

 private:
  StoredHead parts_;
  Entry entry_{-1};
  int64_t tag_ = -1, skip_ = 0;
  char* base_ = nullptr;
};

// ---- Hadamard ----

constexpr bool is_turned(Format format) { return format == Format::kInt2 || format == Format::kInt4; }

// Turns x [dim], which may be read and written up to a whole vector, in place, in groups as long as the largest power of
// two that divides dim. Twice is not at all.
inline void turn(float* x, int dim) {
  const int group = dim & -dim, padded = (dim + W - 1) / W * W;
  const F unit = set1(1.0f / std::sqrt(float(group)));
  for (int i = 0; i < padded; i += W) {
    F v = mul(load(x + i), unit);
    if (group > 1) v = butterfly<1>(v);
    if (group > 2) v = butterfly<2>(v);
    if constexpr (W > 4) if (group > 4) v = butterfly<4>(v);
    if constexpr (W > 8) if (group > 8) v = butterfly<8>(v);
    store(x + i, v);
  }
  for (int step = W; step < group; step *= 2)
    for (int i = 0; i < dim; i += 2 * step)
      for (int j = i; j < i + step; j += W) {
        const F a = load(x + j), b = load(x + j + step);
        store(x + j, add(a, b));
        store(x + j + step, sub(a, b));
      }
}

// The same for every row of x [rows][dim].
inline void turn_rows(float* x, int rows, int dim) {
  float row[kMaxHeadDim + W] = {};
  for (int r = 0; r < rows; ++r) {
    std::copy_n(x + int64_t(r) * dim, dim, row);
    turn(row, dim);
    std::copy_n(row, dim, x + int64_t(r) * dim);
  }
}

// ---- scales ----

struct Scales {
  alignas(64) float scale[kMaxHeadDim + W];
  alignas(64) float shift[kMaxHeadDim + W];  // scale * zero
};

// `count` scales and zeros; what is beyond them is 0.
inline void read_scales(Format format, const char* meta, int count, float* scale, float* shift) {
  if (format == Format::kFp8) {
    float one;
    std::memcpy(&one, meta, sizeof one);
    std::fill(scale, scale + count, one);
    std::fill(shift, shift + count, 0.0f);
  } else {
    const bf16* scales = reinterpret_cast<const bf16*>(meta);
    const int16_t* zeros = reinterpret_cast<const int16_t*>(meta + count * sizeof(bf16));
    for (int i = 0; i < count; ++i) {
      scale[i] = Elem<bf16>::widen(scales[i]);
      shift[i] = scale[i] * (float(zeros[i]) * 0.0625f);
    }
  }
}

// ---- codes to pairs of bf16 ----

inline U pair_of(F even, F odd) {
  return or_words(and_words(as_words(odd), set1_word(0xffff0000u)), shift_right<16>(as_words(even)));
}

// The value of e4m3 codes in the lowest bits of each word.
inline F e4m3(U code) {
  const U magnitude = and_words(code, set1_word(0x7f));
  const U tiny = shift_signed<31>(sub_words(magnitude, set1_word(8)));  // all ones: no implicit leading one
  const U bits = shift_left<20>(magnitude);
  const U normal = add_words(bits, set1_word(120u << 23));
  const U small = as_words(sub(as_float(or_words(bits, set1_word(121u << 23))), set1(0.015625f)));
  const U chosen = or_words(and_words(small, tiny), and_words(normal, sub_words(set1_word(0xffffffffu), tiny)));
  return as_float(or_words(chosen, shift_left<24>(and_words(code, set1_word(0x80)))));
}

// What one word of a row of codes holds: kUnits pairs, the one `S` taken out by `pair<S>`.
template <Format>
struct Codes;

template <>
struct Codes<Format::kFp8> {
  static constexpr int kUnits = 1;
  static U load(const char* p) { return load_halves(p); }
  template <int S>
  static U pair(U x) { return pair_of(e4m3(and_words(x, set1_word(0xff))), e4m3(shift_right<8>(x))); }
};

// The bits of a whole number from -8 to 7 as bf16.
constexpr uint16_t small_bf16(int x) {
  const int size = x < 0 ? -x : x;
  if (!size) return 0;
  const int exponent = size >= 8 ? 3 : size >= 4 ? 2 : size >= 2 ? 1 : 0;
  return uint16_t((x < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((size << 7 >> exponent) & 0x7f));
}

// Codes of B bits, offset by half their range.
template <int B>
struct SmallCodes {
  static constexpr int kUnits = 8 / B;
#if defined(__AVX512BW__)
  static U load(const char* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // The index is the lowest five bits, so the table repeats itself.
  struct Table {
    alignas(64) uint16_t word[32];
    constexpr Table() : word() {
      for (int i = 0; i < 32; ++i) word[i] = small_bf16(i % (1 << B) - (1 << (B - 1)));
    }
  };
  static constexpr Table kTable{};
  template <int S>
  static U pair(U x) { return _mm512_permutexvar_epi16(_mm512_srli_epi16(x, B * S), _mm512_load_si512(kTable.word)); }
#else
  static U load(const char* p) { return load_halves(p); }
  template <int S>
  static U pair(U x) {
    const U mask = set1_word((1u << B) - 1), half = set1_word(1u << (B - 1));
    return pair_of(to_float(sub_words(and_words(shift_right<B * S>(x), mask), half)),
                   to_float(sub_words(and_words(shift_right<8 + B * S>(x), mask), half)));
  }
#endif
};
template <>
struct Codes<Format::kInt4> : SmallCodes<4> {};
template <>
struct Codes<Format::kInt2> : SmallCodes<2> {};

template <>
struct Codes<Format::kInt8> {
  static constexpr int kUnits = 1;
  static U load(const char* p) { return load_bytes(p); }
  template <int S>
  static U pair(U x) { return x; }
};

// How a row of numbers (a query, or weights) meets codes: as numbers of the compute type.
template <class T, Format>
struct RowOf {
  using Value = T;
  using Sum = F;
  // Writes `count` numbers, a multiple of W, in the form they meet codes in. Returns the unit that sums are in.
  static float put(T* row, const float* x, int count) {
    for (int i = 0; i < count; i += W) Elem<T>::store(row + i, load(x + i));
    return 1.0f;
  }
  static F begin(F x) { return x; }
  static F step(F acc, const T* pair, U codes) { return Elem<T>::step_pair(acc, pair, codes); }
  static F end(F acc, float, F) { return acc; }
};

// As 16-bit integers. The sum of 512 products, which is the most there are, is below 2^31.
template <class T>
struct RowOf<T, Format::kInt8> {
  using Value = int16_t;
  using Sum = I;
  static float put(int16_t* row, const float* x, int count) {
    F most = zero();
    for (int i = 0; i < count; i += W) most = max(most, abs(load(x + i)));
    const float top = reduce_max(most);
    const F inverse = set1(top > kLeast ? 32767.0f / top : 0.0f);
    for (int i = 0; i < count; i += W) store_integers(row + i, mul(load(x + i), inverse));
    return top * (1.0f / 32767.0f);
  }
  static constexpr float kLeast = 1e-30f;  // its inverse is still finite
  static I begin(F) { return I{}; }
  static I step(I acc, const int16_t* pair, U codes) {
    uint32_t word;
    std::memcpy(&word, pair, sizeof word);
    return dot_integers(acc, set1_word(word), codes);
  }
  static F end(I acc, float unit, F x) { return fma(to_float(acc), set1(unit), x); }
};

// With few rows the memory is what one waits for.
constexpr bool waits_for_memory(int rows) { return rows * 2 <= kTileRows; }

// acc[r][v] += pairs of row r (at row(r) + 2 * step) times codes, whose `NV` vectors lie W * 2 bytes from each other at
// codes(v) + unit * stride. Steps run upwards for every element. As many bytes as are read are fetched from `ahead` on.
template <class T, Format F8, int R, int NV, class Row, class At>
[[gnu::always_inline]] inline void mma_codes(typename RowOf<T, F8>::Sum (&acc)[R][NV], const Row& row, const At& at,
                                             int64_t stride, int units, const char* ahead) {
  using C = Codes<F8>;
  for (int u = 0; u < units; ++u) {
    if constexpr (waits_for_memory(R)) {
      constexpr int kBytes = NV * W * 2;
      for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead + u * kBytes + i, 0, 2);
    }
    U raw[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) raw[v] = C::load(at(v) + u * stride);
    const auto step = [&](auto s) {
      U column[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) column[v] = C::template pair<decltype(s)::value>(raw[v]);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const auto* pair = row(r) + 2 * (u * C::kUnits + decltype(s)::value);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] = RowOf<T, F8>::step(acc[r][v], pair, column[v]);
      }
    };
    step(std::integral_constant<int, 0>{});
    if constexpr (C::kUnits >= 2) step(std::integral_constant<int, 1>{});
    if constexpr (C::kUnits >= 4) {
      step(std::integral_constant<int, 2>{});
      step(std::integral_constant<int, 3>{});
    }
  }
}

// Calls body(std::integral_constant<Format, f>) for the stored format `f`.
template <class Body>
inline void with_format(Format f, Body&& body) {
  switch (f) {
    case Format::kFp8: body(std::integral_constant<Format, Format::kFp8>{}); break;
    case Format::kInt8: body(std::integral_constant<Format, Format::kInt8>{}); break;
    case Format::kInt4: body(std::integral_constant<Format, Format::kInt4>{}); break;
    case Format::kInt2: body(std::integral_constant<Format, Format::kInt2>{}); break;
    default: break;
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
