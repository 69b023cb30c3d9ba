// The elements of a tensor from and to a file.
#pragma once

#include <cstdint>
#include <string_view>

#include "io/file.h"
#include "ladon/tensor.h"

namespace ladon::io {

/// A contiguous tensor whose elements are contiguous in the file, converted to `dtype`.
Tensor read_elements(const InputFile& file, std::uint64_t offset, DType stored, const Dims& shape,
                     DType dtype);

/// Throws Error when the view cannot be written. `name` is what messages call it.
void check_can_be_written(std::string_view operation, std::string_view name,
                          const ConstTensorView& view);

/// The elements in row-major order. A bool is written as 0 or 1.
void write_elements(AtomicFile& file, const ConstTensorView& view);

}  // namespace ladon::io
