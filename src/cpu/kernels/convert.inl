// Conversion between storage and compute types: rows in, rows out, blocks of rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention_params.h"
#include "cpu/kernel_table.h"
#include "cpu/kernels/math.inl"
#include "cpu/kernels/operands.inl"

namespace ladon::cpu {
namespace {

template <class Scalar>
constexpr DType kDTypeOf = sizeof(Scalar) == 8 ? DType::kF64 : DType::kF32;

inline const void* at(const void* data, DType dtype, std::int64_t index) {
  return static_cast<const char*>(data) + index * static_cast<std::int64_t>(size_of(dtype));
}
inline void* at(void* data, DType dtype, std::int64_t index) {
  return static_cast<char*>(data) + index * static_cast<std::int64_t>(size_of(dtype));
}

/// Prefetches the cache lines of a row into L2.
inline void prefetch_row(const char* row, std::int64_t bytes) {
  const auto begin = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) %
                                               static_cast<std::uintptr_t>(kCacheLine));
  const char* const end = row + bytes;
  for (const char* line = row - begin; line < end; line += kCacheLine) prefetch_line(line);
}

/// Prefetches `dim` elements of an operand into L2.
inline void prefetch_row(const Operand& operand, std::int64_t start, std::int64_t dim) {
  prefetch_row(static_cast<const char*>(at(operand.data, operand.dtype, start)),
               dim * static_cast<std::int64_t>(size_of(operand.dtype)));
}

/// A stored dtype as a type, for generic lambdas.
template <DType kType>
struct StoredAs {
  static constexpr DType kDType = kType;
};

/// Calls function(StoredAs<dtype>) for a 16-bit float dtype, or any float dtype. Validation refuses
/// the others; the switch names them all, so that the compiler points here when there is a new one.
template <class Function>
inline auto with_half_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF16: return function(StoredAs<DType::kF16>{});
    case DType::kBF16: return function(StoredAs<DType::kBF16>{});
    case DType::kF64:
    case DType::kF32:
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kF8E4M3: break;
  }
  __builtin_unreachable();
}
template <class Function>
inline auto with_float_dtype(DType dtype, const Function& function) {
  if (dtype == DType::kF64) return function(StoredAs<DType::kF64>{});
  if (dtype == DType::kF32) return function(StoredAs<DType::kF32>{});
  return with_half_dtype(dtype, function);
}

/// Calls function(StoredAs<dtype>) for a dtype whose elements are codes with a scale.
template <class Function>
inline auto with_code_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kI8: return function(StoredAs<DType::kI8>{});
    case DType::kF8E4M3: return function(StoredAs<DType::kF8E4M3>{});
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kBool:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64: break;
  }
  __builtin_unreachable();
}

/// Loads or stores one vector of a 16-bit float dtype.
template <DType kDType>
inline F32 load_half(const std::uint16_t* p) {
  static_assert(kDType == DType::kF16 || kDType == DType::kBF16);
  return kDType == DType::kBF16 ? load_bf16(p) : load_f16(p);
}
template <DType kDType>
inline void store_half(std::uint16_t* p, F32 a) {
  static_assert(kDType == DType::kF16 || kDType == DType::kBF16);
  if constexpr (kDType == DType::kBF16) {
    store_bf16(p, a);
  } else {
    store_f16(p, a);
  }
}

/// Converts n elements of a float dtype to f32.
template <DType kFrom>
inline void load_row_as(const void* from, std::int64_t n, float* to) {
  if constexpr (kFrom == DType::kF32) {
    const float* p = static_cast<const float*>(from);
    for (std::int64_t i = 0; i < n; ++i) to[i] = p[i];
  } else if constexpr (kFrom == DType::kF64) {
    const double* p = static_cast<const double*>(from);
    for (std::int64_t i = 0; i < n; ++i) to[i] = narrow<float>(p[i]);
  } else {
    const std::uint16_t* p = static_cast<const std::uint16_t*>(from);
    std::int64_t i = 0;
    for (; i + F32::kLanes <= n; i += F32::kLanes) store(to + i, load_half<kFrom>(p + i));
    if (i == n) return;
    // The tail goes through a buffer: a whole vector past the row's end may not be mapped.
    std::uint16_t tail[F32::kLanes] = {};
    float converted[F32::kLanes];
    for (std::int64_t j = i; j < n; ++j) tail[j - i] = p[j];
    store(converted, load_half<kFrom>(tail));
    for (std::int64_t j = i; j < n; ++j) to[j] = converted[j - i];
  }
}
inline void load_row(const void* from, DType dtype, std::int64_t n, float* to) {
  with_float_dtype(dtype, [&](auto stored) { load_row_as<stored.kDType>(from, n, to); });
}

/// Converts n elements of a float dtype to f64.
inline void load_row(const void* from, DType dtype, std::int64_t n, double* to) {
  if (dtype == DType::kF64) {
    const double* p = static_cast<const double*>(from);
    for (std::int64_t i = 0; i < n; ++i) to[i] = p[i];
    return;
  }
  constexpr std::int64_t kChunk = 64;
  float chunk[kChunk];
  for (std::int64_t i = 0; i < n; i += kChunk) {
    const std::int64_t count = smaller(kChunk, n - i);
    load_row(at(from, dtype, i), dtype, count, chunk);
    for (std::int64_t j = 0; j < count; ++j) to[i + j] = static_cast<double>(chunk[j]);
  }
}

