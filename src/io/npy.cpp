#include "ladon/npy.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/host_copy.h"
#include "io/elements.h"
#include "io/file.h"
#include "io/npy_header.h"
#include "io/npy_region.h"

namespace ladon {
namespace io {
namespace {

/// Reverses the bytes of each element, in place.
void swap_bytes(Tensor& tensor) {
  auto* bytes = static_cast<std::byte*>(tensor.data());
  const std::size_t size = size_of(tensor.dtype());
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i, bytes += size) {
    std::reverse(bytes, bytes + size);
  }
}

/// The dimensions from the last to the first.
Dims reversed(const Dims& dims) {
  Dims result = dims;
  for (int dim = 0; dim < dims.rank(); ++dim) result[dim] = dims[dims.rank() - 1 - dim];
  return result;
}

}  // namespace

Tensor read_npy_region(const NpyRegion& region) {
  const NpyHeader header = read_npy_header(region);
  // Fortran order is C order with the dimensions from the last to the first.
  const Dims stored = header.is_fortran_order ? reversed(header.shape) : header.shape;
  Tensor elements =
      read_elements(region.file, header.data_begin, header.dtype, stored, header.dtype);
  if (header.is_big_endian) swap_bytes(elements);
  if (!header.is_fortran_order || header.shape.rank() < 2) return elements;
  const ConstTensorView dense = elements;
  return host_copy_of(
      ConstTensorView(dense.data(), dense.dtype(), header.shape, reversed(dense.strides())),
      dense.dtype());
}

}  // namespace io

Tensor read_npy(const std::filesystem::path& path) {
  const io::InputFile file("read_npy", path);
  return io::read_npy_region({.file = file, .begin = 0, .size = file.size(), .label = ""});
}

void write_npy(const std::filesystem::path& path, const ConstTensorView& view) {
  io::check_can_be_written("write_npy", "view", view);
  const std::string header = io::npy_header_text(view.dtype(), view.shape());
  io::AtomicFile file("write_npy", path);
  file.write(header.data(), header.size());
  io::write_elements(file, view);
  file.commit();
}

}  // namespace ladon
