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
// and a key of 128 in L2: 26 ns instead of 33 with AVX2, 19 instead of 30 with VNNI. Of these, q.k
// takes 8 and 6.7, the weighted sum 10 and 6, the rest is softmax, scales, rounding and
// prefetching. The products alone would take 4.3 ns each on the two pipes that have them (32 of
// words with AVX2, 16 with VNNI, for a key), and AVX2's additions compete for the same pipes: 5.6
// cycles, not 4, for eight products and eight additions with their loads.
//
// Tried and lost: values paired and converted to 16 bits once for a block, into scratch (AVX2 31
// ns, VNNI 23). With VNNI, factors as two planes of bytes, which need no conversion and end in
// fewer horizontal sums, but as many products (22 ns). With AVX2, half of a block's keys at a time,
// because 64 rows a KiB apart do not fit their sets of L1 (no change), and values interleaved into
// scratch as bytes (no change).
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

/// How some elements are rounded to 16 bits: times `inverse`, to the nearest. The integers are to
/// be multiplied by `factor`, which is NaN if a number is not finite.
struct WordScale {
  float inverse = 0;
  float factor = 0;

  /// Sees all the elements first.
  template <class V>
  class Watch {
   public:
    void add(V value) {
      top_ = max(abs(value), top_);
      trace_ = trace_ + (value - value);
    }
    WordScale result() const {
      constexpr float kLargest = 32767;
      const float maximum = largest(top_);
      return {kLargest / maximum, maximum / kLargest + sum(trace_)};
    }

   private:
    V top_ = broadcast<V>(0x1p-100F);  // below this the factor's inverse would overflow
    V trace_ = zero<V>();              // x - x is NaN where x is not finite
  };
};

/// Rounds `count` elements, and the rest of the last vector, to 16 bits. `to` may be where `from`
/// is.
template <class V>
inline void round_to_words(const float* from, std::int64_t count, float inverse, std::int16_t* to) {
  for (std::int64_t i = 0; i < count; i += V::kLanes) {
    store_words(to + i, load<V>(from + i) * broadcast<V>(inverse));
  }
}

// Most rows of word_dots().
inline constexpr int kWordRows = 6;

/// out[row][key] = q[row] . keys[key] for kRows rows and eight keys of int8 pairs, two keys at a
/// time, whose sums are folded together: less than half the instructions of horizontal sums. Never
/// inlined, because of GCC 12's registers.
template <class Sums, int kRows>
[[gnu::noinline]] void word_dots(std::int64_t length, FactorRows<Sums> q, const char* const* keys,
                                 SumTarget<Sums> out) {
  using Factors = typename Sums::Factors;
  Sums folded[4][std::size_t{kRows}];
  for (int pair = 0; pair < 4; ++pair) {
    Sums sums[std::size_t{kRows}][2];
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = zero<Sums>();
    const auto add = [&](std::int64_t i, Factors first, Factors second)
        __attribute__((always_inline)) {
      LADON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Factors row = in_register(load<Factors>(q.at(r, i)));
        sums[r][0] = fma(row, first, sums[r][0]);
        sums[r][1] = fma(row, second, sums[r][1]);
      }
    };
    const char* const first = keys[pair];
    const char* const second = keys[pair + 4];
    std::int64_t i = 0;
    for (; i + Sums::kLanes <= length; i += Sums::kLanes) {
      add(i, load_stored<Factors, DType::kI16>(first, i),
          load_stored<Factors, DType::kI16>(second, i));
    }
    if (i < length) {
      add(i, load_stored_last<Factors, DType::kI16>(first, i, length),
          load_stored_last<Factors, DType::kI16>(second, i, length));
    }
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) folded[pair][r] = fold_two(sums[r][0], sums[r][1]);
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    store(out.at(r, 0), fold_four(folded[0][r], folded[1][r], folded[2][r], folded[3][r]));
  }
}

