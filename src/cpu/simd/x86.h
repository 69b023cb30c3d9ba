// What all x86-64 instruction sets share and C++ cannot express. Each vec_<name>.h includes it.
#pragma once

#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kCacheLine = 64;

/// Prefetches the cache line of a byte into L2. In assembly: GCC takes a function that only calls
/// __builtin_prefetch for one without effects, and drops the calls to it.
inline void prefetch_line(const char* byte) { asm volatile("prefetcht1 %0" : : "m"(*byte)); }

/// Copies n bytes past the caches: a store that misses them would first read the line from memory.
/// For blocks larger than the caches, whose reader finds them in memory anyway. Follow with
/// finish_streaming().
inline void copy_streaming(char* to, const char* from, std::int64_t n) {
  const auto misaligned =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % kCacheLine);
  std::int64_t head = misaligned == 0 ? 0 : kCacheLine - misaligned;
  if (head > n) head = n;
  __builtin_memcpy(to, from, static_cast<std::size_t>(head));
  std::int64_t i = head;
  for (; i + kCacheLine <= n; i += kCacheLine) {
    for (std::int64_t part = 0; part < kCacheLine; part += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + part)));
    }
  }
  __builtin_memcpy(to + i, from + i, static_cast<std::size_t>(n - i));
}
/// Orders streamed stores before what this thread writes next.
inline void finish_streaming() { _mm_sfence(); }

/// `a`, rounded: keeps the compiler from fusing the product that gave it with a later addition, so
/// that all instruction sets give the same bits.
template <class V>
inline V rounded(V a) {
  asm("" : "+v"(a.v));
  return a;
}

/// `a`, loaded once: GCC would fold the load into every instruction that uses it, and a step of
/// four rows and two keys would then load ten vectors for its eight FMAs instead of six.
template <class V>
inline V in_register(V a) {
  asm("" : "+v"(a.v));
  return a;
}

}  // namespace
}  // namespace ladon::cpu
