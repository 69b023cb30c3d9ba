#include "io/checksum.h"

#include <array>
#include <cstring>

namespace ladon::io {
namespace {

using Tables = std::array<std::array<std::uint64_t, 256>, 8>;

/// tables[n][byte]: what a byte contributes when n more bytes follow it in the same step.
constexpr Tables kTables = [] {
  constexpr std::uint64_t kPolynomial = 0xc96c5795d7870f42U;
  Tables tables{};
  for (std::size_t byte = 0; byte < 256; ++byte) {
    std::uint64_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1U) * kPolynomial);
    tables[0][byte] = value;
  }
  for (std::size_t n = 1; n < tables.size(); ++n) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint64_t before = tables[n - 1][byte];
      tables[n][byte] = (before >> 8) ^ tables[0][before & 0xffU];
    }
  }
  return tables;
}();

}  // namespace

void Crc64::add(const void* data, std::size_t num_bytes) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t state = state_;
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    word ^= state;
    state = 0;
    for (std::size_t n = 0; n < 8; ++n) state ^= kTables[7 - n][(word >> (8 * n)) & 0xffU];
  }
  for (; num_bytes > 0; ++bytes, --num_bytes) {
    state = (state >> 8) ^ kTables[0][(state ^ *bytes) & 0xffU];
  }
  state_ = state;
}

}  // namespace ladon::io
