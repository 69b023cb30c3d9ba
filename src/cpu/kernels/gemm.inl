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

namespace ladon::cpu {
namespace {

enum class Layout { kRows, kColumns };  // A(m, k) is a[m * lda + k] or a[k * lda + m]
enum class Guard { kNone, kMaskedA, kMaskedB };

template <Layout kLayout, class Scalar>
inline Scalar element(const Scalar* a, std::int64_t lda, std::int64_t m, std::int64_t k) {
  return kLayout == Layout::kRows ? a[m * lda + k] : a[k * lda + m];
}

template <class V, Layout kLayout, int kRows, int kVectors>
inline void gemm_registers(std::int64_t depth, const typename V::Factor* a, std::int64_t lda,
                           const typename V::Factor* b, std::int64_t ldb, typename V::Scalar* c,
                           std::int64_t ldc, bool accumulate) {
  V sums[std::size_t{kRows}][std::size_t{kVectors}];
  LADON_UNROLL
  for (int m = 0; m < kRows; ++m) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) sums[m][n] = zero<V>();
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    const typename V::Factor* row = b + k * ldb;
    if constexpr (kRows >= kVectors) {  // hold the vectors, stream the broadcasts
      typename V::Factors held[std::size_t{kVectors}];
      LADON_UNROLL
      for (int n = 0; n < kVectors; ++n) held[n] = load<typename V::Factors>(row + n * V::kLanes);
      LADON_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const auto scalar = broadcast<typename V::Factors>(element<kLayout>(a, lda, m, k));
        LADON_UNROLL
        for (int n = 0; n < kVectors; ++n) sums[m][n] = fma(scalar, held[n], sums[m][n]);
      }
    } else {  // hold the broadcasts, stream the vectors
      typename V::Factors held[std::size_t{kRows}];
      LADON_UNROLL
      for (int m = 0; m < kRows; ++m) {
        held[m] = broadcast<typename V::Factors>(element<kLayout>(a, lda, m, k));
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
      typename V::Scalar* out = c + m * ldc + n * V::kLanes;
      store(out, accumulate ? load<V>(out) + sums[m][n] : sums[m][n]);
    }
  }
}

/// The last rows, fewer than kGemmRows: one call with just their number.
template <class V, Layout kLayout, int kVectors, int kRows = V::kGemmRows - 1>
inline void gemm_last_rows(std::int64_t rows, std::int64_t depth, const typename V::Factor* a,
                           std::int64_t lda, const typename V::Factor* b, std::int64_t ldb,
                           typename V::Scalar* c, std::int64_t ldc, bool accumulate) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      gemm_registers<V, kLayout, kRows, kVectors>(depth, a, lda, b, ldb, c, ldc, accumulate);
    } else {
      gemm_last_rows<V, kLayout, kVectors, kRows - 1>(rows, depth, a, lda, b, ldb, c, ldc,
                                                      accumulate);
    }
  }
}

/// Rows that a call should have, so that narrow products too fill their registers.
template <class V>
constexpr int kGemmRowsAtOnce = 2 * V::kGemmRows;

template <class V, Layout kLayout, int kVectors>
void gemm_rows(std::int64_t rows, std::int64_t depth, const typename V::Factor* a, std::int64_t lda,
               const typename V::Factor* b, std::int64_t ldb, typename V::Scalar* c,
               std::int64_t ldc, bool accumulate) {
  constexpr int kStep = V::kGemmRows;
  const std::int64_t a_step = kLayout == Layout::kRows ? lda : 1;
  std::int64_t m = 0;
  if constexpr (kVectors <= 2) {  // there are registers for twice the rows, and more sums to hide
                                  // an FMA's latency behind
    constexpr int kTwice = kGemmRowsAtOnce<V>;
    for (; m + kTwice <= rows; m += kTwice) {
      gemm_registers<V, kLayout, kTwice, kVectors>(depth, a + m * a_step, lda, b, ldb, c + m * ldc,
                                                   ldc, accumulate);
    }
  }
  for (; m + kStep <= rows; m += kStep) {
    gemm_registers<V, kLayout, kStep, kVectors>(depth, a + m * a_step, lda, b, ldb, c + m * ldc,
                                                ldc, accumulate);
  }
  gemm_last_rows<V, kLayout, kVectors>(rows - m, depth, a + m * a_step, lda, b, ldb, c + m * ldc,
                                       ldc, accumulate);
}

