// Decoding where q, k and v are all bf16: q.k as dot products of pairs, both as they lie; of the
// weights, rounded to bf16, and the values, pairs run along keys: two rows of values become one of
// pairs in registers. Half the steps of forward_few.inl, and nothing is widened.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/forward_few.inl"
#include "cpu/kernels/pairs.inl"

namespace ladon::cpu {
namespace {

/// Values of two keys at a time.
template <class Pairs>
struct PairValues {
  using Sums = Pairs;
  using Factors = typename Pairs::Factors;
  static constexpr std::int64_t kKeys = 2;
  StoredRows rows;
  std::int64_t count;
  std::int64_t dim;

  template <int kVectors>
  void load(std::int64_t step, std::int64_t column, Factors* value) const {
    const char* first = rows[2 * step] + 2 * column;
    if (2 * step + 1 < count && column + kVectors * Pairs::kLanes <= dim) {
      const auto* low = reinterpret_cast<const std::uint16_t*>(first);
      const auto* high = reinterpret_cast<const std::uint16_t*>(rows[2 * step + 1] + 2 * column);
      if constexpr (kVectors == 1) {
        value[0] = load_pairs(low, high);
      } else {
        LADON_UNROLL
        for (int n = 0; n < kVectors; n += 2) {
          load_pairs(low + n * Pairs::kLanes, high + n * Pairs::kLanes, value + n);
        }
      }
      return;
    }
    // The last numbers of a row, or a key that is alone.
    constexpr std::int64_t kBytes = 2 * Pairs::kLanes;
    const std::int64_t bytes = 2 * (dim - column);
    alignas(64) char low[64];
    alignas(64) char high[64] = {};
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      const std::int64_t some = smaller(kBytes, bytes - n * kBytes);
      copy_first(low, first + n * kBytes, some);
      if (2 * step + 1 < count) {
        copy_first(high, rows[2 * step + 1] + 2 * column + n * kBytes, some);
      }
      value[n] = load_pairs(reinterpret_cast<const std::uint16_t*>(low),
                            reinterpret_cast<const std::uint16_t*>(high));
    }
  }
};

template <class V, class Pairs>
struct PairFew {
  using Sums = Pairs;
  static constexpr bool kScaled = false;  // scale * q would be rounded

  template <class Function>
  static void with_keys(DType, const Function& function) {
    function(StoredAs<kDTypeOf<Pair>>{});
  }
  static std::int64_t length(std::int64_t head_dim) { return pairs_in(head_dim); }
  static void load_query(const AttentionParams& params, std::int64_t start, std::int64_t padded_dim,
                         float* to) {
    const auto used = static_cast<std::size_t>(params.head_dim) * sizeof(std::uint16_t);
    char* bytes = reinterpret_cast<char*>(to);
    __builtin_memcpy(bytes, at(params.q.data, params.q.dtype, start), used);
    __builtin_memset(bytes + used, 0, static_cast<std::size_t>(padded_dim) * sizeof(float) - used);
  }

  static void add_values(const WeightedBlock<V>& block) {
    const std::int64_t dim = block.params.value_dim;
    const std::int64_t count = block.keys.count;
    constexpr std::int64_t kPairs = kKeyBlock / 2;
    alignas(64) Pair weights[kFewRows * kPairs];
    for (std::int64_t r = 0; r < block.rows; ++r) {
      for (std::int64_t i = 0; i < count; i += V::kLanes) {
        round_to_bf16(reinterpret_cast<std::uint16_t*>(weights + r * kPairs) + i,
                      load<V>(block.weights + r * kKeyBlock + i));
      }
    }
    PairValues<Pairs> values{
        {block.keys.v, block.head * block.params.v.head_stride * 2}, count, dim};
    // What is masked adds nothing, not even where it is NaN: then the product takes zeros for what
    // is not finite, and what is seen of that comes after it.
    const StoredRows stored = values.rows;
    const bool finite = !block.masks || all_finite<V, DType::kBF16>(stored, count, dim);
    const char* lines[kKeyBlock];
    if (!finite) {
      const std::int64_t stride = pairs_in(dim);
      Pair* staging = reinterpret_cast<Pair*>(block.staging);
      const auto row_at = [&](std::int64_t key) {
        return reinterpret_cast<const std::uint16_t*>(stored[key]);
      };
      copy_as_pairs(count, dim, stride, row_at, staging);
      clear_not_finite(staging, count * stride);
      for (std::int64_t key = 0; key < count; ++key) {
        lines[key] = reinterpret_cast<const char*>(staging + key * stride);
      }
      values.rows = {lines, 0};
    }
    add_weighted_rows(block.rows, values, weights, kPairs, block.ahead, block.out, block.stride);
    for (std::int64_t key = 0; !finite && key < count; ++key) {
      add_not_finite(reinterpret_cast<const std::uint16_t*>(stored[key]), dim, block.weights + key,
                     kKeyBlock, block.rows, block.out, 1, block.stride);
    }
  }
};

template <class V, class Pairs>
void forward_few_of_pairs(const AttentionParams& params, const ForwardTask& task, void* memory) {
  if (params.head_dim % 2 == 0) {
    return run_forward_few<V, PairFew<V, Pairs>>(params, task, memory);
  }
  forward_few<V>(params, task, memory);  // half of a key's last pair would be a stranger's
}

}  // namespace
}  // namespace ladon::cpu
