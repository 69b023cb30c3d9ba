// Baseline vectors: SSE2, which every x86-64 CPU has. 4 floats or 2 doubles in an xmm register.
#pragma once

#include <emmintrin.h>
#include <xmmintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu/simd/x86.h"
#include "ladon/dtype.h"

namespace ladon::cpu {
namespace {

// A mask is a vector whose lanes are all ones or all zeros.
struct MaskF32 {
  __m128 v;
};
struct MaskF64 {
  __m128d v;
};

/// 4 pairs of 16-bit integers, the first of each pair in its low half.
struct WordPairs {
  using Scalar = std::uint32_t;
  static constexpr int kLanes = 4;
  __m128i v;
};

/// 4 sums of products of such pairs.
struct I32OfWords {
  using Scalar = std::int32_t;
  using Factor = std::uint32_t;  // a pair
  using Factors = WordPairs;
  using Lanes [[gnu::vector_size(16)]] = std::int32_t;
  static constexpr int kLanes = 4;
  static constexpr bool kFoldsKeys = false;
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
  static constexpr int kLanes = 4;
  // 3 x 4 accumulators, 3 broadcasts and one operand vector fill the 16 registers.
  static constexpr int kGemmRows = 3;
  static constexpr int kGemmVectors = 4;
  __m128 v;
};

struct F64 {
  using Scalar = double;
  using Factor = double;
  using Factors = F64;
  using Mask = MaskF64;
  using Integers = void;
  static constexpr int kLanes = 2;
  static constexpr int kGemmRows = 3;
  static constexpr int kGemmVectors = 4;
  __m128d v;
};

inline F32 load(F32*, const float* p) { return {_mm_loadu_ps(p)}; }
inline F64 load(F64*, const double* p) { return {_mm_loadu_pd(p)}; }
inline void store(float* p, F32 a) { _mm_storeu_ps(p, a.v); }
inline void store(double* p, F64 a) { _mm_storeu_pd(p, a.v); }
inline F32 broadcast(F32*, float x) { return {_mm_set1_ps(x)}; }
inline F64 broadcast(F64*, double x) { return {_mm_set1_pd(x)}; }

/// a * b + c, rounded twice: the baseline has no fused form.
/// Whether fma() rounds once.
inline constexpr bool kFusesMultiplyAdd = false;
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm_add_ps(_mm_mul_ps(a.v, b.v), c.v)}; }
inline F64 fma(F64 a, F64 b, F64 c) { return {_mm_add_pd(_mm_mul_pd(a.v, b.v), c.v)}; }

