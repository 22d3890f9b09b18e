// The Python face of the kernels; the only file that knows nanobind.
//
// Tensors come as addresses: octavo/kernels/native.py checks shapes and types once and passes integers, since an
// array protocol call per argument would cost more than the small kernels themselves.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "args.h"
#include "memory.h"
#include "plan.h"
#include "sample.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

Kernels generic_kernels();
#if defined(__x86_64__)
Kernels avx2_kernels();
Kernels avx512_kernels();
Kernels avx512bf16_kernels();
#endif

namespace {

std::vector<Kernels> supported() {
  std::vector<Kernels> all{generic_kernels()};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.push_back(avx2_kernels());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    all.push_back(avx512_kernels());
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) all.push_back(avx512bf16_kernels());
  }
#endif
  return all;
}

Kernels active = supported().back();
int threads = 1;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void select(const std::string& name) {
  for (const Kernels& k : supported())
    if (name == k.name) {
      active = k;
      return;
    }
  throw std::invalid_argument("no kernel path '" + name + "' on this machine");
}

std::vector<std::string> paths() {
  std::vector<std::string> names;
  for (const Kernels& k : supported()) names.push_back(k.name);
  return names;
}

// How many threads a kernel really gets.
int observed_threads() {
  int count = 0;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    count = omp_get_num_threads();
  }
  return count;
}

void pack(uintptr_t weight, uintptr_t out, int64_t n, int64_t k, int itemsize) {
  const int64_t steps = k * itemsize / 4;
  const uint32_t* w = at<uint32_t>(weight);
  uint32_t* packed = at<uint32_t>(out);
  const int64_t panels = (n + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t c = 0; c < kPanel; ++c)
      for (int64_t i = 0; i < steps; ++i)
        packed[(p * steps + i) * kPanel + c] = p * kPanel + c < n ? w[(p * kPanel + c) * steps + i] : 0;
}

using IntArray = nb::ndarray<const int32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LongArray = nb::ndarray<const int64_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// `segments` is [n][6]: first_row, rows, first_position, where the table starts in `tables`, its length, sinks.
// `dropped` is [rows]: positions after the sinks that a row no longer sees. `own`, with stored formats, holds the entries
// at compute precision of the blocks that each segment's rows stand in, one segment after the other; else it is empty.
AttentionPlan* make_plan(nb::ndarray<const int64_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu> segments,
                         LongArray tables, IntArray dropped, LongArray own, int block_size, int window, int kv_heads) {
  auto plan = std::make_unique<AttentionPlan>();
  plan->block_size = block_size;
  plan->window = window;
  plan->stored = own.shape(0) > 0;
  plan->tables.assign(tables.data(), tables.data() + tables.shape(0));
  plan->own.assign(own.data(), own.data() + own.shape(0));
  int64_t first_own = 0;
  for (size_t i = 0; i < segments.shape(0); ++i) {
    const int64_t* s = segments.data() + i * 6;
    const int64_t last = s[2] + s[1] - 1;
    if (s[1] < 1 || s[3] < 0 || s[3] + s[4] > int64_t(tables.shape(0)) || last / block_size >= s[4] ||
        s[0] + s[1] > int64_t(dropped.shape(0)))
      throw std::invalid_argument("segment " + std::to_string(i) + " reaches outside its block table");
    plan->segments.push_back({int32_t(s[0]), int32_t(s[1]), int32_t(s[2]), int32_t(s[4]), plan->tables.data() + s[3],
                              int32_t(s[5]), plan->own.data() + first_own});
    first_own += last / block_size - s[2] / block_size + 1;
  }
  if (plan->stored && first_own != int64_t(own.shape(0)))
    throw std::invalid_argument(std::to_string(own.shape(0)) + " own blocks where the rows stand in " +
                                std::to_string(first_own));
  PlanBuilder(*plan, dropped.data(), kv_heads, threads).build();
  return plan.release();
}

CacheView view(uintptr_t arena, int64_t layer_offset, int block_size, int kv_heads, int head_dim) {
  return {at<char>(arena), layer_offset, block_size, kv_heads, head_dim};
}

