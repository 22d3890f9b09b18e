// Divides one step's attention into work, once per step and layer group.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "args.h"

namespace octavo {

// Sequences with at most this many rows leave one partial per span, so that long contexts spread over threads and
// rows that read the same physical span are computed together; longer ones have rows enough to spread.
constexpr int kFewRows = 8;

class PlanBuilder {
 public:
  PlanBuilder(AttentionPlan& plan, int kv_heads, int threads) : plan_(plan), kv_heads_(kv_heads), threads_(threads) {}

  void build() {
    int64_t rows = 0;
    for (const Segment& s : plan_.segments)
      if (s.rows > kFewRows) rows += s.rows;
    const int64_t share = rows * kv_heads_ / (8 * threads_);
    const int block = int(std::clamp<int64_t>((share + 3) / 4 * 4, 4, 64));
    for (int32_t i = 0; i < int32_t(plan_.segments.size()); ++i) {
      const Segment& s = plan_.segments[i];
      if (s.rows > kFewRows) {
        for (int first = 0; first < s.rows; first += block)
          plan_.folds.push_back({i, first, std::min(block, s.rows - first)});
      } else {
        add_spans(i);
      }
    }
    lay_out_members();
  }

 private:
  int first_span(int position) const {
    return plan_.window ? std::max(0, position + 1 - plan_.window) / kSpan : 0;
  }

  void add_spans(int32_t index) {
    const Segment& s = plan_.segments[index];
    std::vector<int64_t> partial(s.rows);
    for (int r = 0; r < s.rows; ++r) {
      const int position = s.first_position + r;
      const int spans = position / kSpan - first_span(position) + 1;
      plan_.merges.push_back({s.first_row + r, spans, plan_.partials});
      partial[r] = plan_.partials - first_span(position);
      plan_.partials += spans;
    }
    const int last = s.first_position + s.rows - 1;
    for (int span = first_span(s.first_position); span <= last / kSpan; ++span) {
      std::vector<SpanMember>& members = members_[group_of(index, span)];
      for (int r = 0; r < s.rows; ++r) {
        const int position = s.first_position + r;
        if (span >= first_span(position) && span <= position / kSpan)
          members.push_back({s.first_row + r, position, partial[r] + span});
      }
    }
  }

  // The item that reads this physical span: an earlier sequence's if all its blocks are the same, else a new one.
  size_t group_of(int32_t index, int span) {
    const Segment& s = plan_.segments[index];
    const bool whole = s.first_position >= (span + 1) * kSpan - 1;
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
    plan_.spans.push_back({index, span, 0, 0});
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
  int kv_heads_, threads_;
  std::vector<std::vector<SpanMember>> members_;
  std::unordered_multimap<int64_t, size_t> seen_;
};

}  // namespace octavo
