// The one matrix product of all kernels: C[m][n] (+)= sum over k of A(m, k) * B[k][n].
//
// n runs along vector lanes, A is broadcast one scalar at a time, so A needs no packing: K, V and
// the score tiles are read as they lie. kGemmRows x kGemmVectors accumulators stay in registers for
// the whole sum over k; each broadcast feeds kGemmVectors FMAs. The sum over k has one fixed order,
// whatever m and n: a row's bits do not depend on its neighbours.
//
// What is multiplied need not be what is summed: a vector type names its Factor. Where that is a
// pair of bf16 numbers, one step over k takes two terms, and everything else is the same.
//
// Guarded products skip what is masked instead of multiplying by its weight of zero, which would
// turn NaN or infinity in a masked place into NaN. Masked weights are stored as -0.0 (exp2 never
// gives that), so no other record is needed. They are slow and run only where a masked block meets
// numbers that are not finite.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/math.inl"
#include "cpu/kernels/operands.inl"

namespace ladon::cpu {
namespace {

enum class Layout { kRows, kColumns };  // A(m, k) is stored at row m, column k, or the reverse
enum class Guard { kNone, kMaskedA, kMaskedB };

/// A from A(m, k) on.
template <Layout kLayout, class Factor>
inline RowBlock<Factor> from_element(RowBlock<Factor> a, std::int64_t m, std::int64_t k) {
  return kLayout == Layout::kRows ? a.from(m, k) : a.from(k, m);
}
template <Layout kLayout, class Factor>
inline auto element(RowBlock<Factor> a, std::int64_t m, std::int64_t k) {
  return kLayout == Layout::kRows ? *a.at(m, k) : *a.at(k, m);
}

/// kRows rows of kVectors vectors. Never inlined: the sums then have all registers, whatever the
/// caller keeps in them.
template <class V, Layout kLayout, int kRows, int kVectors>
[[gnu::noinline]] void gemm_registers(std::int64_t depth, FactorRows<V> a, FactorRows<V> b,
                                      SumTarget<V> c) {
  V sums[std::size_t{kRows}][std::size_t{kVectors}];
  LADON_UNROLL
  for (int m = 0; m < kRows; ++m) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) sums[m][n] = zero<V>();
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    const typename V::Factor* row = b.row(k);
    if constexpr (kRows >= kVectors) {  // hold the vectors, stream the broadcasts
      typename V::Factors held[std::size_t{kVectors}];
      LADON_UNROLL
      for (int n = 0; n < kVectors; ++n) held[n] = load<typename V::Factors>(row + n * V::kLanes);
      LADON_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const auto scalar = broadcast<typename V::Factors>(element<kLayout>(a, m, k));
        LADON_UNROLL
        for (int n = 0; n < kVectors; ++n) sums[m][n] = fma(scalar, held[n], sums[m][n]);
      }
    } else {  // hold the broadcasts, stream the vectors
      typename V::Factors held[std::size_t{kRows}];
      LADON_UNROLL
      for (int m = 0; m < kRows; ++m) {
        held[m] = broadcast<typename V::Factors>(element<kLayout>(a, m, k));
      }
      LADON_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        const auto vector = load<typename V::Factors>(row + n * V::kLanes);
        LADON_UNROLL
        for (int m = 0; m < kRows; ++m) sums[m][n] = fma(held[m], vector, sums[m][n]);
      }
    }
  }
  LADON_UNROLL
  for (int m = 0; m < kRows; ++m) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      typename V::Scalar* out = c.at(m, n * V::kLanes);
      store(out, c.accumulate ? load<V>(out) + sums[m][n] : sums[m][n]);
    }
  }
}

/// The last rows, fewer than kGemmRows: one call with just their number.
template <class V, Layout kLayout, int kVectors, int kRows = V::kGemmRows - 1>
inline void gemm_last_rows(std::int64_t rows, std::int64_t depth, FactorRows<V> a, FactorRows<V> b,
                           SumTarget<V> c) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      gemm_registers<V, kLayout, kRows, kVectors>(depth, a, b, c);
    } else {
      gemm_last_rows<V, kLayout, kVectors, kRows - 1>(rows, depth, a, b, c);
    }
  }
}

/// Rows that a call should have, so that narrow products too fill their registers.
template <class V>
constexpr int kGemmRowsAtOnce = 2 * V::kGemmRows;