/// At most kRows rows.
template <class Sums, int kRows = kWordRows>
inline void word_dots_of(std::int64_t rows, std::int64_t length, FactorRows<Sums> q,
                         const char* const* keys, SumTarget<Sums> out) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return word_dots<Sums, kRows>(length, q, keys, out);
    word_dots_of<Sums, kRows - 1>(rows, length, q, keys, out);
  }
}

// Keys that are scored at once where sums of several keys are folded together.
inline constexpr std::int64_t kFoldedKeys = 8;

/// The addresses of eight keys; the last one's for those that are missing.
struct EightKeys {
  const char* rows[kFoldedKeys];
  EightKeys(StoredRows keys, std::int64_t count) {
    if (count >= kFoldedKeys) {
      for (std::int64_t key = 0; key < kFoldedKeys; ++key) rows[key] = keys[key];
    } else {
      for (std::int64_t key = 0; key < kFoldedKeys; ++key) {
        rows[key] = keys[smaller(key, count - 1)];
      }
    }
  }
};

template <class V>
struct IntegerDecode : DotScores<typename V::Integers> {
  using Sums = typename V::Integers;
  using WeightScale = WordScale;
  static constexpr bool kScaled = true;
  static constexpr bool kStreams = false;

  static std::int64_t keys_at_once(std::int64_t rows) {
    return Sums::kFoldsKeys ? kFoldedKeys : DotScores<Sums>::keys_at_once(rows);
  }

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
    WordScale::Watch<V> watch;
    for (std::int64_t i = 0; i < padded_dim; i += V::kLanes) watch.add(load<V>(to + i));
    const WordScale scale = watch.result();
    round_to_words<V>(to, padded_dim, scale.inverse, reinterpret_cast<std::int16_t*>(to));
    return scale.factor;
  }
  static V load_scores(const float* scores) {
    return to_float(load<Sums>(reinterpret_cast<const std::int32_t*>(scores)));
  }

  /// Where sums are folded, eight scores of each row are written.
  template <DType kStored>
  static void score(ProductSize size, RowBlock<float> q, StoredRows keys, float* scores) {
    if constexpr (Sums::kFoldsKeys) {
      const EightKeys lines(keys, size.width);
      const FactorRows<Sums> rows{reinterpret_cast<const std::uint32_t*>(q.data), q.stride};
      const SumTarget<Sums> out{reinterpret_cast<std::int32_t*>(scores), kKeyBlock};
      for (std::int64_t r = 0; r < size.rows;) {
        const std::int64_t some = register_rows(size.rows - r, kWordRows);
        word_dots_of<Sums>(some, size.depth, rows.from(r, 0), lines.rows, out.from(r, 0));
        r += some;
      }
    } else {
      DotScores<Sums>::template score<kStored>(size, q, keys, scores);
    }
  }

  static void add_values(const WeightedBlock<V>& block, const WordScale* scales) {
    const std::int64_t dim = block.params.value_dim;
    const std::int64_t count = block.keys.count;
    alignas(64) std::int16_t weights[kDecodeRows * kKeyBlock];
    float factors[kDecodeRows];
    for (std::int64_t r = 0; r < block.rows; ++r) {
      // The last vector is padded with masked weights, which become 0.
      round_to_words<V>(block.weights.at(r, 0), count, scales[r].inverse, weights + r * kKeyBlock);
      factors[r] = scales[r].factor;
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
void forward_decode(const AttentionParams& params, const ForwardTask& task, Scratch memory) {
  if constexpr (!kIsVoid<typename V::Integers>) {
    if (IntegerDecode<V>::serves(params)) {
      return run_forward_decode<V, IntegerDecode<V>>(params, task, memory);
    }
  }
  run_forward_decode<V, ElementDecode<V>>(params, task, memory);
}

template <class V>
std::size_t forward_decode_scratch(const AttentionParams& params) {
  return ForwardDecodeScratch<V>(params, {}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
