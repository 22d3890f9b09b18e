// Attention over the paged cache, read where it lies.
//
// The context of a row is cut into spans of kSpan positions counted from position 0. Each span gives one partial
// (max, sum, accumulator), computed by `span_partial` whichever way the step is divided, and partials are merged in
// span order. Inside a span every element is one chain over positions (or dimensions) upwards, positions outside a
// row's own range never enter its arithmetic, not even as zero times something, so neither block size, chunking,
// company nor what recycled memory holds can change a bit.
#pragma once

#include <omp.h>

#include <atomic>

#include "stored_span.h"

namespace octavo {
namespace OCTAVO_ISA {

// What one thread keeps from call to call.
struct Worker {
  SpanScratch scratch;
  Scratch<float> partials, states;
  Scratch<uint32_t> words;
};

template <class T, int R>
inline void partials_of(const AttentionArgs& args, const AttentionPlan& plan, SpanReader<T>& span, const Tile<T>& tile,
                        SpanScratch& scratch, Ahead<T>& ahead, bool fetched) {
  if (plan.stored)
    stored_partial<T, R>(args, span, tile, scratch, ahead, fetched);
  else
    span_partial<T, R>(args, span, tile, scratch, ahead);
}

template <class T>
void fold_item(const AttentionArgs& args, const AttentionPlan& plan, const FoldItem& item, int kv_head,
               Worker& worker) {
  const Segment& segment = plan.segments[item.segment];
  const int dim = args.cache.head_dim, group = args.q_heads / args.cache.kv_heads;
  const int count = item.rows * group;
  const int64_t size = Partial::floats(dim);
  float* partials = worker.partials.reserve(kTileRows * size);
  float* states = worker.states.reserve(count * size);
  uint32_t* words = worker.words.reserve(size_t(count) * dim);
  const auto fill = [&](Tile<T>& tile, int first) {
    tile.rows = std::min(kTileRows, count - first);
    tile.words = words + first * (dim / Elem<T>::kPack);
    for (int r = 0; r < tile.rows; ++r) {
      const int row = item.first + (first + r) / group, head = kv_head * group + (first + r) % group;
      tile.q[r] = static_cast<const T*>(args.q) + (int64_t(segment.first_row + row) * args.q_heads + head) * dim;
      tile.high[r] = segment.first_position + row + 1;
      tile.low[r] = plan.window ? std::max(0, tile.high[r] - plan.window) : 0;
      tile.partial[r] = Partial{partials + r * size};
    }
  };
  Tile<T> tile;
  Ahead<T> nothing;
  for (int first = 0; first < count; first += kTileRows) {
    fill(tile, first);
    interleave(tile, dim);
    for (int r = 0; r < tile.rows; ++r) Partial{states + (first + r) * size}.reset(dim);
  }
  const int oldest = segment.first_position + item.first, newest = oldest + item.rows - 1;
  const int first_span = plan.window ? std::max(0, oldest + 1 - plan.window) / kSpan : 0;
  for (int s = first_span; s <= newest / kSpan; ++s) {
    SpanReader<T> span(args, plan, segment, s, kv_head, item.own * plan.block_size / kSpan == s ? item.own : -1);
    for (int first = 0; first < count; first += kTileRows) {
      fill(tile, first);
      with_rows(tile.rows, [&](auto rows) {
        partials_of<T, decltype(rows)::value>(args, plan, span, tile, worker.scratch, nothing, false);
      });
      for (int r = 0; r < tile.rows; ++r)
        merge(Partial{states + (first + r) * size}, tile.partial[r], dim);
    }
  }
  for (int i = 0; i < count; ++i) {
    const int64_t row = segment.first_row + item.first + i / group;
    finish(Partial{states + i * size}, dim,
           static_cast<T*>(args.out) + (row * args.q_heads + kv_head * group + i % group) * dim);
  }
}

template <class T>
void span_item(const AttentionArgs& args, const AttentionPlan& plan, const SpanItem& item, int kv_head,
               float* partials, Worker& worker, Ahead<T>& ahead, bool fetched) {
  const int dim = args.cache.head_dim, group = args.q_heads / args.cache.kv_heads;
  const int64_t size = Partial::floats(dim);
  SpanReader<T> span(args, plan, plan.segments[item.segment], item.span, kv_head, item.own);
  Tile<T> tile;
  tile.words = worker.words.reserve(size_t(kTileRows) * dim);
  for (int first = 0; first < item.members * group; first += kTileRows) {
    tile.rows = std::min(kTileRows, item.members * group - first);
    for (int r = 0; r < tile.rows; ++r) {
      const SpanMember& member = plan.members[item.first_member + (first + r) / group];
      const int head = kv_head * group + (first + r) % group;
      tile.q[r] = static_cast<const T*>(args.q) + (int64_t(member.query) * args.q_heads + head) * dim;
      tile.low[r] = member.low;
      tile.high[r] = member.high;
      tile.partial[r] = Partial{partials + (member.partial * args.q_heads + head) * size};
    }
    interleave(tile, dim);
    with_rows(tile.rows, [&](auto rows) {
      partials_of<T, decltype(rows)::value>(args, plan, span, tile, worker.scratch, ahead, fetched);
    });
  }
}

// The span items, shared among the threads as they come. Where there are many, a thread takes all heads of a span and
// knows one in advance what it takes next; where there are few, each head is taken by itself.
template <class T>
void span_items(const AttentionArgs& args, const AttentionPlan& plan, std::atomic<int64_t>& taken, int threads,
                float* partials, Worker& worker) {
  const int heads = args.cache.kv_heads, group = args.q_heads / heads;
  const bool many = int64_t(plan.spans.size()) >= 16 * threads;
  const int run = many ? heads : 1;
  const int64_t runs = int64_t(plan.spans.size()) * heads / run;
  Ahead<T> ahead;
  bool fetched = false;
  for (int64_t mine = taken++, next; mine < runs; mine = next) {
    if (many) next = taken++;
    const bool follows = many && next < runs;
    // Passes over stored codes fetch ahead where memory is waited for; over plain keys, where it is not.
    const bool fetches = follows && plan.stored == waits_for_memory(plan.spans[mine].members * group);
    ahead = fetches ? Ahead<T>(args, plan, plan.spans[next]) : Ahead<T>();
    for (int64_t i = mine * run; i < (mine + 1) * run; ++i)
      span_item<T>(args, plan, plan.spans[i / heads], int(i % heads), partials, worker, ahead, fetched);
    if (!many) next = taken++;
    fetched = fetches;
  }
}

// The query heads of one KV head together: their chains of merges are independent, so none waits for the other.
template <class T>
void merge_row(const AttentionArgs& args, const MergeRow& row, int kv_head, const float* partials, Worker& worker) {
  const int dim = args.cache.head_dim, group = args.q_heads / args.cache.kv_heads;
  const int64_t size = Partial::floats(dim);
  const auto of_head = [size](float* first, int64_t i) { return Partial{first + i * size}; };
  float* states = worker.states.reserve(group * size);
  for (int i = 0; i < group; ++i) of_head(states, i).reset(dim);
  for (int s = 0; s < row.spans; ++s) {
    const int64_t first = (row.first_partial + s) * args.q_heads + kv_head * group;
    for (int i = 0; i < group; ++i)
      merge(of_head(states, i), of_head(const_cast<float*>(partials), first + i), dim);
  }
  T* out = static_cast<T*>(args.out) + (int64_t(row.row) * args.q_heads + kv_head * group) * dim;
  for (int i = 0; i < group; ++i) finish(of_head(states, i), dim, out + i * dim);
}

template <class T>
void attention(const AttentionArgs& args, const AttentionPlan& plan, int threads) {
  static thread_local Scratch<float> shared;
  const int heads = args.cache.kv_heads;
  const size_t needed = size_t(plan.partials) * args.q_heads * Partial::floats(args.cache.head_dim);
  float* partials = shared.reserve(needed);
  const int64_t folds = int64_t(plan.folds.size()) * heads;
  const int64_t merges = int64_t(plan.merges.size()) * heads;
  std::atomic<int64_t> taken = 0;
#pragma omp parallel num_threads(threads)
  {
    static thread_local Worker worker;
    // The last rows of a chunk have the longest context, so they go first.
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < folds; ++i)
      fold_item<T>(args, plan, plan.folds[plan.folds.size() - 1 - i / heads], int(i % heads), worker);
    span_items<T>(args, plan, taken, threads, partials, worker);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < merges; ++i)
      merge_row<T>(args, plan.merges[i / heads], int(i % heads), partials, worker);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
