// NumPy's files: one array in a .npy file, several in an .npz archive.
//
// Versions 1 to 3, C and Fortran order, both byte orders; bool, integers, f16, f32 and f64. NumPy
// has no bfloat16: the package ml_dtypes saves it as two raw bytes, '<V2', and so does
// Ladon; read there with np.load(path).view(ml_dtypes.bfloat16). A file that cannot be trusted is
// refused with Error (kIo), one that is sound but holds something else with kUnsupported.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "ladon/export.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

LADON_API Tensor read_npy(const std::filesystem::path& path);

/// The arrays of an archive by np.savez, by name. Compressed archives (np.savez_compressed) are
/// refused.
LADON_API std::map<std::string, Tensor> read_npz(const std::filesystem::path& path);

/// Version 1, C order, little-endian: the bytes that np.save writes. The view may be strided.
/// Written to a temporary file next to `path` and renamed: when this throws, an older file of that
/// name is as it was.
LADON_API void write_npy(const std::filesystem::path& path, const ConstTensorView& view);

}  // namespace ladon