/// Converts n elements from f32 to a float dtype, rounded to nearest even.
template <DType kTo>
inline void store_row_as(const float* from, std::int64_t n, void* to) {
  if constexpr (kTo == DType::kF32) {
    float* p = static_cast<float*>(to);
    for (std::int64_t i = 0; i < n; ++i) p[i] = from[i];
  } else if constexpr (kTo == DType::kF64) {
    double* p = static_cast<double*>(to);
    for (std::int64_t i = 0; i < n; ++i) p[i] = static_cast<double>(from[i]);
  } else {
    std::uint16_t* p = static_cast<std::uint16_t*>(to);
    std::int64_t i = 0;
    for (; i + F32::kLanes <= n; i += F32::kLanes) store_half<kTo>(p + i, load<F32>(from + i));
    if (i == n) return;
    float tail[F32::kLanes] = {};
    std::uint16_t rounded[F32::kLanes];
    for (std::int64_t j = i; j < n; ++j) tail[j - i] = from[j];
    store_half<kTo>(rounded, load<F32>(tail));
    for (std::int64_t j = i; j < n; ++j) p[j] = rounded[j - i];
  }
}
inline void store_row(const float* from, std::int64_t n, void* to, DType dtype) {
  with_float_dtype(dtype, [&](auto stored) { store_row_as<stored.kDType>(from, n, to); });
}

/// Converts n elements from f64 to a float dtype; 16-bit dtypes are rounded to f32 first.
inline void store_row(const double* from, std::int64_t n, void* to, DType dtype) {
  if (dtype == DType::kF64) {
    double* p = static_cast<double*>(to);
    for (std::int64_t i = 0; i < n; ++i) p[i] = from[i];
    return;
  }
  constexpr std::int64_t kChunk = 64;
  float chunk[kChunk];
  for (std::int64_t i = 0; i < n; i += kChunk) {
    const std::int64_t count = smaller(kChunk, n - i);
    for (std::int64_t j = 0; j < count; ++j) chunk[j] = static_cast<float>(from[i + j]);
    store_row(chunk, count, at(to, dtype, i), dtype);
  }
}

/// A buffer for rows in the compute type. Rows that are shorter than `dim` are padded with zeros.
template <class Scalar>
struct Staging {
  Scalar* data = nullptr;
  std::int64_t dim = 0;
  std::int64_t stride = dim;  // elements from one row to the next
  bool always = false;        // rows that could be read in place are staged too
};

// Rows that are read by columns are staged this far apart, so that their lines spread over the sets
// of L1.
template <class Scalar>
inline std::int64_t spread_stride(std::int64_t dim) {
  constexpr auto kLine = kCacheLine / static_cast<std::int64_t>(sizeof(Scalar));
  return round_up(dim, kLine) + (round_up(dim, kLine) / kLine % 2 == 0 ? kLine : 0);
}

/// Whether rows at this distance compete for the lines of L1 when they are read by columns. The
/// sets of an L1 on x86-64 repeat after 4 KiB, and it has 8 to 12 ways: of 64 rows a multiple of 2
/// KiB apart, as the tokens of most models are, 32 and more meet in each set that they reach, and
/// lines are read from L2 again for every step of columns.
inline bool rows_collide(std::int64_t stride, DType dtype) {
  return stride * static_cast<std::int64_t>(size_of(dtype)) % 2048 == 0;
}

/// The first `rows` rows of a matrix, `dim` elements of each, in the compute type: in place where
/// the matrix has that type, else converted into the staging buffer. With staging.dim above `dim`,
/// rows are staged too: their readers load whole vectors and need the zeros.
template <class Scalar>
inline RowBlock<const Scalar> load_block(const Matrix& matrix, std::int64_t rows, std::int64_t dim,
                                         Staging<Scalar> staging) {
  if (matrix.dtype == kDTypeOf<Scalar> && staging.dim == dim && !staging.always) {
    return {static_cast<const Scalar*>(matrix.data), matrix.stride};
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    Scalar* to = staging.data + row * staging.stride;
    load_row(at(matrix.data, matrix.dtype, row * matrix.stride), matrix.dtype, dim, to);
    for (std::int64_t i = dim; i < staging.dim; ++i) to[i] = 0;
  }
  return {staging.data, staging.stride};
}

template <class Scalar>
inline bool all_finite(RowBlock<const Scalar> block, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t row = 0; row < rows; ++row) {
    if (!all_finite(block.row(row), dim)) return false;
  }
  return true;
}

inline double load_lse(const LseOperand& lse, std::int64_t index) {
  return lse.is_f64 ? static_cast<const double*>(lse.data)[index]
                    : static_cast<double>(static_cast<const float*>(lse.data)[index]);
}
inline void store_lse(const LseOperand& lse, std::int64_t index, double value) {
  if (lse.is_f64) {
    static_cast<double*>(lse.data)[index] = value;
  } else {
    static_cast<float*>(lse.data)[index] = static_cast<float>(value);
  }
}

/// One element of a per-head operand.
inline double head_element(const HeadOperand& operand, std::int64_t head) {
  double value = 0;
  load_row(at(operand.data, operand.dtype, head * operand.stride), operand.dtype, 1, &value);
  return value;
}

/// Hands out aligned parts of scratch memory; without any it only counts their bytes. A layout that
/// takes more than was counted for it ends the program: behind it is another worker's memory.
class ScratchArena {
 public:
  explicit ScratchArena(Scratch memory = {}) : memory_(memory) {}
  template <class Scalar>
  Scalar* take(std::int64_t count) {
    const std::size_t begin = used_;
    used_ += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(Scalar)),
                                               static_cast<std::int64_t>(kScratchAlignment)));
    if (memory_.data == nullptr) return nullptr;
    if (used_ > memory_.bytes) __builtin_trap();
    return reinterpret_cast<Scalar*>(memory_.data + begin);
  }
  std::size_t used() const { return used_; }

 private:
  Scratch memory_;
  std::size_t used_ = 0;
};

}  // namespace
}  // namespace ladon::cpu
