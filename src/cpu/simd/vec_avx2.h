// AVX2 + FMA + F16C vectors: 8 floats or 4 doubles in a ymm register, comparisons as full vectors.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu/simd/x86.h"

namespace ladon::cpu {
namespace {

// A mask is a vector whose lanes are all ones or all zeros.
struct MaskF32 {
  __m256 v;
};
struct MaskF64 {
  __m256d v;
};

/// 8 pairs of 16-bit integers, the first of each pair in its low half.
struct WordPairs {
  using Scalar = std::uint32_t;
  static constexpr int kLanes = 8;
  __m256i v;
};

/// 8 sums of products of such pairs.
struct I32OfWords {
  using Scalar = std::int32_t;
  using Factor = std::uint32_t;  // a pair
  using Factors = WordPairs;
  using Lanes [[gnu::vector_size(32)]] = std::int32_t;
  static constexpr int kLanes = 8;
  static constexpr bool kFoldsKeys = true;  // there are fold_two() and fold_four()
  // As for F32.
  static constexpr int kGemmRows = 3;
  static constexpr int kGemmVectors = 4;
  Lanes v;
};

struct F32 {
  using Scalar = float;
  using Factor = float;  // what a matrix product multiplies
  using Factors = F32;
  using Mask = MaskF32;
  using Integers = I32OfWords;  // for products of int8 elements
  static constexpr int kLanes = 8;
  // 3 x 4 accumulators, 3 broadcasts and one operand vector fill the 16 registers.
  static constexpr int kGemmRows = 3;
  static constexpr int kGemmVectors = 4;
  __m256 v;
};

struct F64 {
  using Scalar = double;
  using Factor = double;
  using Factors = F64;
  using Mask = MaskF64;
  using Integers = void;
  static constexpr int kLanes = 4;
  static constexpr int kGemmRows = 3;
  static constexpr int kGemmVectors = 4;
  __m256d v;
};

inline F32 load(F32*, const float* p) { return {_mm256_loadu_ps(p)}; }
inline F64 load(F64*, const double* p) { return {_mm256_loadu_pd(p)}; }
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
inline void store(double* p, F64 a) { _mm256_storeu_pd(p, a.v); }
inline F32 broadcast(F32*, float x) { return {_mm256_set1_ps(x)}; }
inline F64 broadcast(F64*, double x) { return {_mm256_set1_pd(x)}; }

/// a * b + c.
/// Whether fma() rounds once.
inline constexpr bool kFusesMultiplyAdd = true;
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F64 fma(F64 a, F64 b, F64 c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }

// max and min give b where either operand is NaN: put the value that may be NaN first to drop it,
// second to keep it.
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F64 max(F64 a, F64 b) { return {_mm256_max_pd(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F64 min(F64 a, F64 b) { return {_mm256_min_pd(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0F), a.v)}; }
inline F64 abs(F64 a) { return {_mm256_andnot_pd(_mm256_set1_pd(-0.0), a.v)}; }
inline F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }
inline F64 sqrt(F64 a) { return {_mm256_sqrt_pd(a.v)}; }

/// a < b; false where either is NaN.
inline MaskF32 less(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline MaskF64 less(F64 a, F64 b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ)}; }
/// Compares bits: -0 differs from 0, and a NaN equals itself.
inline MaskF32 identical(F32 a, F32 b) {
  return {
      _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(a.v), _mm256_castps_si256(b.v)))};
}
inline MaskF64 identical(F64 a, F64 b) {
  return {
      _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_castpd_si256(a.v), _mm256_castpd_si256(b.v)))};
}
inline MaskF32 either(MaskF32 a, MaskF32 b) { return {_mm256_or_ps(a.v, b.v)}; }
inline MaskF64 either(MaskF64 a, MaskF64 b) { return {_mm256_or_pd(a.v, b.v)}; }
inline bool any(F32*, MaskF32 m) { return _mm256_movemask_ps(m.v) != 0; }
inline bool any(F64*, MaskF64 m) { return _mm256_movemask_pd(m.v) != 0; }
/// a where the mask is set, else b.
inline F32 select(MaskF32 m, F32 a, F32 b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }
inline F64 select(MaskF64 m, F64 a, F64 b) { return {_mm256_blendv_pd(b.v, a.v, m.v)}; }

