// Rows of keys and values into and out of a cache's slots, one at a time.

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/element.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

/// One head of one token to int8 or fp8: the largest magnitude becomes the largest number, 127 or
/// 448. A row with a NaN or an infinity reads back as NaN, so that it is not lost.
void quantise_row(const void* row, DType dtype, std::int64_t dim, void* to, DType stored,
                  float* scale) {
  const double number = largest_quantised(stored);
  // The largest magnitude that a float scale can reach; f64 goes further.
  const double most = number * static_cast<double>(std::numeric_limits<float>::max());
  double largest = 0;
  bool finite = true;
  for (std::int64_t i = 0; i < dim; ++i) {
    const double value = load_element(row, dtype, i);
    finite = finite && std::fabs(value) <= most;
    largest = std::max(largest, std::fabs(value));
  }
  if (!finite) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t i = 0; i < dim; ++i) store_element(to, stored, i, 1);
    return;
  }
  // Rounded to float first, because readers multiply by the float; a subnormal would lose digits.
  const double step = largest / number;
  *scale = step < static_cast<double>(std::numeric_limits<float>::min()) ? 0.0F
                                                                         : static_cast<float>(step);
  for (std::int64_t i = 0; i < dim; ++i) {
    const double units =
        *scale == 0 ? 0 : load_element(row, dtype, i) / static_cast<double>(*scale);
    store_element(to, stored, i, std::clamp(units, -number, number));
  }
}

/// Keys or values, inside and outside the cache.
struct Part {
  const KvSlots& slots;
  const Operand& rows;
  std::int64_t dim;
  std::int64_t KvRun::*first;
};

/// One token's row of one head: offsets inside and outside the cache, in elements.
struct Row {
  std::int64_t inside;
  std::int64_t outside;
  float* scale;  // null where there are none
};

/// function(part, row) for every token and head, of keys and values.
template <class Function>
void for_each_row(const KvRowsParams& params, const Function& function) {
  const Part parts[] = {{params.k_slots, params.k, params.head_dim, &KvRun::k},
                        {params.v_slots, params.v, params.value_dim, &KvRun::v}};
  for (const Part& part : parts) {
    if (part.rows.data == nullptr) continue;
    for (std::int64_t r = 0; r < params.num_runs; ++r) {
      const KvRun& run = params.runs[r];
      for (std::int64_t token = 0; token < run.count; ++token) {
        for (std::int64_t head = 0; head < params.num_kv_heads; ++head) {
          const std::int64_t slot = run.slot + token;
          const KvSlots& slots = part.slots;
          float* const scale =
              slots.scales == nullptr
                  ? nullptr
                  : slots.scales + slot * slots.scale_slot_stride + head * slots.scale_head_stride;
          function(part, Row{slot * slots.slot_stride + head * slots.head_stride,
                             run.*part.first + token * part.rows.token_stride +
                                 head * part.rows.head_stride,
                             scale});
        }
      }
    }
  }
}

}  // namespace

void ReferenceBackend::write_kv(const KvRowsParams& params) {
  const DType stored = params.format.dtype;
  for_each_row(params, [&](const Part& part, const Row& row) {
    const void* const from = element_at(part.rows.data, part.rows.dtype, row.outside);
    if (row.scale != nullptr) {
      return quantise_row(from, part.rows.dtype, part.dim,
                          element_at(part.slots.data, stored, row.inside), stored, row.scale);
    }
    for (std::int64_t i = 0; i < part.dim; ++i) {
      store_element(part.slots.data, stored, row.inside + i,
                    load_element(from, part.rows.dtype, i));
    }
  });
}

void ReferenceBackend::gather_kv(const KvRowsParams& params) {
  for_each_row(params, [&](const Part& part, const Row& row) {
    const double scale = row.scale == nullptr ? 1 : static_cast<double>(*row.scale);
    for (std::int64_t i = 0; i < part.dim; ++i) {
      store_element(part.rows.data, part.rows.dtype, row.outside + i,
                    load_element(part.slots.data, params.format.dtype, row.inside + i) * scale);
    }
  });
}

}  // namespace ladon::reference
