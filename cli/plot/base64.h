// Bytes as text, for pictures inside SVG and HTML.
#pragma once

#include <string>
#include <string_view>

namespace ladon::cli {

std::string base64(std::string_view bytes);

}  // namespace ladon::cli
