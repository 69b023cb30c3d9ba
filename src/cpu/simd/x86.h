// What all x86-64 instruction sets share and C++ cannot express. Each vec_<name>.h includes it.
#pragma once

#include <cstdint>

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kCacheLine = 64;

/// Prefetches the cache line of a byte into L2. In assembly: GCC takes a function that only calls
/// __builtin_prefetch for one without effects, and drops the calls to it.
inline void prefetch_line(const char* byte) { asm volatile("prefetcht1 %0" : : "m"(*byte)); }

/// `a`, rounded: keeps the compiler from fusing the product that gave it with a later addition, so
/// that all instruction sets give the same bits.
template <class V>
inline V rounded(V a) {
  asm("" : "+v"(a.v));
  return a;
}

}  // namespace
}  // namespace ladon::cpu