// Terms that are summed one after the other before the sum is added to C. A chain of n roundings
// can drift by n / 2 units where all terms are alike; two short chains drift far less than a long
// one. At head_dim 128 nothing changes.
inline constexpr std::int64_t kChain = 128;

/// At most kChain terms.
template <class V, Layout kLayout>
inline void gemm_chain(std::int64_t rows, std::int64_t width, std::int64_t depth,
                       const typename V::Factor* a, std::int64_t lda, const typename V::Factor* b,
                       std::int64_t ldb, typename V::Scalar* c, std::int64_t ldc, bool accumulate) {
  static_assert(V::kGemmVectors == 4);
  std::int64_t n = 0;
  for (; n + 4 * V::kLanes <= width; n += 4 * V::kLanes) {
    gemm_rows<V, kLayout, 4>(rows, depth, a, lda, b + n, ldb, c + n, ldc, accumulate);
  }
  switch ((width - n) / V::kLanes) {
    case 3:
      gemm_rows<V, kLayout, 3>(rows, depth, a, lda, b + n, ldb, c + n, ldc, accumulate);
      break;
    case 2:
      gemm_rows<V, kLayout, 2>(rows, depth, a, lda, b + n, ldb, c + n, ldc, accumulate);
      break;
    case 1:
      gemm_rows<V, kLayout, 1>(rows, depth, a, lda, b + n, ldb, c + n, ldc, accumulate);
      break;
    default: break;
  }
}

/// `width` is a multiple of kLanes; rows of B and C must be readable that far.
template <class V, Layout kLayout>
void gemm(std::int64_t rows, std::int64_t width, std::int64_t depth, const typename V::Factor* a,
          std::int64_t lda, const typename V::Factor* b, std::int64_t ldb, typename V::Scalar* c,
          std::int64_t ldc, bool accumulate) {
  const std::int64_t a_step = kLayout == Layout::kRows ? 1 : lda;
  std::int64_t first = 0;
  do {  // once also for no terms: C is then cleared
    gemm_chain<V, kLayout>(rows, width, smaller(kChain, depth - first), a + first * a_step, lda,
                           b + first * ldb, ldb, c, ldc, accumulate || first > 0);
    first += kChain;
  } while (first < depth);
}

/// The same sums in the same order, leaving out products with a masked (-0.0) weight.
template <class V, Layout kLayout, Guard kGuard>
void gemm_guarded(std::int64_t rows, std::int64_t width, std::int64_t depth,
                  const typename V::Scalar* a, std::int64_t lda, const typename V::Scalar* b,
                  std::int64_t ldb, typename V::Scalar* c, std::int64_t ldc, bool accumulate) {
  using Scalar = typename V::Scalar;
  const V masked = broadcast<V>(static_cast<Scalar>(-0.0));
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t n = 0; n < width; n += V::kLanes) {
      V total = accumulate ? load<V>(c + m * ldc + n) : zero<V>();
      for (std::int64_t first = 0; first < depth; first += kChain) {
        V sum = zero<V>();
        for (std::int64_t k = first; k < smaller(first + kChain, depth); ++k) {
          const Scalar scalar = element<kLayout>(a, lda, m, k);
          if (kGuard == Guard::kMaskedA && scalar == 0 && __builtin_signbit(scalar)) continue;
          const V vector = load<V>(b + k * ldb + n);
          const V product = fma(broadcast<V>(scalar), vector, sum);
          sum =
              kGuard == Guard::kMaskedB ? select(identical(vector, masked), sum, product) : product;
        }
        total = first == 0 && !accumulate ? sum : total + sum;
      }
      store(c + m * ldc + n, total);
    }
  }
}

/// The guarded product where `guard` says so, else the fast one.
template <class V, Layout kLayout, Guard kGuard>
inline void gemm_with_guard(bool guard, std::int64_t rows, std::int64_t width, std::int64_t depth,
                            const typename V::Scalar* a, std::int64_t lda,
                            const typename V::Scalar* b, std::int64_t ldb, typename V::Scalar* c,
                            std::int64_t ldc, bool accumulate) {
  if (guard) {
    gemm_guarded<V, kLayout, kGuard>(rows, width, depth, a, lda, b, ldb, c, ldc, accumulate);
  } else {
    gemm<V, kLayout>(rows, width, depth, a, lda, b, ldb, c, ldc, accumulate);
  }
}

}  // namespace
}  // namespace ladon::cpu
