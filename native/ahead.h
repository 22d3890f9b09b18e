// What a thread reads next, fetched while it computes.
#pragma once

#include <optional>

#include "stored.h"

namespace octavo {
namespace OCTAVO_ISA {

inline void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// The blocks of one span, all heads, in the order they lie in memory: a share of a block for every pass over a block's
// keys or values, so that the memory is asked evenly. Bursts would stop the thread until they are answered.
template <class T>
class Ahead {
 public:
  struct Share {
    const char* at;
    int64_t bytes;
  };

  Ahead() = default;  // nothing
  Ahead(const AttentionArgs& args, const AttentionPlan& plan, const SpanItem& item)
      : cache_(&args.cache), table_(plan.segments[item.segment].table), one_(args.cache) {
    const int first = item.span * kSpan, block = plan.block_size;
    int low = first + kSpan, high = first;
    for (int i = 0; i < item.members; ++i) {
      const SpanMember& member = plan.members[item.first_member + i];
      low = std::min(low, std::max(first, member.low));
      high = std::max(high, std::min(first + kSpan, member.high));
    }
    at_ = low / block;
    end_ = high > low ? (high - 1) / block + 1 : at_;
  }

  // The next share; `idle` and no bytes where there is none.
  Share take(const char* idle) {
    if (at_ >= end_) return {idle, 0};
    const auto& one = one_->template find<T>(*cache_, {table_[at_]}, 0);
    const int64_t bytes = one.bytes() / 2;
    const Share share{one.keys() + part_ * bytes, bytes};
    if (++part_ == 2 * cache_->kv_heads) part_ = 0, ++at_;
    return share;
  }

  void fetch() {
    const Share share = take(nullptr);
    prefetch(share.at, share.bytes);
  }

 private:
  const CacheView* cache_ = nullptr;
  const int64_t* table_ = nullptr;
  std::optional<StoredBlock> one_;
  int at_ = 0, end_ = 0, part_ = 0;
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
