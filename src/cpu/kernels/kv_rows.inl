// Copies rows of keys and values into and out of a cache's slots, with conversion.
//
// The bound is memory: each row is read once and written once. Large copies bypass the caches,
// which spares reading what is overwritten. Quantising takes two passes over a row in L1, in f32;
// rows with a quotient too near the middle between two integers for f32 to decide are divided again
// in double, so that every int8 is the nearest one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/exact_rows.inl"

namespace ladon::cpu {
namespace {

/// Keys or values: their slots, and the rows outside the cache.
struct KvRowsPart {
  const KvSlots& slots;
  const Operand& rows;
  std::int64_t first;  // first element of the run's first token
  std::int64_t dim;
};

/// Calls function(part) for keys and for values, where they are present.
template <class Function>
inline void for_each_part(const KvRowsParams& params, const KvRun& run, const Function& function) {
  if (params.k.data != nullptr) {
    function(KvRowsPart{params.k_slots, params.k, run.k, params.head_dim});
  }
  if (params.v.data != nullptr) {
    function(KvRowsPart{params.v_slots, params.v, run.v, params.value_dim});
  }
}

/// One row: its first element inside and outside the cache, and its length.
struct KvRow {
  std::int64_t inside;
  std::int64_t outside;
  std::int64_t count;
  float* scale;
};

/// Calls function(row) for every head of a task's tokens; all heads of a token are one row where
/// they are contiguous on both sides and have no scales.
template <class Function>
inline void for_each_kv_row(const KvRowsParams& params, const KvRowsTask& task,
                            const KvRowsPart& part, const Function& function) {
  const std::int64_t heads = params.num_kv_heads;
  const KvSlots& slots = part.slots;
  const bool whole =
      !params.format.scaled &&
      (heads == 1 || (part.rows.head_stride == part.dim && slots.head_stride == part.dim));
  for (std::int64_t token = task.begin; token < task.end; ++token) {
    const std::int64_t slot = params.runs[task.run].slot + token;
    KvRow row{slot * slots.slot_stride, part.first + token * part.rows.token_stride, part.dim,
              nullptr};
    if (whole) {
      row.count = heads * part.dim;
      function(row);
      continue;
    }
    for (std::int64_t head = 0; head < heads; ++head) {
      if (params.format.scaled) {
        row.scale = slots.scales + slot * slots.scale_slot_stride + head * slots.scale_head_stride;
      }
      function(row);
      row.inside += slots.head_stride;
      row.outside += part.rows.head_stride;
    }
  }
}

struct KvRowsScratch {
  double* row;  // one head, padded to whole vectors
  float* row_f32;
  std::size_t bytes;

