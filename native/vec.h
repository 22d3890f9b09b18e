// One vector of W floats and the few operations the kernels are made of, for the instruction set this translation
// unit is compiled for. Every function is elementwise or has a fixed order, so a row's bits never depend on which
// other rows were computed with it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "args.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512F__)

constexpr int W = 16;
constexpr int kTileRows = 12;   // rows x (kPanel / W) vectors of accumulators fit the register file
constexpr int kAccumulators = 24;
using F = __m512;
using U = __m512i;  // W 32-bit words; for bf16 each word is a pair

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline U load_words(const void* p) { return _mm512_loadu_si512(p); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n for whole n that keep the result normal.
inline F scale_exponent(F x, F n) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}
// x - floor(x), and x * 2^floor(n).
inline F fraction(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline F scale_floor(F x, F n) { return _mm512_scalef_ps(x, n); }
inline float reduce_add(F x) {  // halves onto halves, as the loop below does
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
// Lanes from ..< to keep x, the others become y.
inline F keep_lanes(F x, F y, int from, int to) {
  const __mmask16 m = static_cast<__mmask16>(((to >= 16 ? 0xffffu : (1u << to) - 1u)) & ~((1u << from) - 1u));
  return _mm512_mask_blend_ps(m, y, x);
}
// Lane i becomes lane i ^ N.
template <int N>
inline F swap_lanes(F x) {
  const U lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_xor_si512(lane, _mm512_set1_epi32(N)), x);
}
inline F low_half(U w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline F high_half(U w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u)))); }
inline U set1_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline U and_words(U a, U b) { return _mm512_and_si512(a, b); }
inline U or_words(U a, U b) { return _mm512_or_si512(a, b); }
inline U add_words(U a, U b) { return _mm512_add_epi32(a, b); }
inline U sub_words(U a, U b) { return _mm512_sub_epi32(a, b); }
template <int N> inline U shift_left(U a) { return _mm512_slli_epi32(a, N); }
template <int N> inline U shift_right(U a) { return _mm512_srli_epi32(a, N); }
template <int N> inline U shift_signed(U a) { return _mm512_srai_epi32(a, N); }
inline F to_float(U a) { return _mm512_cvtepi32_ps(a); }
inline F as_float(U a) { return _mm512_castsi512_ps(a); }
inline U as_words(F a) { return _mm512_castps_si512(a); }
// W 16-bit numbers, each in the low half of a word.
inline U load_halves(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

// W pairs of 16-bit integers, from bytes in pairs.
inline U load_bytes(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
// W sums of integers. With the type that says so GCC keeps many of them in registers; as `U` it copies them about.
typedef int32_t I __attribute__((vector_size(64)));
inline F to_float(I a) { return _mm512_cvtepi32_ps((U)a); }
// acc + a * b, summed over each pair of 16-bit integers.
#if defined(__AVX512VNNI__)
inline I dot_integers(I acc, U a, U b) { return (I)_mm512_dpwssd_epi32((U)acc, a, b); }
#else
inline I dot_integers(I acc, U a, U b) { return acc + (I)_mm512_madd_epi16(a, b); }
#endif
inline void store_integers(int16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}

// W lanes put together from pieces of P 32-bit words.
template <int P>
inline U load_pieces(const char* const* piece, int64_t bytes) {
  if constexpr (P >= 16) {
    return _mm512_loadu_si512(piece[0] + bytes);
  } else if constexpr (P == 8) {
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece[0] + bytes))),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece[1] + bytes)), 1);
  } else {
    const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece[i] + bytes)); };
    U x = _mm512_castsi128_si512(at(0));
    x = _mm512_inserti32x4(x, at(1), 1);
    x = _mm512_inserti32x4(x, at(2), 2);
    return _mm512_inserti32x4(x, at(3), 3);
  }
}