inline F32 round_to_integer(F32 a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F64 round_to_integer(F64 a) {
  return {_mm256_round_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// a * 2^n for whole n from -126 (f32) or -1022 (f64) on; the result is undefined below.
inline F32 times_power_of_two(F32 a, F32 n) {
  // The exponent 255 is infinity.
  const __m256 limited = _mm256_min_ps(n.v, _mm256_set1_ps(128));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(limited), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
inline F64 times_power_of_two(F64 a, F64 n) {
  // Adding 1.5 * 2^52 + 1023 leaves n + 1023 in the low bits, which then become the exponent.
  const __m256d limited = _mm256_min_pd(n.v, _mm256_set1_pd(1024));
  const __m256d shifted = _mm256_add_pd(limited, _mm256_set1_pd(6755399441055744.0 + 1023.0));
  const __m256i power = _mm256_slli_epi64(_mm256_castpd_si256(shifted), 52);
  return {_mm256_mul_pd(a.v, _mm256_castsi256_pd(power))};
}

inline float sum(F32 a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline double sum(F64 a) {
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}
inline float largest(F32 a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline double largest(F64 a) {
  const __m128d half = _mm_max_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
  return _mm_cvtsd_f64(_mm_max_sd(half, _mm_unpackhi_pd(half, half)));
}

/// Stores four horizontal sums, each with the bits that sum() gives.
inline void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  // Blends run on any port, shuffles on one or two.
  const __m256 ab =
      _mm256_add_ps(_mm256_blend_ps(a.v, b.v, 0xF0), _mm256_permute2f128_ps(a.v, b.v, 0x21));
  const __m256 cd =
      _mm256_add_ps(_mm256_blend_ps(c.v, d.v, 0xF0), _mm256_permute2f128_ps(c.v, d.v, 0x21));
  const __m256 pairs =
      _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  const __m256 sums = _mm256_add_ps(pairs, _mm256_permute_ps(pairs, 0xB1));  // a a c c, b b d d
  _mm_storeu_ps(to, _mm_blend_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1), 10));
}

/// Copies n bytes, fewer than 64, and fills up with zeros to 64.
inline void copy_first(char* to, const char* from, std::int64_t n) {
  __builtin_memset(to, 0, 64);
  __builtin_memcpy(to, from, static_cast<std::size_t>(n));
}

// The smaller formats, kLanes at a time.
inline F32 load_bf16(const std::uint16_t* p) {
  // Both halves get all eight elements, for free as they are loaded; one shuffle then moves each to
  // the upper half of its lane. (Extending and shifting are two instructions.)
  const __m256i all =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i upper =
      _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                       -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return {_mm256_castsi256_ps(_mm256_shuffle_epi8(all, upper))};
}
inline F32 load_f16(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F32 load_i8(const signed char* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
/// e4m3 by way of f16, which has one bit more of exponent and a larger bias: a number comes out
/// 2^-8 times as large.
inline F32 load_f8(const unsigned char* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  const __m128i halves = _mm_and_si128(shifted, _mm_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(0x1p8F))};
}

inline WordPairs load(WordPairs*, const std::uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline WordPairs broadcast(WordPairs*, std::uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x))};
}
inline I32OfWords as_integers(__m256i v) { return {reinterpret_cast<I32OfWords::Lanes>(v)}; }
inline I32OfWords load(I32OfWords*, const std::int32_t* p) {
  return as_integers(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline I32OfWords broadcast(I32OfWords*, std::int32_t x) {
  return as_integers(_mm256_set1_epi32(x));
}
inline void store(std::int32_t* p, I32OfWords a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(a.v));
}
/// a.first * b.first + a.second * b.second + c. In a register at once: GCC 12 would move sums
/// between registers, and spill some, in every step (q.k of four rows 9.7 ns a key instead of 7.5).
inline I32OfWords fma(WordPairs a, WordPairs b, I32OfWords c) {
  return in_register(
      as_integers(_mm256_add_epi32(_mm256_madd_epi16(a.v, b.v), reinterpret_cast<__m256i>(c.v))));
}
inline std::int32_t sum(I32OfWords a) {
  const __m256i v = reinterpret_cast<__m256i>(a.v);
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
/// Four sums of a, then four of b.
inline I32OfWords fold_two(I32OfWords a, I32OfWords b) {
  const __m256i x = reinterpret_cast<__m256i>(a.v);
  const __m256i y = reinterpret_cast<__m256i>(b.v);
  return as_integers(
      _mm256_add_epi32(_mm256_blend_epi32(x, y, 0xF0), _mm256_permute2x128_si256(x, y, 0x21)));
}
/// The sums of the halves of four vectors: the lower halves', then the upper halves'.
inline I32OfWords fold_four(I32OfWords a, I32OfWords b, I32OfWords c, I32OfWords d) {
  const auto add = [](I32OfWords x, I32OfWords y) {
    const __m256i first = reinterpret_cast<__m256i>(x.v);
    const __m256i second = reinterpret_cast<__m256i>(y.v);
    return _mm256_add_epi32(_mm256_unpacklo_epi32(first, second),
                            _mm256_unpackhi_epi32(first, second));
  };
  const __m256i ab = add(a, b);
  const __m256i cd = add(c, d);
  return as_integers(
      _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd)));
}
inline void store_sums(std::int32_t* to, I32OfWords a, I32OfWords b, I32OfWords c, I32OfWords d) {
  // As for F32: each step adds the halves of two vectors, side by side.
  const __m256i ab = reinterpret_cast<__m256i>(fold_two(a, b).v);
  const __m256i cd = reinterpret_cast<__m256i>(fold_two(c, d).v);
  const __m256i pairs =
      _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  const __m256i sums = _mm256_add_epi32(pairs, _mm256_shuffle_epi32(pairs, 0xB1));
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_blend_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1), 10));
}
inline F32 to_float(I32OfWords a) { return {_mm256_cvtepi32_ps(reinterpret_cast<__m256i>(a.v))}; }
/// 16 consecutive int8 elements as pairs.
inline WordPairs load_i8_pairs(const signed char* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
/// 8 int8 elements of each of two rows as pairs.
inline WordPairs load_i8_pairs(const signed char* first, const signed char* second) {
  return {_mm256_cvtepi8_epi16(
      _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second))))};
}
/// 16 int8 elements of each of two rows as two vectors of pairs.
inline void load_i8_pairs(const signed char* first, const signed char* second, WordPairs* to) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  to[0] = {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b))};
  to[1] = {_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}
/// The nearest integers as 16 bits, which must hold them.
inline void store_words(std::int16_t* p, F32 a) {
  const __m256i words = _mm256_cvtps_epi32(a.v);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline void store_bf16(std::uint16_t* p, F32 a) {
  // Round to nearest even by adding just under half a unit; NaN only keeps its quiet bit.
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
/// The nearest integers, which must be from -128 to 127.
inline void store_i8(signed char* p, F32 a) {
  const __m256i words = _mm256_cvtps_epi32(a.v);
  const __m128i halves =
      _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}
/// The nearest e4m3 of numbers from -448 to 448. Below 2^-6 they are multiples of 2^-9, as are f32
/// at 2^14: an addition rounds to them.
inline void store_f8(unsigned char* p, F32 a) {
  const __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(a.v), 31);
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7ffff)), odd);
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(0x3c0));
  const __m256 large = _mm256_set1_ps(0x1p14F);
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(bits), large)),
                       _mm256_castps_si256(large));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), bits);
  const __m256i words =
      _mm256_or_si256(_mm256_blendv_epi8(normal, subnormal, is_small), _mm256_slli_epi32(sign, 7));
  const __m128i halves =
      _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}
inline void store_f16(std::uint16_t* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
}  // namespace ladon::cpu
