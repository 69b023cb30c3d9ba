// AVX-512 with BF16: the vectors of AVX-512, and products of pairs of bf16 elements summed in f32.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/vec_avx512.h"

namespace ladon::cpu {
namespace {

/// 16 pairs of bf16 elements, the first of each pair in its low half.
struct Bf16Pairs {
  using Scalar = std::uint32_t;
  static constexpr int kLanes = 16;
  __m512i v;
};

/// 16 sums in f32 of products of bf16 pairs.
struct F32OfPairs {
  using Scalar = float;
  using Factor = std::uint32_t;  // a pair
  using Factors = Bf16Pairs;
  static constexpr int kLanes = 16;
  // As for F32.
  static constexpr int kGemmRows = 6;
  static constexpr int kGemmVectors = 4;
  __m512 v;
};

inline Bf16Pairs load(Bf16Pairs*, const std::uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bf16Pairs broadcast(Bf16Pairs*, std::uint32_t x) {
  return {_mm512_set1_epi32(static_cast<int>(x))};
}
inline F32OfPairs load(F32OfPairs*, const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32OfPairs a) { _mm512_storeu_ps(p, a.v); }
inline F32OfPairs broadcast(F32OfPairs*, float x) { return {_mm512_set1_ps(x)}; }

/// a.first * b.first + a.second * b.second + c. Subnormal bf16 elements count as 0.
inline F32OfPairs fma(Bf16Pairs a, Bf16Pairs b, F32OfPairs c) {
  return {_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}

inline float sum(F32OfPairs a) { return sum(F32{a.v}); }
inline void store_sums(float* to, F32OfPairs a, F32OfPairs b, F32OfPairs c, F32OfPairs d) {
  store_sums(to, F32{a.v}, F32{b.v}, F32{c.v}, F32{d.v});
}

/// Stores 16 elements, rounded to nearest even.
inline void round_to_bf16(std::uint16_t* to, F32 a) {
  const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
}

/// Stores two rows of 16 elements as pairs, rounded to nearest even.
inline void store_pairs(std::uint32_t* to, F32 first, F32 second) {
  // The instruction concatenates the rows; pairs interleave them.
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i rows = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, rows));
}

/// Loads 16 bf16 elements of each of two rows as pairs.
inline Bf16Pairs load_pairs(const std::uint16_t* first, const std::uint16_t* second) {
  const __m512i low =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  const __m512i high =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}
inline void store_pairs(std::uint32_t* to, const std::uint16_t* first,
                        const std::uint16_t* second) {
  _mm512_storeu_si512(to, load_pairs(first, second).v);
}
/// Loads 32 of each.
inline void load_pairs(const std::uint16_t* first, const std::uint16_t* second, Bf16Pairs* pairs) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i half = _mm512_set1_epi16(16);
  const __m512i low = _mm512_loadu_si512(first);
  const __m512i high = _mm512_loadu_si512(second);
  pairs[0].v = _mm512_permutex2var_epi16(low, order, high);
  pairs[1].v = _mm512_permutex2var_epi16(low, _mm512_add_epi16(order, half), high);
}

}  // namespace
}  // namespace ladon::cpu