  KvRowsScratch(const KvRowsParams& params, void* base) {
    ScratchArena arena(base);
    const std::int64_t longest = larger(params.head_dim, params.value_dim);
    row = arena.take<double>(round_up(longest, F64::kLanes));
    row_f32 = arena.take<float>(round_up(longest, F32::kLanes));
    bytes = arena.used();
  }
};

/// The largest magnitude of a row, padded with zeros to whole vectors; NaN where an element is not
/// finite.
template <class V>
inline typename V::Scalar largest_magnitude(const typename V::Scalar* row, std::int64_t dim) {
  V top = zero<V>();
  V trace = zero<V>();  // x - x is 0 for finite x, else NaN
  for (std::int64_t i = 0; i < dim; i += V::kLanes) {
    const V value = load<V>(row + i);
    top = max(abs(value), top);
    trace = trace + (value - value);
  }
  return largest(top) + sum(trace);
}

template <class V>
inline void pad_with_zeros(typename V::Scalar* row, std::int64_t dim) {
  for (std::int64_t i = dim; i < round_up(dim, V::kLanes); ++i) row[i] = 0;
}

/// The scale that makes the largest magnitude +-127, rounded to float because readers multiply by
/// the float. NaN where the row is not finite or the scale would not be; 0 below the smallest
/// normal float, where floats lose precision.
inline float scale_of(double largest_value) {
  constexpr double kMostScaled = -127.0 * static_cast<double>(MathConstants<float>::kLowest);
  constexpr double kSmallestScale = 0x1p-126;
  if (!(largest_value <= kMostScaled)) return __builtin_nanf("");
  const double step = largest_value / 127;
  return step < kSmallestScale ? 0.0F : static_cast<float>(step);
}

/// Sets row to row / scale, rounded to integers from -127 to 127, in double.
inline void quantise_exactly(double* row, std::int64_t dim, float scale) {
  const F64 divisor = broadcast<F64>(static_cast<double>(scale));
  for (std::int64_t i = 0; i < dim; i += F64::kLanes) {
    const F64 units = round_to_integer(load<F64>(row + i) / divisor);
    store(row + i, max(min(units, broadcast<F64>(127)), broadcast<F64>(-127)));
  }
}

/// The same in f32, by the reciprocal: off by at most 127 * 2^-23 before it is rounded. Returns
/// false where a quotient is too near the middle between two integers to tell, and the row is
/// spoilt.
inline bool quantise_quickly(float* row, std::int64_t dim, float scale) {
  constexpr float kCertain = 0.5F - 0x1p-14F;
  const float reciprocal = 1 / scale;
  if (reciprocal - reciprocal != 0) return false;
  const F32 factor = broadcast<F32>(reciprocal);
  F32 farthest = zero<F32>();
  for (std::int64_t i = 0; i < dim; i += F32::kLanes) {
    const F32 quotient = load<F32>(row + i) * factor;
    const F32 units = round_to_integer(quotient);
    farthest = max(abs(quotient - units), farthest);
    store(row + i, max(min(units, broadcast<F32>(127)), broadcast<F32>(-127)));
  }
  return largest(farthest) < kCertain;
}

template <class Scalar>
inline void store_integers(const Scalar* row, std::int64_t dim, signed char* to) {
  for (std::int64_t i = 0; i < dim; ++i) {
    to[i] = static_cast<signed char>(static_cast<std::int32_t>(row[i]));
  }
}

/// Quantises one row to int8. A row with a NaN or an infinity gets a scale of NaN, so that it reads
/// back as NaN.
inline void quantise_row(const void* from, DType dtype, std::int64_t dim,
                         const KvRowsScratch& scratch, signed char* to, float* scale) {
  const bool is_f64 = dtype == DType::kF64;
  if (is_f64) {
    load_row(from, dtype, dim, scratch.row);
    pad_with_zeros<F64>(scratch.row, dim);
    *scale = scale_of(largest_magnitude<F64>(scratch.row, dim));
  } else {
    load_row(from, dtype, dim, scratch.row_f32);
    pad_with_zeros<F32>(scratch.row_f32, dim);
    *scale = scale_of(static_cast<double>(largest_magnitude<F32>(scratch.row_f32, dim)));
  }
  if (*scale != *scale || *scale == 0) {
    const auto element = static_cast<signed char>(*scale == 0 ? 0 : 1);
    for (std::int64_t i = 0; i < dim; ++i) to[i] = element;
    return;
  }
  if (!is_f64 && quantise_quickly(scratch.row_f32, dim, *scale)) {
    return store_integers(scratch.row_f32, dim, to);
  }
  load_row(from, dtype, dim, scratch.row);
  pad_with_zeros<F64>(scratch.row, dim);
  quantise_exactly(scratch.row, dim, *scale);
  store_integers(scratch.row, dim, to);
}

/// Converts a row; past the caches where the operation is larger than they are.
inline void move_row(const void* from, DType from_dtype, std::int64_t n, void* to, DType to_dtype,
                     bool streams) {
  if (!streams || from_dtype != to_dtype) return convert_row(from, from_dtype, n, to, to_dtype);
  copy_streaming(static_cast<char*>(to), static_cast<const char*>(from),
                 n * static_cast<std::int64_t>(size_of(to_dtype)));
}

template <class V>
void write_kv(const KvRowsParams& params, const KvRowsTask& task, void* memory) {
  const KvRowsScratch scratch(params, memory);
  const DType stored = params.format.dtype;
  for_each_part(params, params.runs[task.run], [&](const KvRowsPart& part) {
    const DType dtype = part.rows.dtype;
    for_each_kv_row(params, task, part, [&](const KvRow& row) {
      const void* from = at(part.rows.data, dtype, row.outside);
      void* to = at(part.slots.data, stored, row.inside);
      if (!params.format.scaled) {
        return move_row(from, dtype, row.count, to, stored, task.streams);
      }
      quantise_row(from, dtype, row.count, scratch, static_cast<signed char*>(to), row.scale);
    });
  });
  if (task.streams) finish_streaming();
}

template <class V>
std::size_t write_kv_scratch(const KvRowsParams& params) {
  return KvRowsScratch(params, nullptr).bytes;
}

template <class V>
void gather_kv(const KvRowsParams& params, const KvRowsTask& task, void* memory) {
  const KvRowsScratch scratch(params, memory);
  const DType stored = params.format.dtype;
  for_each_part(params, params.runs[task.run], [&](const KvRowsPart& part) {
    const DType dtype = part.rows.dtype;
    for_each_kv_row(params, task, part, [&](const KvRow& row) {
      const void* from = at(part.slots.data, stored, row.inside);
      void* to = at(part.rows.data, dtype, row.outside);
      if (!params.format.scaled) {
        return move_row(from, stored, row.count, to, dtype, task.streams);
      }
      const double scale = static_cast<double>(*row.scale);
      for (std::int64_t i = 0; i < row.count; ++i) {
        scratch.row[i] = static_cast<double>(static_cast<const signed char*>(from)[i]) * scale;
      }
      store_rounded(scratch.row, row.count, to, dtype);
    });
  });
  if (task.streams) finish_streaming();
}

template <class V>
std::size_t gather_kv_scratch(const KvRowsParams& params) {
  return KvRowsScratch(params, nullptr).bytes;
}

}  // namespace
}  // namespace ladon::cpu
