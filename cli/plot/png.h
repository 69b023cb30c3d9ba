// PNG files of plain 8-bit RGB.
#pragma once

#include <string>

#include "plot/canvas.h"

namespace ladon::cli {

/// The file. Compression is what drawings need and no more: rows are stored as differences from the
/// row above, and runs of one byte are shortened.
std::string encode_png(const Image& image);

}  // namespace ladon::cli
