// bf16 operands as pairs, either of neighbours in a row (as bf16 rows are stored) or of two rows;
// and the handling of non-finite elements.
//
// An Engine multiplies pairs:
//   kUnit                            rows and depths of its products are multiples of this
//   kRowsAtOnce                      rows of a product that fill its registers: whole units
//   begin()                          called before the first product
//   multiply(size, a, b, c)          c (+)= a b; size.depth counts pairs, which run along rows of a
//   columns(dim, depth, a, scratch)  prepares a, [depth][dim], for multiply_columns(): returns it,
//                                    or a copy in `scratch`, which is as large, in another order
//   multiply_columns(first, size, a, b, c)
//                                    c (+)= rows [first, first + size.rows) of a^T b
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kv_blocks.inl"
#include "cpu/kernels/tile_products.inl"

namespace ladon::cpu {
namespace {

using Pair = std::uint32_t;  // the first element in the low half

using PairMatrix = RowBlock<const Pair>;

/// Products with the vector instruction for pairs.
template <class Pairs>
class VectorEngine {
 public:
  static constexpr std::int64_t kUnit = 1;
  static constexpr std::int64_t kRowsAtOnce = kGemmRowsAtOnce<Pairs>;
  static void begin() {}
  static void multiply(ProductSize size, PairMatrix a, PairMatrix b, ProductTarget<float> c) {
    gemm<Pairs, Layout::kRows>(size, a, b, c);
  }
  static PairMatrix columns(std::int64_t dim, std::int64_t, const Pair* a, Pair*) {
    return {a, dim};
  }
  static void multiply_columns(std::int64_t first, ProductSize size, PairMatrix a, PairMatrix b,
                               ProductTarget<float> c) {
    gemm<Pairs, Layout::kColumns>(size, a.from(0, first), b, c);
  }
};

inline std::int64_t pairs_in(std::int64_t n) { return (n + 1) / 2; }

/// Elements 2i and 2i + 1 of a row; zeros past its end.
inline Pair pair_at(const std::uint16_t* row, std::int64_t i, std::int64_t dim) {
  const Pair first = 2 * i < dim ? row[2 * i] : 0U;
  const Pair second = 2 * i + 1 < dim ? row[2 * i + 1] : 0U;
  return first | second << 16U;
}

/// Pairs the elements of two rows. A null row, and what is past `dim`, counts as zeros.
inline void pair_rows(const std::uint16_t* first, const std::uint16_t* second, std::int64_t dim,
                      std::int64_t padded_dim, Pair* to) {
  std::int64_t i = 0;
  if (second != nullptr) {
    for (; i + F32::kLanes <= dim; i += F32::kLanes) store_pairs(to + i, first + i, second + i);
  }
  for (; i < padded_dim; ++i) {
    const Pair low = first == nullptr || i >= dim ? 0U : first[i];
    const Pair high = second == nullptr || i >= dim ? 0U : second[i];
    to[i] = low | high << 16U;
  }
}

/// Row r of a tile in an operand; null past the tile's last row.
inline const std::uint16_t* row_of(const QueryOperand& from, std::int64_t r) {
  if (r >= from.rows.count) return nullptr;
  return static_cast<const std::uint16_t*>(from.operand.data) + from.start(r);
}

/// The row of one key; null past the span's end.
template <KvPart kPart>
inline const std::uint16_t* row_of(const KeySpan& span, std::int64_t i) {
  if (i >= span.count()) return nullptr;
  const std::int64_t slot = kv_slot(span.params.kv_layout, span.sequence, span.begin + i);
  return static_cast<const std::uint16_t*>(kv_operand<kPart>(span.params).data) +
         kv_row<kPart>(span.params, span.sequence, span.kv_head, slot);
}

/// Transposes rows, as pairs of neighbours, to [depth][width]; row_at(i) is null for a missing row.
template <class RowAt>
inline void pair_along_rows(const RowAt& row_at, std::int64_t width, std::int64_t dim,
                            std::int64_t depth, Pair* to) {
  constexpr std::int64_t kSide = F32::kLanes;
  const std::int64_t squares = dim / 2 / kSide * kSide;  // pairs that fill whole squares
  for (std::int64_t first = 0; first < width; first += kSide) {
    const std::int64_t end = smaller(first + kSide, width);
    const bool whole = end == first + kSide && row_at(end - 1) != nullptr;
    for (std::int64_t i = 0; whole && i < squares; i += kSide) {
      transpose_square<F32>(
          [&](int lane) {
            return load<F32>(reinterpret_cast<const float*>(row_at(first + lane) + 2 * i));
          },
          kSide, reinterpret_cast<float*>(to + i * width + first), width);
    }
    for (std::int64_t r = first; r < end; ++r) {
      const std::uint16_t* row = row_at(r);
      for (std::int64_t i = whole ? squares : 0; i < depth; ++i) {
        to[i * width + r] = row == nullptr ? 0 : pair_at(row, i, dim);
      }
    }
  }
}

/// The same for a tile's rows.
inline void pair_along_rows(const QueryOperand& from, std::int64_t width, std::int64_t depth,
                            Pair* to) {
  pair_along_rows([&](std::int64_t r) { return row_of(from, r); }, width, from.dim, depth, to);
}

/// Copies rows of `dim` elements to rows of `depth` pairs, padded with zeros; row_at(i) is null for
/// a missing row.
template <class RowAt>
inline void copy_as_pairs(std::int64_t rows, std::int64_t dim, std::int64_t depth,
                          const RowAt& row_at, Pair* to) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::uint16_t* row = row_at(i);
    char* bytes = reinterpret_cast<char*>(to + i * depth);
    const auto used = row == nullptr ? 0 : static_cast<std::size_t>(dim) * sizeof(*row);
    if (row != nullptr) __builtin_memcpy(bytes, row, used);
    __builtin_memset(bytes + used, 0, static_cast<std::size_t>(depth) * sizeof(Pair) - used);
  }
}

