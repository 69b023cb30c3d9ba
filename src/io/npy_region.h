// One array out of a part of a file: a whole .npy file, or a member of an .npz archive.
#pragma once

#include "io/npy_header.h"
#include "ladon/tensor.h"

namespace ladon::io {

Tensor read_npy_region(const NpyRegion& region);

}  // namespace ladon::io
