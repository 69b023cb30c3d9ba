// What all x86-64 instruction sets share and C++ has no word for. Each vec_<name>.h includes it.
#pragma once

#include <cstdint>

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kCacheLine = 64;

/// Prefetches the line of a byte into L2. In assembly, because GCC takes a function that does
/// nothing but __builtin_prefetch for one without effects, and drops its calls.
inline void prefetch_line(const char* byte) { asm volatile("prefetcht1 %0" : : "m"(*byte)); }

/// `a` as it is rounded now: keeps the compiler from fusing the product that made it with a later
/// addition, so that all instruction sets give the same bits.
template <class V>
inline V rounded(V a) {
  asm("" : "+v"(a.v));
  return a;
}

}  // namespace
}  // namespace ladon::cpu
