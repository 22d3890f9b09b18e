// How fast this machine reads memory: the yardstick of the benchmarks, used by nothing else.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstring>

namespace octavo {
namespace OCTAVO_ISA {

// Sum of the 64-bit words of `bytes` bytes (a multiple of 8), every word read once. Each thread reads its part front to back as
// `Streams` runs side by side, since one run alone does not always keep enough reads in flight.
template <int Streams>
uint64_t read_pass(const char* data, int64_t bytes, int threads) {
  typedef uint64_t Words __attribute__((vector_size(64)));
  constexpr int64_t kLine = sizeof(Words);
  const int64_t run = bytes / kLine / (int64_t(threads) * Streams);  // lines per run
  uint64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total)
  for (int t = 0; t < threads; ++t) {
    const char* at = data + int64_t(t) * Streams * run * kLine;
    Words sum[Streams] = {};
    for (int64_t i = 0; i < run; ++i)
      for (int s = 0; s < Streams; ++s) {
        Words line;
        std::memcpy(&line, at + (s * run + i) * kLine, kLine);
        sum[s] += line;
      }
    for (const Words& part : sum)
      for (int w = 0; w < 8; ++w) total += part[w];
  }
  for (int64_t at = run * kLine * threads * Streams; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, data + at, 8);
    total += word;
  }
  return total;
}

inline uint64_t read_pass(const char* data, int64_t bytes, int streams, int threads) {
  switch (streams) {
    case 1: return read_pass<1>(data, bytes, threads);
    case 2: return read_pass<2>(data, bytes, threads);
    default: return read_pass<4>(data, bytes, threads);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
