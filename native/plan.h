// Divides one step's attention into work, once per step and layer group.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "args.h"

namespace octavo {

// Sequences with at most this many rows leave one partial per span, so that long contexts spread over threads and
// rows that read the same physical span are computed together; longer ones have rows enough to spread.
constexpr int kFewRows = 8;

class PlanBuilder {
 public:
  // `dropped` [rows] says how many positions after the sinks a row no longer sees.
  PlanBuilder(AttentionPlan& plan, const int32_t* dropped, int kv_heads, int threads)
      : plan_(plan), dropped_(dropped), kv_heads_(kv_heads), threads_(threads) {}

  void build() {
    int64_t rows = 0;
    for (const Segment& s : plan_.segments) {
      if (folds(s)) rows += s.rows;
      next_moved_ = std::max(next_moved_, s.first_row + s.rows);
    }
    const int64_t share = rows * kv_heads_ / (8 * threads_);
    const int block = int(std::clamp<int64_t>((share + 3) / 4 * 4, 4, 64));
    for (int32_t i = 0; i < int32_t(plan_.segments.size()); ++i) {
      const Segment& s = plan_.segments[i];
      if (folds(s)) {
        for (int first = 0, rows; first < s.rows; first += rows) {
          const int own = (s.first_position + first) / plan_.block_size;
          rows = std::min(block, s.rows - first);
          if (plan_.stored) rows = std::min(rows, (own + 1) * plan_.block_size - s.first_position - first);
          plan_.folds.push_back({i, first, rows, plan_.stored ? own : -1});
        }
      } else {
        add_spans(i);
      }
    }
    lay_out_members();
  }

 private:
  // What one row sees: positions low ..< high, asked with row `query` of q.
  struct View {
    int query, low, high;
    int first_span() const { return low / kSpan; }
    int last_span() const { return (high - 1) / kSpan; }
  };

  bool folds(const Segment& s) const { return s.rows > kFewRows && !dropped_[s.first_row + s.rows - 1]; }

  // One view, or for a row whose sequence has dropped positions the sinks and then the rest.
  std::vector<View> views(const Segment& s, int r) {
    const int row = s.first_row + r, end = s.first_position + r + 1;
    const int behind = plan_.window ? std::max(0, end - plan_.window) : 0;
    if (!dropped_[row]) return {{row, behind, end}};
    std::vector<View> both;
    if (s.sinks) both.push_back({next_moved_, 0, s.sinks});
    ++next_moved_;
    both.push_back({row, s.sinks + dropped_[row], end});
    return both;
  }

  void add_spans(int32_t index) {
    const Segment& s = plan_.segments[index];
    // One item per span and kind of view: the sinks' queries differ from the rest's, and so does, with stored formats,
    // the block that is read at compute precision.
    std::map<std::tuple<int, bool, int>, size_t> items;
    for (int r = 0; r < s.rows; ++r) {
      const int64_t first_partial = plan_.partials;
      for (const View& view : views(s, r))
        for (int span = view.first_span(); span <= view.last_span(); ++span) {
          const bool moved = view.query != s.first_row + r;
          int own = (s.first_position + r) / plan_.block_size;
          if (!plan_.stored || moved || own * plan_.block_size / kSpan != span) own = -1;
          const auto found = items.emplace(std::tuple(span, moved, own), 0);
          if (found.second) found.first->second = group_of(index, span, own);
          members_[found.first->second].push_back({view.query, view.low, view.high, plan_.partials++});
        }
      plan_.merges.push_back({s.first_row + r, int32_t(plan_.partials - first_partial), first_partial});
    }
  }

  // The item that reads this physical span: an earlier sequence's if all its blocks are the same, else a new one.
  size_t group_of(int32_t index, int span, int own) {
    const Segment& s = plan_.segments[index];
    const bool whole = own < 0 && s.first_position >= (span + 1) * kSpan - 1 && !dropped_[s.first_row + s.rows - 1];
    const int per_span = kSpan / plan_.block_size;
    const int64_t* blocks = s.table + int64_t(span) * per_span;
    if (whole) {
      // The last block: earlier ones may already be gone behind a window.
      const auto range = seen_.equal_range(blocks[per_span - 1]);
      for (auto it = range.first; it != range.second; ++it) {
        const SpanItem& item = plan_.spans[it->second];
        const int64_t* other = plan_.segments[item.segment].table + int64_t(item.span) * per_span;
        if (item.span == span && std::equal(blocks, blocks + per_span, other)) return it->second;
      }
      seen_.emplace(blocks[per_span - 1], plan_.spans.size());
    }
    plan_.spans.push_back({index, span, 0, 0, own});
    members_.emplace_back();
    return plan_.spans.size() - 1;
  }

  void lay_out_members() {
    for (size_t i = 0; i < members_.size(); ++i) {
      plan_.spans[i].first_member = int32_t(plan_.members.size());
      plan_.spans[i].members = int32_t(members_[i].size());
      plan_.members.insert(plan_.members.end(), members_[i].begin(), members_[i].end());
    }
  }

  AttentionPlan& plan_;
  const int32_t* dropped_;
  int kv_heads_, threads_;
  int next_moved_ = 0;  // rows of q that hold moved queries come after those of the step
  std::vector<std::vector<SpanMember>> members_;
  std::unordered_multimap<int64_t, size_t> seen_;
};

}  // namespace octavo
