// Log-probabilities and sampling over rows of logits. Framework-free: raw pointers, float32 rows, int32 token ids.
//
// A row's result depends on that row alone: one thread computes a row, sums run over a fixed number of lanes merged
// by a fixed tree, and sampling adds integers, which are exact in any order. Ties go to the lowest token id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace octavo::sampling {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Returned in place of a token id.
constexpr int32_t kAllMasked = -1;   // every entry is -inf
constexpr int32_t kNotANumber = -2;  // a NaN or +inf: the row is broken

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// exp(x) for x <= 0, relative error below 2e-7, exp(0) == 1, exactly 0 below -87, NaN stays NaN. x = n ln 2 + r with
// |r| <= ln 2 / 2, and the Taylor series of exp(r) up to r^7. No branch and no library call, so that loops over it
// vectorise and a vector loop and its tail round alike.
inline float exp_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  const float inside = x < -87.0f ? -87.0f : x;
  const float shifted = inside * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const float power = float_of((bits_of(shifted) - bits_of(kRound) + 127u) << 23);
  return x < -87.0f ? 0.0f : series * power;
}

// The largest entry, or NaN if the row holds a NaN. The same in any order, so the compiler may choose one.
inline float row_max(const float* row, int64_t size) {
  float max = kMinusInfinity;
  uint32_t broken = 0;
#pragma omp simd reduction(max : max) reduction(| : broken)
  for (int64_t i = 0; i < size; ++i) {
    max = row[i] > max ? row[i] : max;
    broken |= row[i] != row[i];
  }
  return broken ? std::numeric_limits<float>::quiet_NaN() : max;
}

// The lowest id of the largest entry, or kAllMasked / kNotANumber.
inline int32_t argmax(const float* row, int64_t size) {
  const float max = row_max(row, size);
  if (max == kMinusInfinity) return kAllMasked;
  if (!(max < std::numeric_limits<float>::infinity())) return kNotANumber;
  return static_cast<int32_t>(std::find(row, row + size, max) - row);
}

constexpr int kLanes = 16;
constexpr int kBlock = 256;

// The sum of kBlock terms: 16 lanes, then a fixed tree.
inline float block_sum(const float* terms) {
  float sum[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += terms[i + lane];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) sum[lane] += sum[lane + width];
  return sum[0];
}

// log(sum(exp(row))); NaN for a row that is broken or masked altogether. Blocks of 256 entries, the last one filled
// up with zeros, are summed in float32 and added in double, in order.
inline double log_sum_exp(const float* row, int64_t size) {
  const float max = row_max(row, size);
  if (!(std::fabs(max) < std::numeric_limits<float>::infinity())) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, size - begin);
    float terms[kBlock] = {};
    for (int64_t i = 0; i < count; ++i) terms[i] = exp_nonpositive(row[begin + i] - max);
    sum += static_cast<double>(block_sum(terms));
  }
  return static_cast<double>(max) + std::log(sum);
}

// 1 for the largest entry; equal entries rank by token id.
inline int32_t rank_of(const float* row, int64_t size, int32_t token) {
  const float mine = row[token];
  int32_t before = 0;
  for (int64_t i = 0; i < size; ++i) before += row[i] > mine;
  for (int64_t i = 0; i < token; ++i) before += row[i] == mine;
  return before + 1;
}

// The k largest entries, largest first, as token ids. `keys` is scratch.
inline void top_k(const float* row, int64_t size, int32_t k, int32_t* ids, std::vector<uint64_t>& keys) {
  keys.resize(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = bits_of(row[i] + 0.0f);  // -0 ties with +0
    const uint32_t ordered = bits ^ (static_cast<uint32_t>(-static_cast<int32_t>(bits >> 31)) | 0x80000000u);
    keys[static_cast<size_t>(i)] = static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(i);
  }
  std::partial_sort(keys.begin(), keys.begin() + k, keys.end(), std::greater<>());
  for (int32_t j = 0; j < k; ++j) ids[j] = static_cast<int32_t>(~static_cast<uint32_t>(keys[static_cast<size_t>(j)]));
}

// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
inline void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * counter[0];
    const uint64_t b = 0xCD9E8D57ull * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    std::copy(next, next + 4, counter);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// A double in [0, 1) with 53 random bits: a function of its arguments and of nothing else.