#if defined(__AVX512BF16__)
constexpr bool kNativeBf16 = true;
inline F dot_pairs(F acc, U a, U b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
inline void store_narrow(bf16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
#else
constexpr bool kNativeBf16 = false;
inline void store_narrow(bf16* p, F x) {
  const U bits = _mm512_castps_si512(x);
  const U lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  U rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

#elif defined(__AVX2__)

constexpr int W = 8;
constexpr int kTileRows = 3;
constexpr int kAccumulators = 12;
constexpr bool kNativeBf16 = false;
using F = __m256;
using U = __m256i;

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline U load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F floor(F x) { return _mm256_floor_ps(x); }
inline F scale_exponent(F x, F n) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline F keep_lanes(F x, F y, int from, int to) {
  const U lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const U inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1)),
                                    _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(inside));
}
template <int N>
inline F swap_lanes(F x) {
  const U lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_permutevar8x32_ps(x, _mm256_xor_si256(lane, _mm256_set1_epi32(N)));
}
inline F low_half(U w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline F high_half(U w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u)))); }
inline U set1_word(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline U and_words(U a, U b) { return _mm256_and_si256(a, b); }
inline U or_words(U a, U b) { return _mm256_or_si256(a, b); }
inline U add_words(U a, U b) { return _mm256_add_epi32(a, b); }
inline U sub_words(U a, U b) { return _mm256_sub_epi32(a, b); }
template <int N> inline U shift_left(U a) { return _mm256_slli_epi32(a, N); }
template <int N> inline U shift_right(U a) { return _mm256_srli_epi32(a, N); }
template <int N> inline U shift_signed(U a) { return _mm256_srai_epi32(a, N); }
inline F to_float(U a) { return _mm256_cvtepi32_ps(a); }
inline F as_float(U a) { return _mm256_castsi256_ps(a); }
inline U as_words(F a) { return _mm256_castps_si256(a); }
inline U load_halves(const void* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline U load_bytes(const void* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
typedef int32_t I __attribute__((vector_size(32)));
inline F to_float(I a) { return _mm256_cvtepi32_ps((U)a); }
inline I dot_integers(I acc, U a, U b) { return acc + (I)_mm256_madd_epi16(a, b); }
inline void store_integers(int16_t* p, F x) {
  const U n = _mm256_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}

template <int P>
inline U load_pieces(const char* const* piece, int64_t bytes) {
  if constexpr (P >= 8) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece[0] + bytes));
  } else {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(piece[0] + bytes))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece[1] + bytes)), 1);
  }
}

inline void store_narrow(bf16* p, F x) {
  const U bits = _mm256_castps_si256(x);
  const U lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  U rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lsb);
  const U nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

#else  // any machine: four lanes of the compiler's own vectors

constexpr int W = 4;
constexpr int kTileRows = 2;
constexpr int kAccumulators = 16;
constexpr bool kNativeBf16 = false;
typedef float F __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));

inline F zero() { return F{0, 0, 0, 0}; }
inline F set1(float x) { return F{x, x, x, x}; }
inline F load(const float* p) { F x; std::memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline U load_words(const void* p) { U x; std::memcpy(&x, p, sizeof x); return x; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }  // two roundings: a fused one is a library call here
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
inline F round(F x) {
  for (int i = 0; i < W; ++i) x[i] = std::nearbyintf(x[i]);
  return x;
}
inline F floor(F x) {
  for (int i = 0; i < W; ++i) x[i] = std::floor(x[i]);
  return x;
}
inline F scale_exponent(F x, F n) { return (F)((I)x + (__builtin_convertvector(n, I) << 23)); }
inline F keep_lanes(F x, F y, int from, int to) {
  const I lane = {0, 1, 2, 3};
  return (lane >= from) & (lane < to) ? x : y;
}
template <int N>
inline F swap_lanes(F x) { return F{x[0 ^ N], x[1 ^ N], x[2 ^ N], x[3 ^ N]}; }
inline F low_half(U w) { return (F)(w << 16); }
inline F high_half(U w) { return (F)(w & 0xffff0000u); }
inline U set1_word(uint32_t x) { return U{x, x, x, x}; }
inline U and_words(U a, U b) { return a & b; }
inline U or_words(U a, U b) { return a | b; }
inline U add_words(U a, U b) { return a + b; }
inline U sub_words(U a, U b) { return a - b; }
template <int N> inline U shift_left(U a) { return a << N; }
template <int N> inline U shift_right(U a) { return a >> N; }
template <int N> inline U shift_signed(U a) { return (U)((I)a >> N); }
inline F to_float(I a) { return __builtin_convertvector(a, F); }
inline F to_float(U a) { return to_float((I)a); }
inline F as_float(U a) { return (F)a; }
inline U as_words(F a) { return (U)a; }
inline U load_halves(const void* p) {
  uint16_t x[W];
  std::memcpy(x, p, sizeof x);
  return U{x[0], x[1], x[2], x[3]};
}
inline U load_bytes(const void* p) {
  const U x = load_halves(p);
  return ((U)((I)(x << 24) >> 24) & 0xffffu) | ((U)((I)(x << 16) >> 24) << 16);
}
inline I dot_integers(I acc, U a, U b) {
  return acc + ((I)(a << 16) >> 16) * ((I)(b << 16) >> 16) + ((I)a >> 16) * ((I)b >> 16);
}
inline void store_integers(int16_t* p, F x) {
  x = round(x);
  for (int i = 0; i < W; ++i) p[i] = static_cast<int16_t>(x[i]);
}
template <int P>
inline U load_pieces(const char* const* piece, int64_t bytes) { return load_words(piece[0] + bytes); }
inline void store_narrow(bf16* p, F x) {
  const U bits = (U)x;
  U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  for (int i = 0; i < W; ++i) p[i].bits = static_cast<uint16_t>(x[i] == x[i] ? rounded[i] : 0x7fc0u);
}

#endif

#if !defined(__AVX512BF16__)
inline F dot_pairs(F acc, U a, U b) {
  acc = fma(low_half(a), low_half(b), acc);
  return fma(high_half(a), high_half(b), acc);
}
#endif

constexpr int kPanelVectors = kPanel / W;

// ---- what differs between the two compute types ----

// `kPack` elements share one 32-bit word; a k step multiplies one word of a row with one word of each column.
template <class T>
struct Elem;

template <>
struct Elem<float> {
  static constexpr int kPack = 1;
  static F step(F acc, U a, U b) { return fma(as_float(a), as_float(b), acc); }
  // `pair`: two consecutive elements of a row, against columns of bf16 pairs.
  static F step_pair(F acc, const float* pair, U columns) {
    acc = fma(set1(pair[0]), low_half(columns), acc);
    return fma(set1(pair[1]), high_half(columns), acc);
  }
  static void store(float* p, F x) { OCTAVO_ISA::store(p, x); }
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
};

template <>
struct Elem<bf16> {
  static constexpr int kPack = 2;
  static F step(F acc, U a, U b) { return dot_pairs(acc, a, b); }
  static F step_pair(F acc, const bf16* pair, U columns) {
    uint32_t word;
    std::memcpy(&word, pair, sizeof word);
    return dot_pairs(acc, set1_word(word), columns);
  }
  static void store(bf16* p, F x) { store_narrow(p, x); }
  static float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  }
  // By way of the vector store, so that a tail rounds as the body does.
  static bf16 narrow(float x) {
    bf16 lanes[W];
    store_narrow(lanes, set1(x));
    return lanes[0];
  }
};