/// kVectors vectors of the width.
template <class V, Layout kLayout, int kVectors>
void gemm_rows(std::int64_t rows, std::int64_t depth, FactorRows<V> a, FactorRows<V> b,
               SumTarget<V> c) {
  constexpr int kStep = V::kGemmRows;
  std::int64_t m = 0;
  if constexpr (kVectors <= 2) {  // there are registers for twice the rows, and more sums to hide
                                  // an FMA's latency behind
    constexpr int kTwice = kGemmRowsAtOnce<V>;
    for (; m + kTwice <= rows; m += kTwice) {
      gemm_registers<V, kLayout, kTwice, kVectors>(depth, from_element<kLayout>(a, m, 0), b,
                                                   c.from(m, 0));
    }
  }
  for (; m + kStep <= rows; m += kStep) {
    gemm_registers<V, kLayout, kStep, kVectors>(depth, from_element<kLayout>(a, m, 0), b,
                                                c.from(m, 0));
  }
  gemm_last_rows<V, kLayout, kVectors>(rows - m, depth, from_element<kLayout>(a, m, 0), b,
                                       c.from(m, 0));
}

// Terms that are summed one after the other before the sum is added to C. A chain of n roundings
// can drift by n / 2 units where all terms are alike; two short chains drift far less than a long
// one. At head_dim 128 nothing changes.
inline constexpr std::int64_t kChain = 128;

/// At most kChain terms.
template <class V, Layout kLayout>
inline void gemm_chain(ProductSize size, FactorRows<V> a, FactorRows<V> b, SumTarget<V> c) {
  static_assert(V::kGemmVectors == 4);
  std::int64_t n = 0;
  for (; n + 4 * V::kLanes <= size.width; n += 4 * V::kLanes) {
    gemm_rows<V, kLayout, 4>(size.rows, size.depth, a, b.from(0, n), c.from(0, n));
  }
  switch ((size.width - n) / V::kLanes) {
    case 3: gemm_rows<V, kLayout, 3>(size.rows, size.depth, a, b.from(0, n), c.from(0, n)); break;
    case 2: gemm_rows<V, kLayout, 2>(size.rows, size.depth, a, b.from(0, n), c.from(0, n)); break;
    case 1: gemm_rows<V, kLayout, 1>(size.rows, size.depth, a, b.from(0, n), c.from(0, n)); break;
    default: break;
  }
}

/// `size.width` is a multiple of kLanes; rows of B and C must be readable that far.
template <class V, Layout kLayout>
void gemm(ProductSize size, FactorRows<V> a, FactorRows<V> b, SumTarget<V> c) {
  const std::int64_t depth = size.depth;
  std::int64_t first = 0;
  do {  // once also for no terms: C is then cleared
    size.depth = smaller(kChain, depth - first);
    gemm_chain<V, kLayout>(size, from_element<kLayout>(a, 0, first), b.from(first, 0), c);
    c.accumulate = true;
    first += kChain;
  } while (first < depth);
}

/// The same sums in the same order, leaving out products with a masked (-0.0) weight.
template <class V, Layout kLayout, Guard kGuard>
void gemm_guarded(ProductSize size, FactorRows<V> a, FactorRows<V> b, SumTarget<V> c) {
  using Scalar = typename V::Scalar;
  const V masked = broadcast<V>(static_cast<Scalar>(-0.0));
  for (std::int64_t m = 0; m < size.rows; ++m) {
    for (std::int64_t n = 0; n < size.width; n += V::kLanes) {
      V total = c.accumulate ? load<V>(c.at(m, n)) : zero<V>();
      for (std::int64_t first = 0; first < size.depth; first += kChain) {
        V sum = zero<V>();
        for (std::int64_t k = first; k < smaller(first + kChain, size.depth); ++k) {
          const Scalar scalar = element<kLayout>(a, m, k);
          if (kGuard == Guard::kMaskedA && scalar == 0 && __builtin_signbit(scalar)) continue;
          const V vector = load<V>(b.at(k, n));
          const V product = fma(broadcast<V>(scalar), vector, sum);
          sum =
              kGuard == Guard::kMaskedB ? select(identical(vector, masked), sum, product) : product;
        }
        total = first == 0 && !c.accumulate ? sum : total + sum;
      }
      store(c.at(m, n), total);
    }
  }
}

/// The guarded product where `guard` says so, else the fast one.
template <class V, Layout kLayout, Guard kGuard>
inline void gemm_with_guard(bool guard, ProductSize size, FactorRows<V> a, FactorRows<V> b,
                            SumTarget<V> c) {
  if (guard) {
    gemm_guarded<V, kLayout, kGuard>(size, a, b, c);
  } else {
    gemm<V, kLayout>(size, a, b, c);
  }
}

}  // namespace
}  // namespace ladon::cpu