/// Keys or values as rows of `depth` pairs: in place where they are whole units of whole pairs in
/// consecutive slots, else copied to the staging buffer and padded with zeros.
template <KvPart kPart, std::int64_t kUnit>
inline PairMatrix pairs_as_stored(const KeySpan& span, std::int64_t depth, Pair* staging) {
  const Operand& operand = kv_operand<kPart>(span.params);
  const std::int64_t dim = kv_dim<kPart>(span.params);
  const std::uint16_t* first = row_of<kPart>(span, 0);
  // Pairs must be aligned as the compiler may assume.
  if (slots_contiguous(span.params.kv_layout, span.sequence, span.begin, span.end) &&
      dim == 2 * depth && span.count() % kUnit == 0 && operand.token_stride % 2 == 0 &&
      reinterpret_cast<std::uintptr_t>(first) % sizeof(Pair) == 0) {
    return {reinterpret_cast<const Pair*>(first), operand.token_stride / 2};
  }
  copy_as_pairs(
      round_up(span.count(), kUnit), dim, depth,
      [&](std::int64_t key) { return row_of<kPart>(span, key); }, staging);
  return {staging, depth};
}

/// Pairs the weights of two keys at a time, [pair][width]; missing keys have weights of zero.
inline void pair_weights(const ScoreTile<const float>& weights, std::int64_t pairs, Pair* to) {
  const std::int64_t width = weights.width;
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    for (std::int64_t lane = 0; lane < width; lane += F32::kLanes) {
      const auto weight = [&](std::int64_t key) {
        return key < weights.keys ? load<F32>(weights.data + key * width + lane) : zero<F32>();
      };
      store_pairs(to + pair * width + lane, weight(2 * pair), weight(2 * pair + 1));
    }
  }
}

inline bool is_finite(Pair low_half) {
  constexpr Pair kExponent = 0x7f80;  // all ones: NaN or infinity
  return (low_half & kExponent) != kExponent;
}

inline bool all_finite(const std::uint16_t* row, std::int64_t dim) {
  unsigned finite = 1;
  for (std::int64_t i = 0; i < dim; ++i) finite &= static_cast<unsigned>(is_finite(row[i]));
  return finite != 0;
}

/// Replaces non-finite elements by 0, because a masked weight of zero times one would be NaN.
/// add_not_finite() adds the terms that are not masked.
inline void clear_not_finite(Pair* pairs, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!is_finite(pairs[i])) pairs[i] &= 0xffff0000U;
    if (!is_finite(pairs[i] >> 16U)) pairs[i] &= 0xffffU;
  }
}

/// Pairs rows two by two, [pair][padded_dim]; row_at(i) may be null.
template <class RowAt>
inline void pair_two_by_two(std::int64_t pairs, std::int64_t dim, std::int64_t padded_dim,
                            const RowAt& row_at, Pair* to) {
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    pair_rows(row_at(2 * pair), row_at(2 * pair + 1), dim, padded_dim, to + pair * padded_dim);
  }
}

/// The same with non-finite elements replaced by 0. Returns whether all were finite.
template <class RowAt>
inline bool pair_finite(std::int64_t pairs, std::int64_t dim, std::int64_t padded_dim,
                        const RowAt& row_at, Pair* to) {
  pair_two_by_two(pairs, dim, padded_dim, row_at, to);
  bool finite = true;
  for (std::int64_t i = 0; finite && i < 2 * pairs; ++i) {
    const std::uint16_t* row = row_at(i);
    finite = row == nullptr || all_finite(row, dim);
  }
  if (!finite) clear_not_finite(to, pairs * padded_dim);
  return finite;
}

/// One row of bf16 elements.
struct Bf16Row {
  const std::uint16_t* data = nullptr;
  std::int64_t dim = 0;
};

/// `count` weights, `stride` elements apart.
struct WeightVector {
  const float* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t count = 0;
};

/// Where an outer product is added: weights[j] * row[i] at i * row_step + j * weight_step.
struct OuterProductTarget {
  float* data = nullptr;
  std::int64_t row_step = 0;
  std::int64_t weight_step = 0;
};

/// Adds weights[j] * row[i] for each non-finite element of the row and each weight that is not
/// masked (-0.0).
inline void add_not_finite(Bf16Row row, WeightVector weights, OuterProductTarget to) {
  for (std::int64_t i = 0; i < row.dim; ++i) {
    if (is_finite(row.data[i])) continue;
    float value = 0;
    load_row(row.data + i, DType::kBF16, 1, &value);
    for (std::int64_t j = 0; j < weights.count; ++j) {
      const float weight = weights.data[j * weights.stride];
      const bool masked = weight == 0 && __builtin_signbit(weight);
      if (!masked) to.data[i * to.row_step + j * to.weight_step] += weight * value;
    }
  }
}

}  // namespace
}  // namespace ladon::cpu
