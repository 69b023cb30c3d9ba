// AVX-512 vectors: 16 floats or 8 doubles in a zmm register, comparisons in mask registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/x86.h"

namespace ladon::cpu {
namespace {

/// 16 pairs of 16-bit integers, the first of each pair in its low half.
struct WordPairs {
  using Scalar = std::uint32_t;
  static constexpr int kLanes = 16;
  __m512i v;
};

/// 16 sums of products of such pairs.
struct I32OfWords {
  using Scalar = std::int32_t;
  using Factor = std::uint32_t;  // a pair
  using Factors = WordPairs;
  using Lanes [[gnu::vector_size(64)]] = std::int32_t;
  static constexpr int kLanes = 16;
  static constexpr bool kFoldsKeys = false;
  // As for F32.
  static constexpr int kGemmRows = 6;
  static constexpr int kGemmVectors = 4;
  Lanes v;
};

struct F32 {
  using Scalar = float;
  using Factor = float;  // what a matrix product multiplies
  using Factors = F32;
  using Mask = __mmask16;
  using Integers = I32OfWords;  // for products of int8 elements
  static constexpr int kLanes = 16;
  // 6 x 4 accumulators, 4 operand vectors and a broadcast fill 29 of the 32 registers.
  static constexpr int kGemmRows = 6;
  static constexpr int kGemmVectors = 4;
  __m512 v;
};

struct F64 {
  using Scalar = double;
  using Factor = double;
  using Factors = F64;
  using Mask = __mmask8;
  using Integers = void;
  static constexpr int kLanes = 8;
  static constexpr int kGemmRows = 6;
  static constexpr int kGemmVectors = 4;
  __m512d v;
};

inline F32 load(F32*, const float* p) { return {_mm512_loadu_ps(p)}; }
inline F64 load(F64*, const double* p) { return {_mm512_loadu_pd(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline void store(double* p, F64 a) { _mm512_storeu_pd(p, a.v); }
inline F32 broadcast(F32*, float x) { return {_mm512_set1_ps(x)}; }
inline F64 broadcast(F64*, double x) { return {_mm512_set1_pd(x)}; }

/// a * b + c.
/// Whether fma() rounds once.
inline constexpr bool kFusesMultiplyAdd = true;
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F64 fma(F64 a, F64 b, F64 c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }

// max and min give b where either operand is NaN: put the value that may be NaN first to drop it,
// second to keep it.
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F64 max(F64 a, F64 b) { return {_mm512_max_pd(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F64 min(F64 a, F64 b) { return {_mm512_min_pd(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline F64 abs(F64 a) { return {_mm512_abs_pd(a.v)}; }
inline F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }
inline F64 sqrt(F64 a) { return {_mm512_sqrt_pd(a.v)}; }

/// a < b; false where either is NaN.
inline __mmask16 less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline __mmask8 less(F64 a, F64 b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ); }
/// Compares bits: -0 differs from 0, and a NaN equals itself.
inline __mmask16 identical(F32 a, F32 b) {
  return _mm512_cmpeq_epi32_mask(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v));
}
inline __mmask8 identical(F64 a, F64 b) {
  return _mm512_cmpeq_epi64_mask(_mm512_castpd_si512(a.v), _mm512_castpd_si512(b.v));
}
inline __mmask16 either(__mmask16 a, __mmask16 b) { return static_cast<__mmask16>(a | b); }
inline __mmask8 either(__mmask8 a, __mmask8 b) { return static_cast<__mmask8>(a | b); }
inline bool any(F32*, __mmask16 m) { return m != 0; }
inline bool any(F64*, __mmask8 m) { return m != 0; }
/// a where the mask is set, else b.
inline F32 select(__mmask16 m, F32 a, F32 b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }
inline F64 select(__mmask8 m, F64 a, F64 b) { return {_mm512_mask_blend_pd(m, b.v, a.v)}; }

inline F32 round_to_integer(F32 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F64 round_to_integer(F64 a) {
  return {_mm512_roundscale_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// a * 2^n for whole n.
inline F32 times_power_of_two(F32 a, F32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline F64 times_power_of_two(F64 a, F64 n) { return {_mm512_scalef_pd(a.v, n.v)}; }

inline float sum(F32 a) { return _mm512_reduce_add_ps(a.v); }
inline double sum(F64 a) { return _mm512_reduce_add_pd(a.v); }
inline float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }
inline double largest(F64 a) { return _mm512_reduce_max_pd(a.v); }

/// Stores four horizontal sums, each with the bits that sum() gives.
inline void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  const __m512 ab =
      _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
  const __m512 cd =
      _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xEE));
  const __m512 quarters =
      _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  const __m512 pairs = _mm512_add_ps(quarters, _mm512_permute_ps(quarters, 0x4E));
  const __m512 sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xB1));
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}

/// Copies n bytes, fewer than 64, and fills up with zeros to 64.
inline void copy_first(char* to, const char* from, std::int64_t n) {
  const __mmask64 wanted = (std::uint64_t{1} << static_cast<unsigned>(n)) - 1;
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(wanted, from));
}

// The smaller formats, kLanes at a time.
inline F32 load_bf16(const std::uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F32 load_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F32 load_i8(const signed char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
/// e4m3 by way of f16, which has one bit more of exponent and a larger bias: a number comes out
/// 2^-8 times as large.
inline F32 load_f8(const unsigned char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(0x1p8F))};
}

inline WordPairs load(WordPairs*, const std::uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline WordPairs broadcast(WordPairs*, std::uint32_t x) {
  return {_mm512_set1_epi32(static_cast<int>(x))};
}
inline I32OfWords as_integers(__m512i v) { return {reinterpret_cast<I32OfWords::Lanes>(v)}; }
inline I32OfWords load(I32OfWords*, const std::int32_t* p) {
  return as_integers(_mm512_loadu_si512(p));
}
inline I32OfWords broadcast(I32OfWords*, std::int32_t x) {
  return as_integers(_mm512_set1_epi32(x));
}
inline void store(std::int32_t* p, I32OfWords a) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(a.v));
}
/// a.first * b.first + a.second * b.second + c.
inline I32OfWords fma(WordPairs a, WordPairs b, I32OfWords c) {
#if defined(__AVX512VNNI__)
  return as_integers(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(c.v), a.v, b.v));
#else
  return as_integers(_mm512_add_epi32(_mm512_madd_epi16(a.v, b.v), reinterpret_cast<__m512i>(c.v)));
#endif
}
inline std::int32_t sum(I32OfWords a) {
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(a.v));
}
inline void store_sums(std::int32_t* to, I32OfWords a, I32OfWords b, I32OfWords c, I32OfWords d) {
  const auto halves = [](I32OfWords x, I32OfWords y) {
    const __m512i first = reinterpret_cast<__m512i>(x.v);
    const __m512i second = reinterpret_cast<__m512i>(y.v);
    return _mm512_add_epi32(_mm512_shuffle_i32x4(first, second, 0x44),
                            _mm512_shuffle_i32x4(first, second, 0xEE));
  };
  const __m512i ab = halves(a, b);
  const __m512i cd = halves(c, d);
  const __m512i quarters =
      _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD));
  const __m512i pairs =
      _mm512_add_epi32(quarters, _mm512_shuffle_epi32(quarters, static_cast<_MM_PERM_ENUM>(0x4E)));
  const __m512i sums =
      _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, static_cast<_MM_PERM_ENUM>(0xB1)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, sums)));
}
inline F32 to_float(I32OfWords a) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a.v))}; }
/// 32 consecutive int8 elements as pairs.
inline WordPairs load_i8_pairs(const signed char* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
/// 16 int8 elements of each of two rows as pairs.
inline WordPairs load_i8_pairs(const signed char* first, const signed char* second) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  return {_mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)))};
}
/// 32 int8 elements of each of two rows as two vectors of pairs.
inline void load_i8_pairs(const signed char* first, const signed char* second, WordPairs* to) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  const __m256i low = _mm256_unpacklo_epi8(a, b);
  const __m256i high = _mm256_unpackhi_epi8(a, b);
  to[0] = {_mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x20))};
  to[1] = {_mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x31))};
}
/// The nearest integers as 16 bits, which must hold them.
inline void store_words(std::int16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

inline void store_bf16(std::uint16_t* p, F32 a) {
  // Round to nearest even by adding just under half a unit; NaN only keeps its quiet bit.
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __m512i result = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
}
/// The nearest integers, which must be from -128 to 127.
inline void store_i8(signed char* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
/// The nearest e4m3 of numbers from -448 to 448. Below 2^-6 they are multiples of 2^-9, as are f32
/// at 2^14: an addition rounds to them.
inline void store_f8(unsigned char* p, F32 a) {
  const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(a.v), 31);
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7ffff)), odd);
  const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(0x3c0));
  const __m512 large = _mm512_set1_ps(0x1p14F);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(bits), large)),
                       _mm512_castps_si512(large));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(0x3c800000));
  const __m512i words = _mm512_or_si512(_mm512_mask_blend_epi32(is_small, normal, subnormal),
                                        _mm512_slli_epi32(sign, 7));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(words));
}
inline void store_f16(std::uint16_t* p, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace
}  // namespace ladon::cpu
