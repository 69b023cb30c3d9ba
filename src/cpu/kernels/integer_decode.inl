// Decoding over int8 caches, in integers, and the choice between this and forward_decode.inl.
//
// Queries, and the weights of a block of keys, are rounded to 16 bits: with one factor per row, and
// per row and block. Their products with int8 elements are summed exactly in 32 bits, two terms a
// step, and no element of the cache is converted to a float. The rounding adds an error of 1/65534
// of the largest |q|, and of the block's largest weight, to each: a small part of what int8 itself
// costs (docs/numerics.md).
//
// Cost: as many vector instructions as FMAs in f32 (a product of pairs and an addition take two
// terms), but one conversion serves two terms; with VNNI half as many. Measured on Zen 4, four rows
// and a key of 128 in L2: 27 ns instead of 32 with AVX2, 20 instead of 30 with VNNI. With AVX2 a
// third of that is q.k, a third the weighted sum, and a quarter the softmax, scales and rounding.
//
// Tried and lost: values paired and widened once for a block, into scratch (AVX2 31 ns, VNNI 23).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/forward_decode.inl"

namespace ladon::cpu {
namespace {

template <class Type>
constexpr bool kIsVoid = false;
template <>
constexpr bool kIsVoid<void> = true;

/// Two keys per step, the elements of their values paired. Sums are multiplied by the factors of
/// the rounded weights.
template <class V>
struct IntegerValues {
  using Sums = typename V::Integers;
  using Results = V;
  using Factors = typename Sums::Factors;
  static constexpr bool kHasFactors = true;
  static constexpr std::int64_t kKeys = 2;
  StoredRows rows;
  std::int64_t count;  // even
  std::int64_t dim;

  template <int kVectors, bool kWhole>
  void load(std::int64_t step, std::int64_t column, Factors* value) const {
    const auto* first = reinterpret_cast<const signed char*>(rows[2 * step]) + column;
    const auto* second = reinterpret_cast<const signed char*>(rows[2 * step + 1]) + column;
    if constexpr (kWhole) {
      constexpr int kTogether = kVectors - kVectors % 2;
      LADON_UNROLL
      for (int n = 0; n < kTogether; n += 2) {
        load_i8_pairs(first + n * Sums::kLanes, second + n * Sums::kLanes, value + n);
      }
      if constexpr (kTogether < kVectors) {
        constexpr int kLast = kTogether * Sums::kLanes;
        value[kTogether] = load_i8_pairs(first + kLast, second + kLast);
      }
    } else {
      static_assert(kVectors == 1);
      alignas(64) char some[2][64];
      copy_first(some[0], reinterpret_cast<const char*>(first), dim - column);
      copy_first(some[1], reinterpret_cast<const char*>(second), dim - column);
      value[0] = load_i8_pairs(reinterpret_cast<const signed char*>(some[0]),
                               reinterpret_cast<const signed char*>(some[1]));
    }
  }
};

/// Rounds `count` elements, and the rest of the last vector, to 16 bits. Returns the factor that
/// they are to be multiplied by: NaN if one of them is not finite. `to` may be where `from` is.
template <class V>
inline float round_to_words(const float* from, std::int64_t count, std::int16_t* to) {
  // Below this the factor's inverse would overflow.
  constexpr float kSmallest = 0x1p-100F;
  constexpr float kLargest = 32767;
  V top = broadcast<V>(kSmallest);
  V trace = zero<V>();  // x - x is NaN where x is not finite
  for (std::int64_t i = 0; i < count; i += V::kLanes) {
    const V value = load<V>(from + i);
    top = max(abs(value), top);
    trace = trace + (value - value);
  }
  const float maximum = largest(top);
  const V inverse = broadcast<V>(kLargest / maximum);
  for (std::int64_t i = 0; i < count; i += V::kLanes) {
    store_words(to + i, load<V>(from + i) * inverse);
  }
  return maximum / kLargest + sum(trace);
}

template <class V>
struct IntegerDecode {
  using Sums = typename V::Integers;
  static constexpr bool kScaled = true;

  /// f32 queries are owed more than 16 bits. Sums of 511 products of -128 and -32768 fit 32 bits.
  /// Elements are taken in pairs.
  static bool serves(const AttentionParams& params) {
    const bool half = params.q.dtype == DType::kBF16 || params.q.dtype == DType::kF16;
    return half && params.k.dtype == DType::kI8 && params.v.dtype == DType::kI8 &&
           params.head_dim % 2 == 0 && params.head_dim < 512;
  }

  template <class Function>
  static void with_keys(DType, const Function& function) {
    function(StoredAs<DType::kI16>{});
  }
  static std::int64_t length(std::int64_t head_dim) { return head_dim / 2; }

  /// A row with an infinity or a NaN has the factor NaN.
  static float load_query(const AttentionParams& params, std::int64_t start,
                          std::int64_t padded_dim, float* to) {
    ElementDecode<V>::load_query(params, start, padded_dim, to);
    return round_to_words<V>(to, padded_dim, reinterpret_cast<std::int16_t*>(to));
  }
  static V load_scores(const float* scores) {
    return to_float(load<Sums>(reinterpret_cast<const std::int32_t*>(scores)));
  }

  static void add_values(const WeightedBlock<V>& block) {
    const std::int64_t dim = block.params.value_dim;
    const std::int64_t count = block.keys.count;
    alignas(64) std::int16_t weights[kDecodeRows * kKeyBlock];
    float factors[kDecodeRows];
    for (std::int64_t r = 0; r < block.rows; ++r) {
      // The last vector is padded with masked weights, which become 0.
      factors[r] = round_to_words<V>(block.weights.at(r, 0), count, weights + r * kKeyBlock);
    }
    StoredRows values{block.keys.v, block.head * block.params.v.head_stride};
    const char* lines[kKeyBlock];
    if (count % 2 != 0) {  // the last key is paired with itself, with a weight of 0
      for (std::int64_t key = 0; key < count; ++key) lines[key] = block.keys.v[key];
      lines[count] = lines[count - 1];
      values.rows = lines;
    }
    add_weighted_rows(block.rows, IntegerValues<V>{values, round_up(count, 2), dim},
                      {reinterpret_cast<const std::uint32_t*>(weights), factors}, block.ahead,
                      block.out);
  }
};

template <class V>
void forward_decode(const AttentionParams& params, const ForwardTask& task, void* memory) {
  if constexpr (!kIsVoid<typename V::Integers>) {
    if (IntegerDecode<V>::serves(params)) {
      return run_forward_decode<V, IntegerDecode<V>>(params, task, memory);
    }
  }
  run_forward_decode<V, ElementDecode<V>>(params, task, memory);
}

template <class V>
std::size_t forward_decode_scratch(const AttentionParams& params) {
  return ForwardDecodeScratch<V>(params, nullptr).bytes;
}

}  // namespace
}  // namespace ladon::cpu
