#include "core/arena.h"

#include <string>

#include "core/fail.h"
#include "core/integer.h"

namespace ladon {

void* Arena::take_bytes(std::int64_t count, std::size_t element_bytes) {
  const std::size_t bytes =
      round_up(saturating_product(static_cast<std::size_t>(count), element_bytes), kAlignment);
  const std::size_t begin = used_;
  used_ = saturating_sum(used_, bytes);
  if (counts_only_) return nullptr;
  if (used_ > size_) {
    fail(ErrorCode::kOutOfMemory, "workspace", "size",
         "got " + std::to_string(size_) + " bytes, expected " + std::to_string(used_) +
             ": a layout has taken more than it counted, which is an error in Ladon");
  }
  return data_ + begin;
}

TensorView Arena::take_rows(std::int64_t rows, std::int64_t width, DType dtype) {
  std::int64_t count = 0;
  if (__builtin_mul_overflow(rows, width, &count)) count = std::int64_t{1} << 62;
  return {take_bytes(count, size_of(dtype)), dtype, {rows, width}, device_};
}

}  // namespace ladon
