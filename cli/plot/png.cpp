#include "plot/png.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ladon::cli {
namespace {

void append_u32(std::string& bytes, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    bytes += static_cast<char>(static_cast<unsigned char>(value >> shift & 255U));
  }
}

std::uint32_t crc32(std::string_view bytes) {
  std::uint32_t crc = 0xffffffffU;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1U) != 0 ? 0xedb88320U : 0U);
  }
  return ~crc;
}

std::uint32_t adler32(std::string_view bytes) {
  std::uint32_t a = 1;
  std::uint32_t b = 0;
  for (const char byte : bytes) {
    a = (a + static_cast<unsigned char>(byte)) % 65521U;
    b = (b + a) % 65521U;
  }
  return b << 16 | a;
}

/// Deflate (RFC 1951) with its fixed codes; the only matches are runs of the byte before.
class Deflate {
 public:
  std::string compress(std::string_view bytes) {
    put(1, 1);  // the last block
    put(1, 2);  // fixed codes
    for (std::size_t i = 0; i < bytes.size();) {
      const std::size_t run = i == 0 ? 0 : run_length(bytes, i);
      if (run >= kShortest) {
        put_run(static_cast<unsigned>(run));
        i += run;
      } else {
        put_symbol(static_cast<unsigned char>(bytes[i++]));
      }
    }
    put_symbol(256);
    if (used_ != 0) put(0, 8 - used_);
    return std::move(result_);
  }

 private:
  static constexpr std::size_t kShortest = 3;
  static constexpr std::size_t kLongest = 258;

  /// How often the byte before i stands at i and after it.
  static std::size_t run_length(std::string_view bytes, std::size_t i) {
    const std::size_t most = std::min(kLongest, bytes.size() - i);
    std::size_t length = 0;
    while (length < most && bytes[i + length] == bytes[i - 1]) ++length;
    return length;
  }

  /// Bits from the lowest on, as the format packs them.
  void put(unsigned value, unsigned bits) {
    for (unsigned i = 0; i < bits; ++i) {
      current_ |= (value >> i & 1U) << used_;
      if (++used_ == 8) {
        result_ += static_cast<char>(static_cast<unsigned char>(current_));
        current_ = 0;
        used_ = 0;
      }
    }
  }
  /// Huffman codes are packed from the highest bit on.
  void put_code(unsigned code, unsigned bits) {
    for (unsigned i = bits; i-- > 0;) put(code >> i & 1U, 1);
  }
  void put_symbol(unsigned symbol) {
    if (symbol < 144) {
      put_code(0x30 + symbol, 8);
    } else if (symbol < 256) {
      put_code(0x190 + symbol - 144, 9);
    } else if (symbol < 280) {
      put_code(symbol - 256, 7);
    } else {
      put_code(0xc0 + symbol - 280, 8);
    }
  }
  void put_run(unsigned length) {
    if (length == kLongest) {
      put_symbol(285);
    } else if (length < 11) {
      put_symbol(257 + length - 3);
    } else {
      // Four symbols for each number of extra bits; the first has lengths 11 and 12.
      unsigned extra = 1;
      unsigned base = 11;
      while (length >= base + (4U << extra)) {
        base += 4U << extra;
        ++extra;
      }
      const unsigned offset = length - base;
      put_symbol(265 + 4 * (extra - 1) + (offset >> extra));
      put(offset & ((1U << extra) - 1U), extra);
    }
    put_code(0, 5);  // distance 1
  }

  std::string result_;
  unsigned current_ = 0;
  unsigned used_ = 0;
};

/// Each row behind its filter: 2, the difference from the row above; 0 for the first.
std::string filtered_rows(const Image& image) {
  const auto width = static_cast<std::size_t>(image.width);
  const auto height = static_cast<std::size_t>(image.height);
  std::string rows;
  rows.reserve(height * (3 * width + 1));
  const auto put = [&](int value) {
    rows += static_cast<char>(static_cast<unsigned char>(value & 255));
  };
  for (std::size_t y = 0; y < height; ++y) {
    put(y == 0 ? 0 : 2);
    for (std::size_t x = 0; x < width; ++x) {
      const Color here = image.pixels[y * width + x];
      const Color above = y == 0 ? Color{} : image.pixels[(y - 1) * width + x];
      put(here.red - above.red);
      put(here.green - above.green);
      put(here.blue - above.blue);
    }
  }
  return rows;
}

void append_chunk(std::string& file, std::string_view type, const std::string& content) {
  append_u32(file, static_cast<std::uint32_t>(content.size()));
  const std::string checked = std::string(type) + content;
  file += checked;
  append_u32(file, crc32(checked));
}

}  // namespace

std::string encode_png(const Image& image) {
  std::string header;
  append_u32(header, static_cast<std::uint32_t>(image.width));
  append_u32(header, static_cast<std::uint32_t>(image.height));
  header += std::string("\x08\x02\x00\x00\x00", 5);  // 8 bits, RGB, no interlacing

  const std::string rows = filtered_rows(image);
  std::string data = "\x78\x01";  // zlib: deflate, 32 KiB window
  data += Deflate().compress(rows);
  append_u32(data, adler32(rows));

  std::string file = "\x89PNG\r\n\x1a\n";
  append_chunk(file, "IHDR", header);
  append_chunk(file, "IDAT", data);
  append_chunk(file, "IEND", {});
  return file;
}

}  // namespace ladon::cli
