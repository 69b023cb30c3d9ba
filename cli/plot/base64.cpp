#include "plot/base64.h"

namespace ladon::cli {

std::string base64(std::string_view bytes) {
  constexpr std::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string result;
  result.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    unsigned word = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      const unsigned byte = i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0;
      word = word << 8 | byte;
    }
    for (std::size_t j = 0; j < 4; ++j) {
      const bool padding = i + j > bytes.size();
      result += padding ? '=' : kLetters[word >> (18 - 6 * j) & 63];
    }
  }
  return result;
}

}  // namespace ladon::cli