// max and min give b where either operand is NaN: put the value that may be NaN first to drop it,
// second to keep it.
inline F32 max(F32 a, F32 b) { return {_mm_max_ps(a.v, b.v)}; }
inline F64 max(F64 a, F64 b) { return {_mm_max_pd(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm_min_ps(a.v, b.v)}; }
inline F64 min(F64 a, F64 b) { return {_mm_min_pd(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm_andnot_ps(_mm_set1_ps(-0.0F), a.v)}; }
inline F64 abs(F64 a) { return {_mm_andnot_pd(_mm_set1_pd(-0.0), a.v)}; }
inline F32 sqrt(F32 a) { return {_mm_sqrt_ps(a.v)}; }
inline F64 sqrt(F64 a) { return {_mm_sqrt_pd(a.v)}; }

/// a < b; false where either is NaN.
inline MaskF32 less(F32 a, F32 b) { return {_mm_cmplt_ps(a.v, b.v)}; }
inline MaskF64 less(F64 a, F64 b) { return {_mm_cmplt_pd(a.v, b.v)}; }
/// Compares bits: -0 differs from 0, and a NaN equals itself.
inline MaskF32 identical(F32 a, F32 b) {
  return {_mm_castsi128_ps(_mm_cmpeq_epi32(_mm_castps_si128(a.v), _mm_castps_si128(b.v)))};
}
inline MaskF64 identical(F64 a, F64 b) {
  // SSE2 compares 32 bits at a time: both halves of a lane must agree.
  const __m128i halves = _mm_cmpeq_epi32(_mm_castpd_si128(a.v), _mm_castpd_si128(b.v));
  const __m128i swapped = _mm_shuffle_epi32(halves, _MM_SHUFFLE(2, 3, 0, 1));
  return {_mm_castsi128_pd(_mm_and_si128(halves, swapped))};
}
inline MaskF32 either(MaskF32 a, MaskF32 b) { return {_mm_or_ps(a.v, b.v)}; }
inline MaskF64 either(MaskF64 a, MaskF64 b) { return {_mm_or_pd(a.v, b.v)}; }
inline bool any(F32*, MaskF32 m) { return _mm_movemask_ps(m.v) != 0; }
inline bool any(F64*, MaskF64 m) { return _mm_movemask_pd(m.v) != 0; }
/// a where the mask is set, else b.
inline F32 select(MaskF32 m, F32 a, F32 b) {
  return {_mm_or_ps(_mm_and_ps(m.v, a.v), _mm_andnot_ps(m.v, b.v))};
}
inline F64 select(MaskF64 m, F64 a, F64 b) {
  return {_mm_or_pd(_mm_and_pd(m.v, a.v), _mm_andnot_pd(m.v, b.v))};
}

/// Correct for |a| < 2^31 (f32) or 2^51 (f64). f32 loses a NaN here; results that are also computed
/// from a itself keep it.
inline F32 round_to_integer(F32 a) { return {_mm_cvtepi32_ps(_mm_cvtps_epi32(a.v))}; }
inline F64 round_to_integer(F64 a) {
  const __m128d magic = _mm_set1_pd(6755399441055744.0);  // 1.5 * 2^52: no bits below 1 remain
  return {_mm_sub_pd(_mm_add_pd(a.v, magic), magic)};
}
/// a * 2^n for whole n from -126 (f32) or -1022 (f64) on; the result is undefined below.
inline F32 times_power_of_two(F32 a, F32 n) {
  // The exponent 255 is infinity.
  const __m128 limited = _mm_min_ps(n.v, _mm_set1_ps(128));
  const __m128i exponent = _mm_add_epi32(_mm_cvtps_epi32(limited), _mm_set1_epi32(127));
  return {_mm_mul_ps(a.v, _mm_castsi128_ps(_mm_slli_epi32(exponent, 23)))};
}
inline F64 times_power_of_two(F64 a, F64 n) {
  // Adding 1.5 * 2^52 + 1023 leaves n + 1023 in the low bits, which then become the exponent.
  const __m128d limited = _mm_min_pd(n.v, _mm_set1_pd(1024));
  const __m128d shifted = _mm_add_pd(limited, _mm_set1_pd(6755399441055744.0 + 1023.0));
  return {_mm_mul_pd(a.v, _mm_castsi128_pd(_mm_slli_epi64(_mm_castpd_si128(shifted), 52)))};
}

inline float sum(F32 a) {
  const __m128 pairs = _mm_add_ps(a.v, _mm_movehl_ps(a.v, a.v));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
inline double sum(F64 a) { return _mm_cvtsd_f64(_mm_add_sd(a.v, _mm_unpackhi_pd(a.v, a.v))); }
inline float largest(F32 a) {
  const __m128 pairs = _mm_max_ps(a.v, _mm_movehl_ps(a.v, a.v));
  return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
inline double largest(F64 a) { return _mm_cvtsd_f64(_mm_max_sd(a.v, _mm_unpackhi_pd(a.v, a.v))); }

/// Stores four horizontal sums, each with the bits that sum() gives.
inline void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  _MM_TRANSPOSE4_PS(a.v, b.v, c.v, d.v);
  _mm_storeu_ps(to, _mm_add_ps(_mm_add_ps(a.v, c.v), _mm_add_ps(b.v, d.v)));
}

/// Copies n bytes, fewer than 64, and fills up with zeros to 64.
inline void copy_first(char* to, const char* from, std::int64_t n) {
  __builtin_memset(to, 0, 64);
  __builtin_memcpy(to, from, static_cast<std::size_t>(n));
}

// The smaller formats, kLanes at a time, most of them element by element: SSE2 has no instructions
// for them.
inline F32 load_bf16(const std::uint16_t* p) {
  const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half))};
}
// Flattened: a function shared with the rest of the library must not be compiled in this unit.
__attribute__((flatten)) inline F32 load_f16(const std::uint16_t* p) {
  return {_mm_setr_ps(detail::float16_bits_to_float(p[0]), detail::float16_bits_to_float(p[1]),
                      detail::float16_bits_to_float(p[2]), detail::float16_bits_to_float(p[3]))};
}
inline F32 load_i8(const signed char* p) {
  return {_mm_setr_ps(static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                      static_cast<float>(p[3]))};
}
/// e4m3: subnormals are multiples of 2^-9, the others need another bias of the exponent.
inline F32 load_f8(const unsigned char* p) {
  int four;
  __builtin_memcpy(&four, p, sizeof four);
  const __m128i zeros = _mm_setzero_si128();
  const __m128i bytes = _mm_unpacklo_epi8(zeros, _mm_cvtsi32_si128(four));
  const __m128i words = _mm_unpacklo_epi16(zeros, bytes);  // each byte is the uppermost of four
  const __m128i sign = _mm_and_si128(words, _mm_set1_epi32(static_cast<int>(0x80000000U)));
  const __m128i magnitude = _mm_srli_epi32(_mm_slli_epi32(words, 1), 25);
  const __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 20), _mm_set1_epi32(0x3c000000));
  const __m128i subnormal =
      _mm_castps_si128(_mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0x1p-9F)));
  const __m128i is_small = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(8));
  const __m128i chosen =
      _mm_or_si128(_mm_and_si128(is_small, subnormal), _mm_andnot_si128(is_small, normal));
  return {_mm_castsi128_ps(_mm_or_si128(chosen, sign))};
}