void bind_kernels(nb::module_& m) {
  m.def("paths", &paths, "Kernel paths this machine can run, best last.");
  m.def("path", [] { return std::string(active.name); });
  m.def("native_bf16", [] { return active.native_bf16; });
  m.def("select", &select, "name"_a);
  m.def("set_num_threads", [](int n) { threads = n; }, "n"_a);
  m.def("num_threads", [] { return threads; });
  m.def("observed_threads", &observed_threads);
  m.def("pack", &pack, "weight"_a, "out"_a, "n"_a, "k"_a, "itemsize"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "linear",
      [](int dtype, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, int64_t rows, int64_t n, int64_t k,
         int epilogue) {
        active.linear(DType(dtype), {at<void>(x), at<void>(weight), at<float>(bias), at<void>(out), rows, n, k,
                                     Epilogue(epilogue)}, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rms_norm",
      [](int dtype, uintptr_t x, uintptr_t weight, uintptr_t out, int64_t rows, int64_t dim, float eps) {
        active.rms_norm(DType(dtype), {at<float>(x), at<float>(weight), at<void>(out), rows, dim, eps}, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rope_write",
      [](int dtype, uintptr_t arena, int64_t layer_offset, int block_size, int kv_heads, int head_dim, int q_heads,
         uintptr_t blocks, uintptr_t positions, int64_t rows, uintptr_t qkv, uintptr_t cos, uintptr_t sin,
         uintptr_t moved_rows, uintptr_t moved_positions, int64_t moved, uintptr_t q_norm, uintptr_t k_norm, float eps,
         uintptr_t q_out) {
        const WriteArgs write{view(arena, layer_offset, block_size, kv_heads, head_dim), at<int64_t>(blocks),
                              at<int32_t>(positions), rows, q_heads};
        active.rope_write(DType(dtype), {write, at<float>(qkv), at<float>(cos), at<float>(sin), at<int32_t>(moved_rows),
                                         at<int32_t>(moved_positions), moved, at<float>(q_norm), at<float>(k_norm),
                                         eps, at<void>(q_out)}, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "cache_write",
      [](int dtype, uintptr_t arena, int64_t layer_offset, int block_size, int kv_heads, int head_dim,
         uintptr_t blocks, uintptr_t positions, int64_t rows, uintptr_t k, uintptr_t v, int64_t k_row, int64_t k_head,
         int64_t v_row, int64_t v_head) {
        const WriteArgs write{view(arena, layer_offset, block_size, kv_heads, head_dim), at<int64_t>(blocks),
                              at<int32_t>(positions), rows, 0};
        active.cache_write(DType(dtype), {write, at<void>(k), at<void>(v), k_row, k_head, v_row, v_head}, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def_prop_ro("span_items", [](const AttentionPlan& p) { return p.spans.size(); })
      .def_prop_ro("span_members", [](const AttentionPlan& p) { return p.members.size(); })
      .def_prop_ro("fold_items", [](const AttentionPlan& p) { return p.folds.size(); });
  m.def("make_plan", &make_plan, "segments"_a, "tables"_a, "dropped"_a, "own"_a, "block_size"_a, "window"_a, "kv_heads"_a,
        nb::rv_policy::take_ownership,
        "Divide the rows of a step; see plan.h.");
  m.def(
      "attention",
      [](int dtype, const AttentionPlan& plan, uintptr_t arena, int64_t layer_offset, int kv_heads, int head_dim,
         int q_heads, uintptr_t q, uintptr_t out, float scale, float softcap) {
        active.attention(DType(dtype), {view(arena, layer_offset, plan.block_size, kv_heads, head_dim), at<void>(q),
                                        at<void>(out), q_heads, scale, softcap}, plan, threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
}

void bind_formats(nb::module_& m) {
  m.def(
      "stored_head_bytes",
      [](int itemsize, int keys, int values, int block_size, int head_dim) {
        return StoredHead(Format(keys), Format(values), block_size, head_dim, 8 * itemsize).bytes;
      },
      "itemsize"_a, "keys"_a, "values"_a, "block_size"_a, "head_dim"_a);
  m.def(
      "seal",
      [](int dtype, uintptr_t arena, int64_t layer_offset, int block_size, int kv_heads, int head_dim,
         nb::ndarray<const int64_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu> from_to) {
        const SealArgs args{view(arena, layer_offset, block_size, kv_heads, head_dim), from_to.data(),
                            int64_t(from_to.shape(0))};
        nb::gil_scoped_release release;
        active.seal(DType(dtype), args, threads);
      });
  m.def(
      "unseal",
      [](int dtype, uintptr_t arena, int64_t layer_offset, int block_size, int kv_heads, int head_dim,
         nb::ndarray<const int64_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu> from_to, uintptr_t k,
         uintptr_t v) {
        active.unseal(DType(dtype), {view(arena, layer_offset, block_size, kv_heads, head_dim), from_to.data(),
                                     int64_t(from_to.shape(0))}, at<float>(k), at<float>(v));
      });
}

void bind_memory(nb::module_& m) {
  nb::class_<HugeBuffer>(m, "HugeBuffer")
      .def(nb::init<size_t>(), "nbytes"_a)
      .def_prop_ro("address", [](const HugeBuffer& b) { return reinterpret_cast<uintptr_t>(b.data()); })
      .def_prop_ro("nbytes", &HugeBuffer::bytes);
  m.def("move", [](uintptr_t to, uintptr_t from, size_t n) { std::memmove(at<void>(to), at<void>(from), n); });
  m.def("fill", [](uintptr_t to, int byte, size_t n) { std::memset(at<void>(to), byte, n); });
  m.def(
      "read_pass",
      [](uintptr_t address, int64_t nbytes, int streams) {
        return active.read_pass(at<char>(address), nbytes, streams, threads);
      },
      "address"_a, "nbytes"_a, "streams"_a, nb::call_guard<nb::gil_scoped_release>());
}

using Logits = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu>;
using DrawArray = nb::ndarray<const double, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_rows(const Logits& logits, const IntArray& rows) {
  if (rows.shape(0) > 0 && (logits.shape(1) == 0 || (logits.shape(1) > 1 && logits.stride(1) != 1)))
    throw std::invalid_argument("logits need at least one entry to the row, next to each other");
  for (size_t i = 0; i < rows.shape(0); ++i)
    if (rows(i) < 0 || size_t(rows(i)) >= logits.shape(0))
      throw std::invalid_argument("row " + std::to_string(rows(i)) + " of " + std::to_string(logits.shape(0)));
}

// `draws` is [rows][5]: temperature, top_k, top_p, min_p, uniform. Writes one token id per row, or a negative code.
void sample_rows(Logits logits, IntArray rows, DrawArray draws, Out<int32_t> tokens) {
  check_rows(logits, rows);
  if (draws.shape(0) != rows.shape(0) || draws.shape(1) != 5 || tokens.size() != rows.shape(0))
    throw std::invalid_argument("sample_rows: shapes do not agree");
  std::vector<sampling::Draw> each(rows.shape(0));
  for (size_t i = 0; i < each.size(); ++i)
    each[i] = {draws(i, 0), int32_t(std::min(draws(i, 1), 2147483647.0)), draws(i, 2), draws(i, 3), draws(i, 4)};
  nb::gil_scoped_release release;
  sampling::sample_rows(logits.data(), logits.stride(0), int64_t(logits.shape(1)), rows.data(),
                        int64_t(rows.shape(0)), each.data(), tokens.data(), threads);
}

// Fills log_prob and rank [rows] of `tokens`, and the k likeliest of each row: ids and log-probs [rows][k].
void describe_rows(Logits logits, IntArray rows, IntArray tokens, Out<double> log_prob, Out<int32_t> rank,
                   Out<int32_t> top_ids, Out<double> top_log_prob) {
  check_rows(logits, rows);
  const size_t count = rows.shape(0), k = count == 0 ? 0 : top_ids.size() / count;
  if (tokens.shape(0) != count || log_prob.size() != count || rank.size() != count || top_ids.size() != k * count ||
      top_log_prob.size() != k * count || k > logits.shape(1))
    throw std::invalid_argument("describe_rows: shapes do not agree");
  for (size_t i = 0; i < count; ++i)
    if (tokens(i) < 0 || size_t(tokens(i)) >= logits.shape(1))
      throw std::invalid_argument("token id " + std::to_string(tokens(i)) + " is outside the vocabulary");
  nb::gil_scoped_release release;
  sampling::describe_rows(logits.data(), logits.stride(0), int64_t(logits.shape(1)), rows.data(), int64_t(count),
                          tokens.data(), int32_t(k), log_prob.data(), rank.data(), top_ids.data(),
                          top_log_prob.data(), threads);
}

void bind_sampling(nb::module_& m) {
  m.def("sample_rows", &sample_rows, "logits"_a.noconvert(), "rows"_a.noconvert(), "draws"_a.noconvert(),
        "tokens"_a.noconvert());
  m.def("describe_rows", &describe_rows, "logits"_a.noconvert(), "rows"_a.noconvert(), "tokens"_a.noconvert(),
        "log_prob"_a.noconvert(), "rank"_a.noconvert(), "top_ids"_a.noconvert(), "top_log_prob"_a.noconvert());
  m.def("uniform", &sampling::uniform, "seed"_a, "choice"_a, "position"_a,
        "A double in [0, 1): a function of (seed, choice, position) alone.");
  m.def(
      "philox",
      [](std::vector<uint32_t> counter, uint32_t key0, uint32_t key1) {
        if (counter.size() != 4) throw std::invalid_argument("the counter of Philox4x32 is four words");
        sampling::philox(counter.data(), key0, key1);
        return counter;
      },
      "counter"_a, "key0"_a, "key1"_a);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
  octavo::bind_kernels(m);
  octavo::bind_formats(m);
  octavo::bind_memory(m);
  octavo::bind_sampling(m);
}
