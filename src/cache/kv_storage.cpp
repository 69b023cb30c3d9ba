#include "cache/kv_storage.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/element.h"
#include "core/fail.h"

namespace ladon {
namespace {

std::int64_t bytes_of(const Tensor& tensor) {
  if (tensor.rank() == 0) return 0;
  return tensor.num_elements() * static_cast<std::int64_t>(size_of(tensor.dtype()));
}

void copy_rows(const Tensor& from, std::int64_t from_row, Tensor& to, std::int64_t to_row,
               std::int64_t count) noexcept {
  if (to.rank() == 0 || count == 0) return;
  const std::size_t row = static_cast<std::size_t>(bytes_of(to) / to.size(0));
  std::memcpy(static_cast<std::byte*>(to.data()) + static_cast<std::size_t>(to_row) * row,
              static_cast<const std::byte*>(from.data()) + static_cast<std::size_t>(from_row) * row,
              static_cast<std::size_t>(count) * row);
}

// What a float scale can reach; f64 goes further.
constexpr double kMostScaled = 127.0 * static_cast<double>(std::numeric_limits<float>::max());

/// One head of one token to i8: the largest number becomes +-127. A row with a NaN or an infinity
/// reads back as NaN, so that it is not lost.
void quantize_row(const ConstTensorView& row, std::int8_t* to, float* scale) {
  const std::int64_t dim = row.size(0);
  const auto number = [&](std::int64_t i) {
    return load_element(row.data(), row.dtype(), i * row.stride(0));
  };
  double largest = 0;
  bool finite = true;
  for (std::int64_t i = 0; i < dim; ++i) {
    const double value = number(i);
    finite = finite && std::fabs(value) <= kMostScaled;
    largest = std::max(largest, std::fabs(value));
  }
  if (!finite) {
    *scale = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(to, dim, std::int8_t{1});
    return;
  }
  // Rounded to float first, because readers multiply by the float; a subnormal would lose digits.
  const double step = largest / 127;
  *scale = step < static_cast<double>(std::numeric_limits<float>::min()) ? 0.0F
                                                                         : static_cast<float>(step);
  for (std::int64_t i = 0; i < dim; ++i) {
    const double units = *scale == 0 ? 0 : std::nearbyint(number(i) / static_cast<double>(*scale));
    to[i] = static_cast<std::int8_t>(std::clamp(units, -127.0, 127.0));
  }
}

void write_part(const ConstTensorView& rows, Tensor& part, Tensor& scales, std::int64_t slot) {
  const std::int64_t count = rows.size(0);
  const std::int64_t heads = rows.size(1);
  const std::int64_t dim = rows.size(2);
  if (scales.rank() == 0) return copy(rows, part.view().slice(0, slot, slot + count));
  for (std::int64_t token = 0; token < count; ++token) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t row = (slot + token) * heads + head;
      quantize_row(rows.select(0, token).select(0, head),
                   static_cast<std::int8_t*>(part.data()) + row * dim,
                   static_cast<float*>(scales.data()) + row);
    }
  }
}

}  // namespace

KvStorage KvStorage::make(const KvCacheOptions& options, std::int64_t blocks,
                          std::int64_t block_size) {
  KvStorage storage;
  std::int64_t slots = 0;
  if (__builtin_mul_overflow(blocks, block_size, &slots)) {
    slots = std::numeric_limits<std::int64_t>::max();  // which no tensor can have, and says so
  }
  const std::int64_t heads = options.num_kv_heads;
  storage.k = Tensor::uninitialized(options.dtype, {slots, heads, options.head_dim});
  const bool scaled = options.dtype == DType::kI8;
  if (scaled) storage.k_scales = Tensor::uninitialized(DType::kF32, {slots, heads});
  if (options.values_in_keys) return storage;
  storage.v = Tensor::uninitialized(options.dtype, {slots, heads, options.value_dim});
  if (scaled) storage.v_scales = Tensor::uninitialized(DType::kF32, {slots, heads});
  return storage;
}

std::int64_t KvStorage::bytes() const noexcept {
  return bytes_of(k) + bytes_of(v) + bytes_of(k_scales) + bytes_of(v_scales);
}

void KvStorage::set(KvCacheView& view) const noexcept {
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

void KvStorage::copy_slots(const KvStorage& from, std::int64_t from_slot, std::int64_t to_slot,
                           std::int64_t count) noexcept {
  copy_rows(from.k, from_slot, k, to_slot, count);
  copy_rows(from.v, from_slot, v, to_slot, count);
  copy_rows(from.k_scales, from_slot, k_scales, to_slot, count);
  copy_rows(from.v_scales, from_slot, v_scales, to_slot, count);
}

void KvStorage::write_slots(const ConstTensorView& k_rows, const ConstTensorView& v_rows,
                            std::int64_t to_slot) {
  write_part(k_rows, k, k_scales, to_slot);
  if (v.rank() != 0) write_part(v_rows, v, v_scales, to_slot);
}

namespace {

/// Bytes of rows of so many numbers in all; each row has a scale where they are i8.
std::int64_t bytes_of_rows(DType dtype, std::int64_t numbers, std::int64_t rows) noexcept {
  const auto scale = dtype == DType::kI8 ? static_cast<std::int64_t>(sizeof(float)) : 0;
  return numbers * static_cast<std::int64_t>(size_of(dtype)) + rows * scale;
}

}  // namespace

std::int64_t elements_per_token(const KvCacheOptions& options) noexcept {
  return options.num_kv_heads *
         (options.head_dim + (options.values_in_keys ? 0 : options.value_dim));
}
std::int64_t bytes_per_token(const KvCacheOptions& options) noexcept {
  return bytes_of_rows(options.dtype, elements_per_token(options),
                       options.num_kv_heads * (options.values_in_keys ? 1 : 2));
}
std::int64_t mha_bytes_per_token(const KvCacheOptions& options) noexcept {
  return bytes_of_rows(options.dtype, options.num_heads * options.mha_dim, options.num_heads * 2);
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
  if (!is_float(options.dtype) && options.dtype != DType::kI8) {
    fail(operation, "dtype",
         std::string("got ") + name_of(options.dtype) + ", expected f64, f32, f16, bf16 or i8");
  }
  return options;
}

}  // namespace ladon
