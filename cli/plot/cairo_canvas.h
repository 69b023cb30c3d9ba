// Pictures through Cairo: PNG and PDF, with the system's letters.
#pragma once

#include <memory>
#include <string>

#include "plot/canvas.h"

namespace ladon::cli {

enum class CairoFormat : std::uint8_t { kPng, kPdf };

/// A white canvas. Throws Failure where Cairo cannot make one.
std::unique_ptr<Canvas> make_cairo_canvas(CairoFormat format, double width, double height);

/// The image as a PNG file, a pixel for a pixel.
std::string png_of(const Image& image);

}  // namespace ladon::cli