// ---- functions built from the above, the same for every type ----

#if !defined(__AVX512F__)
inline F fraction(F x) { return sub(x, floor(x)); }
inline F scale_floor(F x, F n) { return scale_exponent(x, floor(n)); }
inline float reduce_add(F x) {
  float lane[W];
  store(lane, x);
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  return lane[0];
}

inline float reduce_max(F x) {
  float lane[W];
  store(lane, x);
  float m = lane[0];
  for (int i = 1; i < W; ++i) m = lane[i] > m ? lane[i] : m;
  return m;
}
#endif

inline F abs(F x) { return as_float(and_words(as_words(x), set1_word(0x7fffffff))); }

// One step of a Hadamard transform: lanes whose bit `N` is clear get the sum of both, the others the difference.
template <int N>
inline F butterfly(F x) {
  alignas(64) float sign[W];
  for (int i = 0; i < W; ++i) sign[i] = i & N ? -1.0f : 1.0f;
  return fma(x, load(sign), swap_lanes<N>(x));
}

// exp(x), about 1 ulp; x is clamped to where the result is a normal number. exp(0) is exactly 1.
inline F exp(F x) {
  x = min(max(x, set1(-86.0f)), set1(88.0f));
  const F n = round(mul(x, set1(1.44269504f)));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.3888889e-3f);
  p = fma(p, r, set1(8.3333333e-3f));
  p = fma(p, r, set1(4.1666667e-2f));
  p = fma(p, r, set1(1.6666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale_exponent(p, n);
}

// 2^x for x of at most 127, about 1 ulp; below -126 it is 2^-126. exp2(0) is exactly 1.
inline F exp2(F x) {
  x = max(x, set1(-126.0f));
  const F r = fraction(x);
  F p = set1(0.000217150253f);
  p = fma(p, r, set1(0.00124408771f));
  p = fma(p, r, set1(0.00967806387f));
  p = fma(p, r, set1(0.0554841525f));
  p = fma(p, r, set1(0.240229513f));
  p = fma(p, r, set1(0.693147032f));
  p = fma(p, r, set1(1.0f));
  return scale_floor(p, x);
}

inline F tanh(F x) {
  const F e = exp(mul(x, set1(2.0f)));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