inline WordPairs load(WordPairs*, const std::uint32_t* p) {
  return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))};
}
inline WordPairs broadcast(WordPairs*, std::uint32_t x) {
  return {_mm_set1_epi32(static_cast<int>(x))};
}
inline I32OfWords as_integers(__m128i v) { return {reinterpret_cast<I32OfWords::Lanes>(v)}; }
inline I32OfWords load(I32OfWords*, const std::int32_t* p) {
  return as_integers(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I32OfWords broadcast(I32OfWords*, std::int32_t x) { return as_integers(_mm_set1_epi32(x)); }
inline void store(std::int32_t* p, I32OfWords a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), reinterpret_cast<__m128i>(a.v));
}
/// a.first * b.first + a.second * b.second + c.
inline I32OfWords fma(WordPairs a, WordPairs b, I32OfWords c) {
  return as_integers(_mm_add_epi32(_mm_madd_epi16(a.v, b.v), reinterpret_cast<__m128i>(c.v)));
}
inline std::int32_t sum(I32OfWords a) {
  __m128i v = reinterpret_cast<__m128i>(a.v);
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xB1)));
}
inline F32 to_float(I32OfWords a) { return {_mm_cvtepi32_ps(reinterpret_cast<__m128i>(a.v))}; }
/// The low 8 int8 elements as pairs.
inline WordPairs extend_pairs(__m128i bytes) {
  return {_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8)};
}
/// 8 consecutive int8 elements as pairs.
inline WordPairs load_i8_pairs(const signed char* p) {
  return extend_pairs(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
/// 4 int8 elements of each of two rows as pairs.
inline WordPairs load_i8_pairs(const signed char* first, const signed char* second) {
  int a = 0;
  int b = 0;
  __builtin_memcpy(&a, first, sizeof(a));
  __builtin_memcpy(&b, second, sizeof(b));
  return extend_pairs(_mm_unpacklo_epi8(_mm_cvtsi32_si128(a), _mm_cvtsi32_si128(b)));
}
/// 8 int8 elements of each of two rows as two vectors of pairs.
inline void load_i8_pairs(const signed char* first, const signed char* second, WordPairs* to) {
  const __m128i pairs =
      _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)));
  to[0] = extend_pairs(pairs);
  to[1] = extend_pairs(_mm_unpackhi_epi64(pairs, pairs));
}
/// The nearest integers as 16 bits, which must hold them.
inline void store_words(std::int16_t* p, F32 a) {
  const __m128i words = _mm_cvtps_epi32(a.v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(words, words));
}

inline void store_bf16(std::uint16_t* p, F32 a) {
  float lanes[4];
  _mm_storeu_ps(lanes, a.v);
  for (int i = 0; i < 4; ++i) p[i] = detail::float_to_bfloat16_bits(lanes[i]);
}
/// The nearest integers, which must be from -128 to 127.
inline void store_i8(signed char* p, F32 a) {
  const __m128i words = _mm_cvtps_epi32(a.v);
  const __m128i halves = _mm_packs_epi32(words, words);
  const int bytes = _mm_cvtsi128_si32(_mm_packs_epi16(halves, halves));
  __builtin_memcpy(p, &bytes, sizeof bytes);
}
/// The nearest e4m3 of numbers from -448 to 448.
inline void store_f8(unsigned char* p, F32 a) {
  float lanes[4];
  _mm_storeu_ps(lanes, a.v);
  for (int i = 0; i < 4; ++i) p[i] = detail::float_to_float8_bits(lanes[i]);
}
inline void store_f16(std::uint16_t* p, F32 a) {
  float lanes[4];
  _mm_storeu_ps(lanes, a.v);
  for (int i = 0; i < 4; ++i) p[i] = detail::float_to_float16_bits(lanes[i]);
}

}  // namespace
}  // namespace ladon::cpu
