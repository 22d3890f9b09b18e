// Kernels that work row by row: the norm, and what goes into the cache.
#pragma once

#include <omp.h>

#include <algorithm>

#include "vec.h"

namespace octavo {
namespace OCTAVO_ISA {

// 1 / sqrt(mean(x^2) + eps), summed in W lanes and a tail of single elements.
inline float inverse_rms(const float* x, int64_t dim, float eps) {
  F sum = zero();
  int64_t i = 0;
  for (; i + W <= dim; i += W) sum = fma(load(x + i), load(x + i), sum);
  float total = reduce_add(sum);
  for (; i < dim; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / float(dim) + eps);
}

template <class T>
void rms_norm(const NormArgs& args, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (args.rows > 4)
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* x = args.x + row * args.dim;
    T* out = static_cast<T*>(args.out) + row * args.dim;
    const float scale = inverse_rms(x, args.dim, args.eps);
    int64_t i = 0;
    for (; i + W <= args.dim; i += W)
      Elem<T>::store(out + i, mul(mul(load(x + i), set1(scale)), load(args.weight + i)));
    for (; i < args.dim; ++i) out[i] = Elem<T>::narrow(x[i] * scale * args.weight[i]);
  }
}

// Where one position of one head goes: element `dim` of K is at key[dim / E * key_stride + dim % E], of V at
// value[dim * E], with E elements per word.
template <class T>
struct Slot {
  T* key;
  T* value;
  int64_t key_stride;

  Slot(const WriteArgs& args, int64_t row, int head) {
    constexpr int E = Elem<T>::kPack;
    const CacheView& c = args.cache;
    const int width = std::min(16, c.block_size);
    const int slot = args.positions[row] % c.block_size;
    const int64_t plane = int64_t(c.block_size) * c.head_dim;
    T* k = reinterpret_cast<T*>(c.arena + args.blocks[row] + c.layer_offset) + head * 2 * plane;
    key_stride = int64_t(width) * E;
    key = k + int64_t(slot / width) * width * c.head_dim + (slot % width) * E;
    value = k + plane + int64_t(slot / E) * c.head_dim * E + slot % E;
  }

  void put_key(const T* x, int dim) const {
    for (int i = 0; i < dim; i += Elem<T>::kPack)
      std::memcpy(key + i / Elem<T>::kPack * key_stride, x + i, sizeof(uint32_t));
  }
  void put_value(const T* x, int dim) const {
    for (int i = 0; i < dim; ++i) value[i * Elem<T>::kPack] = x[i];
  }
};

constexpr int kMaxHeadDim = 512;

// Whole vectors: `x` and `out` have room up to the next multiple of W.
template <class T>
inline void narrow_padded(const float* x, T* out, int dim) {
  for (int i = 0; i < dim; i += W) Elem<T>::store(out + i, load(x + i));
}

// Norm (where there is one) and rotation of one head: the first half of the dimensions with the second.
inline void rotate_head(const float* x, const float* norm, float eps, const float* cos, const float* sin, int dim,
                        float* out) {
  float normed[kMaxHeadDim];
  if (norm) {
    const float scale = inverse_rms(x, dim, eps);
    for (int i = 0; i < dim; ++i) normed[i] = x[i] * scale * norm[i];
    x = normed;
  }
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    out[i] = x[i] * cos[i] - x[i + half] * sin[i];
    out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
  }
}

// The query heads of one row of qkv, rotated to `position`.
template <class T>
inline void rotate_queries(const RopeWriteArgs& args, const float* x, int position, T* q) {
  const int dim = args.write.cache.head_dim;
  const float* cos = args.cos + int64_t(position) * (dim / 2);
  const float* sin = args.sin + int64_t(position) * (dim / 2);
  float head[kMaxHeadDim + W];
  T narrow[kMaxHeadDim + W];
  for (int h = 0; h < args.write.q_heads; ++h, x += dim, q += dim) {
    rotate_head(x, args.q_norm, args.eps, cos, sin, dim, head);
    narrow_padded(head, narrow, dim);
    std::memcpy(q, narrow, sizeof(T) * dim);
  }
}

template <class T>
void rope_write(const RopeWriteArgs& args, int threads) {
  const WriteArgs& w = args.write;
  const int dim = w.cache.head_dim, kv_heads = w.cache.kv_heads;
  const int64_t width = int64_t(w.q_heads + 2 * kv_heads) * dim, q_width = int64_t(w.q_heads) * dim;
  T* q = static_cast<T*>(args.q_out);
  for (int64_t i = 0; i < args.moved; ++i)
    rotate_queries(args, args.qkv + args.moved_rows[i] * width, args.moved_positions[i], q + (w.rows + i) * q_width);
#pragma omp parallel for schedule(static) num_threads(threads) if (w.rows > 4)
  for (int64_t row = 0; row < w.rows; ++row) {
    const float* cos = args.cos + int64_t(w.positions[row]) * (dim / 2);
    const float* sin = args.sin + int64_t(w.positions[row]) * (dim / 2);
    rotate_queries(args, args.qkv + row * width, w.positions[row], q + row * q_width);
    const float* x = args.qkv + row * width + q_width;
    float head[kMaxHeadDim + W];
    T narrow[kMaxHeadDim + W];
    for (int h = 0; h < kv_heads; ++h, x += dim) {
      rotate_head(x, args.k_norm, args.eps, cos, sin, dim, head);
      narrow_padded(head, narrow, dim);
      Slot<T>(w, row, h).put_key(narrow, dim);
    }
    for (int h = 0; h < kv_heads; ++h, x += dim) {
      std::memcpy(head, x, sizeof(float) * dim);
      narrow_padded(head, narrow, dim);
      Slot<T>(w, row, h).put_value(narrow, dim);
    }
  }
}

template <class T>
void cache_write(const StoreArgs& args, int threads) {
  const WriteArgs& w = args.write;
#pragma omp parallel for schedule(static) num_threads(threads) if (w.rows > 4)
  for (int64_t row = 0; row < w.rows; ++row)
    for (int h = 0; h < w.cache.kv_heads; ++h) {
      const Slot<T> slot(w, row, h);
      const T* k = static_cast<const T*>(args.k) + row * args.k_row_stride + h * args.k_head_stride;
      const T* v = static_cast<const T*>(args.v) + row * args.v_row_stride + h * args.v_head_stride;
      slot.put_key(k, w.cache.head_dim);
      slot.put_value(v, w.cache.head_dim);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
