// Rows of keys and values into and out of a cache's slots, as every backend sees it: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/attention_params.h"
#include "core/rope_params.h"
#include "ladon/kv_format.h"

namespace ladon {

/// The largest value of a quantised format, which the largest magnitude of a row becomes. Names all
/// dtypes, so that the compiler points here when there is a new one.
constexpr double largest_quantised(DType dtype) noexcept {
  switch (dtype) {
    case DType::kI8: return 127;
    case DType::kF8E4M3: return 448;
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
  return 0;  // not quantised
}

/// `count` tokens whose slots follow each other. Rows are counted in elements from the operands'
/// data.
struct KvRun {
  std::int64_t slot = 0;
  std::int64_t count = 0;
  std::int64_t k = 0;  // first token's key row, outside the cache
  std::int64_t v = 0;  // first token's value row
};

/// Keys or values in a cache's memory: [slot, head, dim], each head contiguous.
struct KvSlots {
  void* data = nullptr;
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
  float* scales = nullptr;  // [slot, head], of scaled formats
  std::int64_t scale_slot_stride = 0;
  std::int64_t scale_head_stride = 0;
};

/// Copies rows between [token, head, dim] operands and slots, converting the dtype. Writing
/// quantises, gathering dequantises, where the format is scaled.
struct KvRowsParams {
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  KvFormat format{};
  KvSlots k_slots{};
  KvSlots v_slots{};
  const KvRun* runs = nullptr;  // host memory
  std::int64_t num_runs = 0;
  Operand k{};  // absent where keys are not wanted
  Operand v{};  // absent where values are in the keys, or not wanted
};

/// Memory that will be read soon: a device may prefetch it into its cache while it has bandwidth to
/// spare. A hint, which changes no result.
struct PrefetchHint {
  const void* data = nullptr;  // null: nothing
  std::size_t bytes = 0;
};

/// What a layer leaves to the append of its new tokens.
struct AppendSteps {
  std::span<const RopeParams> rotations;  // of queries and keys, before the keys are stored
  PrefetchHint next;                      // weights that are read when attention is over
};

}  // namespace ladon
