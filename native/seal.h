// Sealed blocks in 8, 4 or 2 bits: how they are made, and how their numbers are got back.
#pragma once

#include "stored.h"

namespace octavo {
namespace OCTAVO_ISA {

inline uint8_t to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  float a = std::min(std::fabs(x), 448.0f);
  if (a < 0.015625f) return sign | uint8_t(std::nearbyintf(a * 512.0f));  // 8 of them are the smallest normal one
  int exponent;
  const float fraction = std::frexp(a, &exponent);  // in [0.5, 1)
  const int mantissa = int(std::nearbyintf(fraction * 16.0f));  // 8 to 16
  return sign | uint8_t(((exponent + 6) << 3) + mantissa - 8);
}

// Numbers x[i * stride] of one scale to codes (not yet packed) and the pair that reads them back.
struct Quantiser {
  float scale, inverse, zero;
  int levels, half;

  // The least and the largest number there is, and the bits of a code.
  Quantiser(float low, float high, int bits) : levels((1 << bits) - 1), half(1 << (bits - 1)) {
    const float most = std::max(std::fabs(low), std::fabs(high));
    // Wide enough for the zero point, which with half a range is less than 2048 steps away, and far from where bf16 ends.
    float wanted = std::max({high / float(levels) - low / float(levels), most * (1.0f / 1900.0f), 1e-30f});
    bf16 narrow = Elem<bf16>::narrow(wanted);
    if (Elem<bf16>::widen(narrow) < wanted) ++narrow.bits;
    scale = Elem<bf16>::widen(narrow);
    inverse = 1.0f / scale;
    zero = std::nearbyintf(low * inverse * 16.0f) * 0.0625f;
  }
  int code(float x) const {
    return std::clamp(int(std::nearbyintf(x * inverse - zero)), 0, levels);
  }
  int16_t stored_zero() const { return int16_t((zero + float(half)) * 16.0f); }
};

inline void put_code(uint8_t* byte, int bits, int unit, int code, int half) {
  if (bits == 8) *byte = uint8_t(code - half);  // signed
  else *byte |= uint8_t(code << (bits * unit));
}

// Where the code of (position p, dimension d) lies, `units` of them to a byte: the byte, and the unit inside it.
inline std::pair<int64_t, int> place_of(int p, int d, int dim, int units, bool keys) {
  if (keys)
    return {((int64_t(p / kStoredPanel) * (dim / (2 * units)) + d / (2 * units)) * kStoredPanel + p % kStoredPanel) * 2 +
                d % 2, d / 2 % units};
  return {(int64_t(p / (2 * units)) * dim + d) * 2 + p % 2, p / 2 % units};
}

// One panel of numbers x [positions][dim], which it may change, to codes and scales.
inline void seal_panel(Format format, float* x, int positions, int dim, bool keys, uint8_t* codes, char* meta) {
  const int bits = bits_of(format, 0), units = 8 / bits;
  const int64_t bytes = int64_t(positions) * dim * bits / 8;
  if (format == Format::kFp8) {
    float most = 0.0f;
    for (int64_t i = 0; i < int64_t(positions) * dim; ++i) most = std::max(most, std::fabs(x[i]));
    const float scale = std::max(most / 448.0f, 1e-30f), inverse = 1.0f / scale;
    for (int p = 0; p < positions; ++p)
      for (int d = 0; d < dim; ++d) codes[place_of(p, d, dim, units, keys).first] = to_e4m3(x[int64_t(p) * dim + d] * inverse);
    std::memcpy(meta, &scale, sizeof scale);
    return;
  }
  if (is_turned(format)) turn_rows(x, positions, dim);
  std::fill(codes, codes + bytes, uint8_t(0));
  const int count = keys ? dim : positions;
  bf16* scales = reinterpret_cast<bf16*>(meta);
  int16_t* zeros = reinterpret_cast<int16_t*>(meta + count * sizeof(bf16));
  for (int i = 0; i < count; ++i) {
    const int64_t first = keys ? i : int64_t(i) * dim, stride = keys ? dim : 1;
    const int others = keys ? positions : dim;
    float low = x[first], high = x[first];
    for (int j = 1; j < others; ++j) {
      low = std::min(low, x[first + j * stride]);
      high = std::max(high, x[first + j * stride]);
    }
    const Quantiser q(low, high, bits);
    scales[i] = Elem<bf16>::narrow(q.scale);
    zeros[i] = q.stored_zero();
    for (int j = 0; j < others; ++j) {
      const auto [byte, unit] = keys ? place_of(j, i, dim, units, keys) : place_of(i, j, dim, units, keys);
      put_code(codes + byte, bits, unit, q.code(x[first + j * stride]), q.half);
    }
  }
}

// The numbers of one panel, [positions][dim].
inline void unseal_panel(Format format, const uint8_t* codes, const char* meta, int positions, int dim, bool keys,
                         float* x) {
  const int bits = bits_of(format, 0), units = 8 / bits, half = 1 << (bits - 1);
  const int count = keys ? dim : positions;
  std::vector<float> scale(count), shift(count);
  read_scales(format, meta, count, scale.data(), shift.data());
  for (int p = 0; p < positions; ++p)
    for (int d = 0; d < dim; ++d) {
      const auto [byte, unit] = place_of(p, d, dim, units, keys);
      float code;
      if (format == Format::kFp8) {
        float lane[W];
        store(lane, e4m3(set1_word(codes[byte])));
        code = lane[0];
      } else {
        code = bits == 8 ? float(int8_t(codes[byte])) : float((codes[byte] >> (bits * unit) & ((1 << bits) - 1)) - half);
      }
      const int i = keys ? d : p;
      x[int64_t(p) * dim + d] = code * scale[i] + shift[i];
    }
  if (is_turned(format)) turn_rows(x, positions, dim);
}

// Keys and values of a block at compute precision as [block_size][head_dim] floats.
template <class T>
inline void read_computed(const char* head, int block, int dim, bool keys, float* x) {
  constexpr int E = Elem<T>::kPack;
  const int width = std::min(16, block);
  const T* from = reinterpret_cast<const T*>(head);
  for (int p = 0; p < block; ++p)
    for (int d = 0; d < dim; ++d) {
      const int64_t at = keys ? (int64_t(p / width) * (dim / E) + d / E) * width * E + int64_t(p % width) * E + d % E
                              : (int64_t(p / E) * dim + d) * E + p % E;
      x[int64_t(p) * dim + d] = Elem<T>::widen(from[at]);
    }
}

// Reads a block in any form: `x` gets its keys or its values.
template <class T>
inline void read_panel(const CacheView& c, const StoredBlock& from, bool keys, float* x) {
  const Format format = keys ? from.key() : from.value();
  const char* codes = keys ? from.keys() : from.values();
  if (format == Format::kCompute)
    read_computed<T>(codes, c.block_size, c.head_dim, keys, x);
  else
    unseal_panel(format, reinterpret_cast<const uint8_t*>(codes), keys ? from.key_scales() : from.value_scales(),
                 c.block_size, c.head_dim, keys, x);
}

// Writes one layer of blocks in the form of their new entries.
template <class T>
void seal(const SealArgs& args, int threads) {
  const CacheView& c = args.cache;
#pragma omp parallel num_threads(threads) if (args.blocks * c.kv_heads > 1)
  {
    static thread_local Scratch<float> scratch;
    float* x = scratch.reserve(size_t(c.block_size) * c.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < args.blocks * c.kv_heads; ++i) {
      const int64_t* pair = args.from_to + i / c.kv_heads * 2;
      StoredBlock from(c), to(c);
      from.find<T>(c, {pair[0]}, int(i % c.kv_heads));
      to.find<T>(c, {pair[1]}, int(i % c.kv_heads));
      for (const bool keys : {true, false}) {
        const Format format = keys ? to.key() : to.value();
        char* codes = keys ? to.keys() : to.values();
        if (format == Format::kCompute) {  // only the other half is stored in another form
          std::memcpy(codes, keys ? from.keys() : from.values(), sizeof(T) * c.block_size * c.head_dim);
          continue;
        }
        read_panel<T>(c, from, keys, x);
        seal_panel(format, x, c.block_size, c.head_dim, keys, reinterpret_cast<uint8_t*>(codes),
                   keys ? to.key_scales() : to.value_scales());
      }
    }
  }
}

// The numbers of blocks (the first entry of each pair) as floats [blocks][kv_heads][block_size][head_dim].
template <class T>
void unseal(const SealArgs& args, float* k, float* v) {
  const CacheView& c = args.cache;
  const int64_t size = int64_t(c.block_size) * c.head_dim;
  StoredBlock from(c);
  for (int head = 0; head < c.kv_heads; ++head) {
    from = StoredBlock(c);
    for (int64_t i = 0; i < args.blocks; ++i) {
      from.find<T>(c, {args.from_to[i * 2]}, head);
      read_panel<T>(c, from, true, k + (i * c.kv_heads + head) * size);
      read_panel<T>(c, from, false, v + (i * c.kv_heads + head) * size);
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