inline double uniform(uint64_t seed, uint64_t choice, uint64_t position) {
  uint32_t block[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                       static_cast<uint32_t>(choice), static_cast<uint32_t>(choice >> 32)};
  philox(block, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const uint64_t bits = static_cast<uint64_t>(block[1]) << 32 | block[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// The candidates of one row in the order (probability descending, token id ascending), without sorting them all.
//
// A candidate's relative probability e = exp((x - max) / temperature) becomes an integer weight, a multiple of 2^-44,
// so every sum of weights is exact; what is lighter than that is never drawn. Buckets of 1/32 octave hold the count
// and the mass of their candidates, and only the bucket a question falls into is sorted.
class Candidates {
 public:
  // `max` is the row's largest entry, finite; min_p drops what is less likely than min_p times the likeliest.
  void load(const float* row, int64_t size, float max, double temperature, double min_p) {
    relative_.resize(static_cast<size_t>(size));
    // Beyond these limits nothing changes: only equals of the likeliest are left, or all entries are equal.
    const float divisor = static_cast<float>(std::clamp(temperature, 1e-30, 1e30));
    float* relative = relative_.data();
    for (int64_t i = 0; i < size; ++i) relative[i] = exp_nonpositive((row[i] - max) / divisor);
    least_ = std::max(static_cast<float>(kScaleInverse), static_cast<float>(min_p));
    count_.assign(kBuckets, 0);
    mass_.assign(kBuckets, 0);
    for (const float e : relative_) {
      if (e < least_) continue;
      const size_t bucket = bucket_of(e);
      count_[bucket] += 1;
      mass_[bucket] += weight_of(e);
    }
    total_ = 0;
    for (const uint64_t mass : mass_) total_ += mass;
  }

  uint64_t total_mass() const { return total_; }

  struct Found {
    int32_t token;
    uint64_t mass_through;  // mass of this candidate and of all before it
  };

  // The candidate with `target` others before it, or the last one.
  Found at_rank(uint64_t target) { return find(target, count_, [](float) { return uint64_t{1}; }); }

  // The first candidate whose mass_through exceeds `target`, or the last one.
  Found at_mass(uint64_t target) { return find(target, mass_, weight_of); }

 private:
  static constexpr double kScale = 0x1p44;  // 2^18 entries of weight 2^44 still fit into 63 bits
  static constexpr double kScaleInverse = 0x1p-44;
  static constexpr int kShift = 18;  // 2^23 / 2^18 = 32 buckets to the octave
  static constexpr size_t kBuckets = 44 * 32 + 1;

  static uint64_t weight_of(float e) { return static_cast<uint64_t>(static_cast<int64_t>(e * kScale)); }
  static size_t bucket_of(float e) { return (bits_of(1.0f) - bits_of(e)) >> kShift; }

  template <class Measure>
  Found find(uint64_t target, const std::vector<uint64_t>& totals, Measure measure) {
    size_t bucket = 0, last = kBuckets;
    uint64_t before = 0, mass = 0;
    for (size_t b = 0; b < kBuckets; ++b) {
      if (count_[b] == 0) continue;
      if (last != kBuckets) {
        before += totals[last];
        mass += mass_[last];
      }
      bucket = last = b;
      if (before + totals[b] > target) break;
    }
    keys_.clear();
    for (size_t i = 0; i < relative_.size(); ++i) {
      const float e = relative_[i];
      if (e >= least_ && bucket_of(e) == bucket)
        keys_.push_back(static_cast<uint64_t>(bits_of(e)) << 32 | ~static_cast<uint32_t>(i));
    }
    std::sort(keys_.begin(), keys_.end(), std::greater<>());
    Found found{};
    for (const uint64_t key : keys_) {
      const float e = float_of(static_cast<uint32_t>(key >> 32));
      before += measure(e);
      mass += weight_of(e);
      found = {static_cast<int32_t>(~static_cast<uint32_t>(key)), mass};
      if (before > target) break;
    }
    return found;
  }

  std::vector<float> relative_;
  std::vector<uint64_t> count_, mass_, keys_;
  uint64_t total_ = 0;
  float least_ = 0;
};

struct Draw {
  double temperature;  // 0: the likeliest
  int32_t top_k;       // <= 0: off
  double top_p;        // in (0, 1]
  double min_p;        // in [0, 1]
  double uniform;      // in [0, 1)
};

// One token of a processed row, or kAllMasked / kNotANumber. As in vLLM: temperature, min_p, top_k, then top_p over
// what is left. Each of them keeps a prefix of the order, so all that remains of it is the prefix's mass.
inline int32_t sample(const float* row, int64_t size, const Draw& draw, Candidates& candidates) {
  const int32_t best = argmax(row, size);
  if (best < 0 || draw.temperature == 0) return best;
  candidates.load(row, size, row[best], draw.temperature, draw.min_p);
  uint64_t mass = candidates.total_mass();
  const auto part_of = [&mass](double share) {
    return std::min(mass - 1, static_cast<uint64_t>(share * static_cast<double>(mass)));
  };
  if (draw.top_k > 0 && draw.top_k < size) mass = candidates.at_rank(static_cast<uint64_t>(draw.top_k) - 1).mass_through;
  if (draw.top_p < 1) {
    const double wanted = std::ceil(draw.top_p * static_cast<double>(mass));
    mass = candidates.at_mass(std::min(mass, static_cast<uint64_t>(wanted)) - 1).mass_through;
  }
  return candidates.at_mass(part_of(draw.uniform)).token;
}

// logits: [*][size] with `stride` floats from row to row; `rows` names the count rows to work on.

inline void sample_rows(const float* logits, int64_t stride, int64_t size, const int32_t* rows, int64_t count,
                        const Draw* draws, int32_t* tokens, int threads) {
#pragma omp parallel num_threads(threads) if (count > 1)
  {
    Candidates candidates;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) tokens[i] = sample(logits + rows[i] * stride, size, draws[i], candidates);
  }
}

// For each row the log-probability and rank of one given token, and the k likeliest tokens: ids and log-probabilities
// [count][k]. Log-probabilities are NaN where the row is broken.
inline void describe_rows(const float* logits, int64_t stride, int64_t size, const int32_t* rows, int64_t count,
                          const int32_t* tokens, int32_t k, double* log_prob, int32_t* rank, int32_t* top_ids,
                          double* top_log_prob, int threads) {
#pragma omp parallel num_threads(threads) if (count > 1)
  {
    std::vector<uint64_t> keys;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) {
      const float* row = logits + rows[i] * stride;
      const double normaliser = log_sum_exp(row, size);
      log_prob[i] = static_cast<double>(row[tokens[i]]) - normaliser;
      rank[i] = rank_of(row, size, tokens[i]);
      if (k == 0) continue;
      int32_t* ids = top_ids + i * k;
      top_k(row, size, k, ids, keys);
      for (int32_t j = 0; j < k; ++j) top_log_prob[i * k + j] = static_cast<double>(row[ids[j]]) - normaliser;
    }
  }
}

}  // namespace octavo::sampling
