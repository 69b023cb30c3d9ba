#include "cache/kv_storage.h"

#include <cstddef>
#include <limits>
#include <string>
#include <utility>

#include "core/context_impl.h"
#include "core/device_memory.h"
#include "core/fail.h"

namespace ladon {
namespace {

std::int64_t bytes_of(const Tensor& tensor) {
  if (tensor.rank() == 0) return 0;
  return tensor.num_elements() * static_cast<std::int64_t>(size_of(tensor.dtype()));
}

void copy_rows(DeviceMemory& memory, const Tensor& from, std::int64_t from_row, Tensor& to,
               std::int64_t to_row, std::int64_t count) noexcept {
  if (to.rank() == 0 || count == 0) return;
  const std::int64_t row = bytes_of(to) / to.size(0);
  memory.copy(static_cast<std::byte*>(to.data()) + to_row * row,
              static_cast<const std::byte*>(from.data()) + from_row * row,
              static_cast<std::size_t>(count * row));
}

}  // namespace

KvStorage KvStorage::make(const Context& context, const KvCacheOptions& options,
                          std::int64_t blocks, std::int64_t block_size) {
  KvStorage storage;
  std::int64_t slots = 0;
  if (__builtin_mul_overflow(blocks, block_size, &slots)) {
    slots = std::numeric_limits<std::int64_t>::max();  // which no tensor can have, and says so
  }
  const std::int64_t heads = options.num_kv_heads;
  const auto& [dtype, scaled] = options.format;
  storage.k = Tensor::uninitialized(context, dtype, {slots, heads, options.head_dim});
  if (scaled) storage.k_scales = Tensor::uninitialized(context, DType::kF32, {slots, heads});
  if (options.values_in_keys) return storage;
  storage.v = Tensor::uninitialized(context, dtype, {slots, heads, options.value_dim});
  if (scaled) storage.v_scales = Tensor::uninitialized(context, DType::kF32, {slots, heads});
  return storage;
}

std::int64_t KvStorage::bytes() const noexcept {
  return bytes_of(k) + bytes_of(v) + bytes_of(k_scales) + bytes_of(v_scales);
}

void KvStorage::set(KvCacheView& view) const noexcept {
  view.device = k.device();
  view.num_slots = slots();
  const bool own_values = v.rank() != 0;
  view.k = k.data();
  view.v = own_values ? v.data() : k.data();
  view.k_head_stride = view.head_dim;
  view.v_head_stride = own_values ? view.value_dim : view.head_dim;
  view.k_slot_stride = view.num_kv_heads * view.k_head_stride;
  view.v_slot_stride = view.num_kv_heads * view.v_head_stride;
  view.k_scales = static_cast<const float*>(k_scales.data());
  view.v_scales = static_cast<const float*>(own_values ? v_scales.data() : k_scales.data());
  view.scale_slot_stride = view.num_kv_heads;
  view.scale_head_stride = 1;
}

void KvStorage::copy_slots(const Context& context, const KvStorage& from, std::int64_t from_slot,
                           std::int64_t to_slot, std::int64_t count) noexcept {
  DeviceMemory& memory = *backend_of(context).memory();
  copy_rows(memory, from.k, from_slot, k, to_slot, count);
  copy_rows(memory, from.v, from_slot, v, to_slot, count);
  copy_rows(memory, from.k_scales, from_slot, k_scales, to_slot, count);
  copy_rows(memory, from.v_scales, from_slot, v_scales, to_slot, count);
}

KvRowsParams kv_rows_params(const KvCacheView& view) noexcept {
  const auto slots = [&](const void* data, std::int64_t slot_stride, std::int64_t head_stride,
                         const float* scales) {
    return KvSlots{
        const_cast<void*>(data), slot_stride,           head_stride, const_cast<float*>(scales),
        view.scale_slot_stride,  view.scale_head_stride};
  };
  return {.num_kv_heads = view.num_kv_heads,
          .head_dim = view.head_dim,
          .value_dim = view.value_dim,
          .format = view.format,
          .k_slots = slots(view.k, view.k_slot_stride, view.k_head_stride, view.k_scales),
          .v_slots = slots(view.v, view.v_slot_stride, view.v_head_stride, view.v_scales)};
}

namespace {

/// Bytes of rows of so many elements in all; each row has a scale in scaled formats.
std::int64_t bytes_of_rows(KvFormat format, std::int64_t elements, std::int64_t rows) noexcept {
  const auto scale = format.scaled ? static_cast<std::int64_t>(sizeof(float)) : 0;
  return elements * static_cast<std::int64_t>(size_of(format.dtype)) + rows * scale;
}

}  // namespace

std::int64_t elements_per_token(const KvCacheOptions& options) noexcept {
  return options.num_kv_heads *
         (options.head_dim + (options.values_in_keys ? 0 : options.value_dim));
}
std::int64_t bytes_per_token(const KvCacheOptions& options) noexcept {
  return bytes_of_rows(options.format, elements_per_token(options),
                       options.num_kv_heads * (options.values_in_keys ? 1 : 2));
}
std::int64_t mha_bytes_per_token(const KvCacheOptions& options) noexcept {
  return bytes_of_rows(options.format, options.num_heads * options.mha_dim, options.num_heads * 2);
}

KvCacheOptions checked_options(std::string_view operation, KvCacheOptions options) {
  if (options.value_dim == 0) options.value_dim = options.head_dim;
  if (options.num_heads == 0) options.num_heads = options.num_kv_heads;
  // A token of the widest model fits a few times; what is past this is an error of the caller's,
  // and sizes below cannot overflow.
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  for (const auto& [name, value] :
       {std::pair{"num_kv_heads", options.num_kv_heads}, std::pair{"head_dim", options.head_dim},
        std::pair{"value_dim", options.value_dim}, std::pair{"num_heads", options.num_heads}}) {
    if (value < 1 || value > kMost) {
      fail(operation, name,
           "got " + std::to_string(value) + ", expected 1 to " + std::to_string(kMost));
    }
  }
  if (options.mha_dim == 0) options.mha_dim = options.head_dim + options.value_dim;
  if (options.mha_dim < 1 || options.mha_dim > 2 * kMost) {
    fail(operation, "mha_dim",
         "got " + std::to_string(options.mha_dim) + ", expected 1 to " + std::to_string(2 * kMost));
  }
  if (options.num_heads % options.num_kv_heads != 0) {
    fail(operation, "num_heads",
         "got " + std::to_string(options.num_heads) +
             ", expected a multiple of num_kv_heads = " + std::to_string(options.num_kv_heads));
  }
  if (options.values_in_keys && options.value_dim > options.head_dim) {
    fail(operation, "value_dim",
         "got " + std::to_string(options.value_dim) + ", expected at most head_dim = " +
             std::to_string(options.head_dim) + " because the values are in the keys");
  }
  constexpr std::int64_t kMostBatch = std::int64_t{1} << 31;
  if (options.batch < 0 || options.batch > kMostBatch) {
    fail(operation, "batch",
         "got " + std::to_string(options.batch) + ", expected 0 to " + std::to_string(kMostBatch));
  }
  const auto& [dtype, scaled] = options.format;
  if (scaled != needs_scale(dtype) || (!scaled && !is_float(dtype))) {
    fail(operation, "format",
         std::string("got ") + name_of(dtype) +
             (scaled == needs_scale(dtype) ? ""
              : scaled                     ? " with scales"
                                           : " without scales") +
             ", expected f64, f32, f16, bf16, i8 or f8e4m3");
  }
  return options;
}

}  // namespace ladon
