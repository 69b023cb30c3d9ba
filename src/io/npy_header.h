// The header of a .npy file: a Python dictionary as text, read by a small parser that
// knows just what such a dictionary may hold.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "ladon/tensor_view.h"

namespace ladon::io {

/// Bytes of a file that hold one .npy file, and what messages call them ("" or "array \"x\": ").
struct NpyRegion {
  const InputFile& file;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
  std::string label;

  [[noreturn]] void refuse(const std::string& what, ErrorCode code = ErrorCode::kIo) const {
    file.refuse(label + what, code);
  }
};

struct NpyHeader {
  DType dtype = DType::kF32;
  bool is_big_endian = false;
  bool is_fortran_order = false;
  Dims shape;
  /// Where the elements begin, counted from the start of the file. They fill the rest of the
  /// region.
  std::uint64_t data_begin = 0;
};

/// Throws Error when the region is not a whole .npy file that Ladon can read.
NpyHeader read_npy_header(const NpyRegion& region);

/// The bytes before the elements of a file by np.save.
std::string npy_header_text(DType dtype, const Dims& shape);

}  // namespace ladon::io
