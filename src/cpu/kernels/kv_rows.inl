// Copies rows of keys and values into and out of a cache's slots, with conversion.
//
// The bound is memory: each row is read once and written once. Quantising takes two passes over a
// row in L1, in double, so that every int8 is the nearest one: 1.3 cycles per element (Zen 4).
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
  std::size_t bytes;

  KvRowsScratch(const KvRowsParams& params, void* base) {
    ScratchArena arena(base);
    row = arena.take<double>(round_up(larger(params.head_dim, params.value_dim), F64::kLanes));
    bytes = arena.used();
  }
};

/// Quantises a row of doubles to int8: the largest magnitude becomes +-127. A row with a NaN or an
/// infinity gets a scale of NaN, so that it reads back as NaN. Overwrites the row.
inline void quantise_row(double* row, std::int64_t dim, signed char* to, float* scale) {
  // The largest magnitude whose scale is a finite float; f64 rows can exceed it.
  constexpr double kMostScaled = -127.0 * static_cast<double>(MathConstants<float>::kLowest);
  constexpr double kSmallestScale = 0x1p-126;  // below, floats are subnormal and lose precision
  F64 top = zero<F64>();
  F64 trace = zero<F64>();  // x - x is 0 for finite x, else NaN
  for (std::int64_t i = dim; i < round_up(dim, F64::kLanes); ++i) row[i] = 0;
  for (std::int64_t i = 0; i < dim; i += F64::kLanes) {
    const F64 value = load<F64>(row + i);
    top = max(abs(value), top);
    trace = trace + (value - value);
  }
  const double largest_value = largest(top);
  if (sum(trace) != 0 || largest_value > kMostScaled) {
    *scale = __builtin_nanf("");
    for (std::int64_t i = 0; i < dim; ++i) to[i] = 1;
    return;
  }
  // The scale is rounded to float before it is used, because readers multiply by the float.
  const double step = largest_value / 127;
  *scale = step < kSmallestScale ? 0.0F : static_cast<float>(step);
  if (*scale == 0) {
    for (std::int64_t i = 0; i < dim; ++i) to[i] = 0;
    return;
  }
  const F64 divisor = broadcast<F64>(static_cast<double>(*scale));
  for (std::int64_t i = 0; i < dim; i += F64::kLanes) {
    const F64 units = round_to_integer(load<F64>(row + i) / divisor);
    store(row + i, max(min(units, broadcast<F64>(127)), broadcast<F64>(-127)));
  }
  for (std::int64_t i = 0; i < dim; ++i) to[i] = static_cast<signed char>(row[i]);
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
      if (!params.format.scaled) return convert_row(from, dtype, row.count, to, stored);
      load_row(from, dtype, row.count, scratch.row);
      quantise_row(scratch.row, row.count, static_cast<signed char*>(to), row.scale);
    });
  });
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
      if (!params.format.scaled) return convert_row(from, stored, row.count, to, dtype);
      const double scale = static_cast<double>(*row.scale);
      for (std::int64_t i = 0; i < row.count; ++i) {
        scratch.row[i] = static_cast<double>(static_cast<const signed char*>(from)[i]) * scale;
      }
      store_rounded(scratch.row, row.count, to, dtype);
    });
  });
}

template <class V>
std::size_t gather_kv_scratch(const KvRowsParams& params) {
  return KvRowsScratch(params, nullptr).bytes;
}

}  // namespace
}  // namespace ladon::cpu
