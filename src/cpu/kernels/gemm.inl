// The matrix product of all kernels: C[m][n] (+)= sum over k of A(m, k) * B[k][n].
//
// n runs along vector lanes and A is broadcast one scalar at a time, so that A needs no packing: K,
// V and the score tiles are read in place. kGemmRows x kGemmVectors accumulators stay in registers
// for the whole sum over k; each broadcast feeds kGemmVectors FMAs. The sum over k has one fixed
// order, whatever m and n are: a row's bits do not depend on its neighbours.
//
// The factors may have another type than the sums: a vector type names its Factor. Where that is a
// pair of bf16 elements, one step over k takes two terms; everything else is the same.
//
// Guarded products skip masked terms instead of multiplying them by a weight of zero, because 0
// times NaN or infinity is NaN. Masked weights are stored as -0.0, which exp2 never gives, so that
// no separate mask is needed. Guarded products are slow and run only where a block has masked
// places and the other operand has non-finite elements.
//
// In AVX2's 16 registers 3 x 4 sums load 7 vectors for 12 FMAs, and nothing is spilled: alone, over
// blocks of 64 keys of 128, K q^T runs at 95 % of FMA and V^T weights at 89 %. (6 x 2 would load
// 8.) Tried and lost: unrolling the loop over k by 4 (V^T weights at 83 %).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/math.inl"
#include "cpu/kernels/operands.inl"

namespace ladon::cpu {
namespace {

enum class Layout { kRows, kColumns };  // A(m, k) is stored at row m, column k, or the reverse
enum class Guard { kNone, kMaskedA, kMaskedB };

/// The part of A that begins at A(m, k).
template <Layout kLayout, class Factor>
inline RowBlock<Factor> from_element(RowBlock<Factor> a, std::int64_t m, std::int64_t k) {
  return kLayout == Layout::kRows ? a.from(m, k) : a.from(k, m);
}
template <Layout kLayout, class Factor>
inline auto element(RowBlock<Factor> a, std::int64_t m, std::int64_t k) {
  return kLayout == Layout::kRows ? *a.at(m, k) : *a.at(k, m);
}

/// kRows rows of kVectors vectors. Never inlined: GCC 12 allocates registers worse inside a larger
/// function (2 to 6 % of the forward pass on AVX2).
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
    if constexpr (kRows >= kVectors) {  // keeps the vectors of B in registers
      typename V::Factors held[std::size_t{kVectors}];
      LADON_UNROLL
      for (int n = 0; n < kVectors; ++n) held[n] = load<typename V::Factors>(row + n * V::kLanes);
      LADON_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const auto scalar = broadcast<typename V::Factors>(element<kLayout>(a, m, k));
        LADON_UNROLL
        for (int n = 0; n < kVectors; ++n) sums[m][n] = fma(scalar, held[n], sums[m][n]);
      }
    } else {  // keeps the broadcasts of A in registers
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

/// The last rows, fewer than kGemmRows: calls gemm_registers() for exactly that many.
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

/// Rows of a call that let narrow products fill the registers too.
template <class V>
constexpr int kGemmRowsAtOnce = 2 * V::kGemmRows;

/// kVectors vectors of the width.
template <class V, Layout kLayout, int kVectors>
void gemm_rows(std::int64_t rows, std::int64_t depth, FactorRows<V> a, FactorRows<V> b,
               SumTarget<V> c) {
  constexpr int kStep = V::kGemmRows;
  std::int64_t m = 0;
  // Narrow products have registers for twice the rows, and need the sums to hide FMA latency.
  if constexpr (kVectors <= 2) {
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

// Terms that are summed in sequence before the sum is added to C. The error of a chain of n
// roundings can reach n / 2 units in the last place where all terms are alike; two short chains
// stay far below one long chain. At head_dim 128 there is one chain.
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
  do {  // runs once for depth 0 too, which clears C
    size.depth = smaller(kChain, depth - first);
    gemm_chain<V, kLayout>(size, from_element<kLayout>(a, 0, first), b.from(first, 0), c);
    c.accumulate = true;
    first += kChain;
  } while (first < depth);
}

/// The same sums in the same order, without the terms whose weight is masked (-0.0).
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

/// gemm_guarded() if `guard`, else gemm().
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
