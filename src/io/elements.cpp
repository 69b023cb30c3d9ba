#include "io/elements.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "core/checks.h"
#include "core/element.h"
#include "core/host_copy.h"

namespace ladon::io {
namespace {

// The formats are little-endian, and elements are read and written as they are in memory.
static_assert(std::endian::native == std::endian::little);

// Large enough that the system calls cost nothing, small enough to stay in the L2 cache between
// being read and being converted.
constexpr std::int64_t kChunk = 65536;

}  // namespace

Tensor read_elements(const InputFile& file, std::uint64_t offset, DType stored, const Dims& shape,
                     DType dtype) {
  Tensor result = Tensor::uninitialized(dtype, shape);
  const std::int64_t count = result.num_elements();
  if (stored == dtype) {
    file.read_at(offset, result.data(), static_cast<std::size_t>(count) * size_of(dtype));
    return result;
  }
  // By pieces, so that a large tensor never exists twice.
  Tensor piece = Tensor::uninitialized(stored, {std::min(count, kChunk)});
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t length = std::min(count - begin, kChunk);
    const std::size_t num_bytes = static_cast<std::size_t>(length) * size_of(stored);
    file.read_at(offset, piece.data(), num_bytes);
    offset += num_bytes;
    copy_on_host(nullptr, piece.view().slice(0, 0, length),
                 TensorView(element_at(result.data(), dtype, begin), dtype, {length}));
  }
  return result;
}

void check_can_be_written(std::string_view operation, std::string_view name,
                          const ConstTensorView& view) {
  check_strided_view(Operation::on_host(operation), {name, view}, view.rank());
}

void write_elements(AtomicFile& file, const ConstTensorView& view) {
  const auto num_bytes = static_cast<std::size_t>(view.num_elements()) * size_of(view.dtype());
  if (num_bytes == 0) return;
  if (view.is_contiguous() && view.dtype() != DType::kBool) {
    file.write(view.data(), num_bytes);
    return;
  }
  Tensor dense = host_copy_of(view, view.dtype());
  if (view.dtype() == DType::kBool) {
    // Ladon takes any byte but 0 for true; others take 1 alone.
    auto* bytes = static_cast<std::uint8_t*>(dense.data());
    for (std::size_t i = 0; i < num_bytes; ++i) bytes[i] = bytes[i] != 0 ? 1 : 0;
  }
  file.write(dense.data(), num_bytes);
}

}  // namespace ladon::io
