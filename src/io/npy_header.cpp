#include "io/npy_header.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <span>

#include "core/integer.h"

namespace ladon::io {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
// Magic, two bytes of version, and the header's length in two or four bytes.
constexpr std::size_t kShortPrelude = 10;
constexpr std::size_t kLongPrelude = 12;
// NumPy itself reads at most 10000 unless it is told to trust the file. No sound header comes near.
constexpr std::uint64_t kMaxHeaderBytes = 65536;

struct NpyType {
  std::string_view code;  // kind and bytes, as in '<f4'
  DType dtype;
};
constexpr std::array kTypes = {
    NpyType{"f8", DType::kF64},  NpyType{"f4", DType::kF32}, NpyType{"f2", DType::kF16},
    NpyType{"V2", DType::kBF16},  // how ml_dtypes spells it
    NpyType{"b1", DType::kBool}, NpyType{"i1", DType::kI8},  NpyType{"u1", DType::kU8},
    NpyType{"i2", DType::kI16},  NpyType{"u2", DType::kU16}, NpyType{"i4", DType::kI32},
    NpyType{"u4", DType::kU32},  NpyType{"i8", DType::kI64}, NpyType{"u8", DType::kU64},
};

/// Reads {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }, keys in any order.
class DictionaryParser {
 public:
  DictionaryParser(const NpyRegion& region, std::string_view text) : region_(region), text_(text) {}

  std::optional<std::string_view> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;

  void run() {
    expect('{');
    while (!accept('}')) {
      read_entry();
      if (accept(',')) continue;
      expect('}');
      break;
    }
    skip_spaces();
    if (position_ != text_.size()) malformed("nothing after the dictionary");
    if (!descr || !fortran_order || !shape) {
      region_.refuse("got a header without " +
                     std::string(!descr           ? "descr"
                                 : !fortran_order ? "fortran_order"
                                                  : "shape") +
                     ", expected descr, fortran_order and shape");
    }
  }

 private:
  void read_entry() {
    const std::string_view key = read_string("a key in quotes");
    expect(':');
    const auto once = [&](bool seen) {
      if (seen) region_.refuse("got " + std::string(key) + " twice, expected it once");
    };
    if (key == "descr") {
      once(descr.has_value());
      skip_spaces();
      if (peek() == '[' || peek() == '(') {
        region_.refuse("got an array of records, expected one number for each element",
                       ErrorCode::kUnsupported);
      }
      descr = read_string("a type in quotes");
    } else if (key == "fortran_order") {
      once(fortran_order.has_value());
      fortran_order = read_bool();
    } else if (key == "shape") {
      once(shape.has_value());
      shape = read_tuple();
    } else {
      region_.refuse("got the key " + in_quotes(key) + ", expected descr, fortran_order and shape");
    }
  }

  std::string_view read_string(std::string_view expected) {
    skip_spaces();
    const char quote = peek();
    if (quote != '\'' && quote != '"') malformed(expected);
    const std::size_t begin = position_ + 1;
    const std::size_t end = text_.find(quote, begin);
    if (end == std::string_view::npos) malformed(expected);
    const std::string_view result = text_.substr(begin, end - begin);
    // No name or type needs an escape, and one that is not read as such would be another text.
    if (result.find_first_of("\\\n") != std::string_view::npos) malformed(expected);
    position_ = end + 1;
    return result;
  }

  bool read_bool() {
    skip_spaces();
    for (const auto& [word, value] : {std::pair("True", true), std::pair("False", false)}) {
      if (text_.substr(position_).starts_with(word)) {
        position_ += std::strlen(word);
        return value;
      }
    }
    malformed("True or False");
  }

  std::vector<std::int64_t> read_tuple() {
    std::vector<std::int64_t> sizes;
    expect('(');
    while (!accept(')')) {
      skip_spaces();
      const std::string_view rest = text_.substr(position_);
      std::int64_t size = 0;
      const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), size);
      if (error == std::errc::result_out_of_range) malformed("sizes that fit 63 bits");
      if (error != std::errc() || size < 0) malformed("sizes of 0 or more");
      position_ += static_cast<std::size_t>(end - rest.data());
      if (peek() == 'L') ++position_;  // Python 2 wrote long integers so
      sizes.push_back(size);
      if (accept(',')) continue;
      // In Python (3) is a number; only (3,) is a tuple.
      if (sizes.size() == 1) malformed("a comma: a tuple of one");
      expect(')');
      break;
    }
    return sizes;
  }

  char peek() const noexcept { return position_ < text_.size() ? text_[position_] : '\0'; }
  void skip_spaces() noexcept {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++position_;
  }
  bool accept(char wanted) noexcept {
    skip_spaces();
    if (peek() != wanted) return false;
    ++position_;
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) malformed(std::string{'\'', wanted, '\''});
  }
  [[noreturn]] void malformed(std::string_view expected) const {
    region_.refuse("got a malformed header at its byte " + std::to_string(position_) +
                   ", expected " + std::string(expected));
  }

  const NpyRegion& region_;
  std::string_view text_;
  std::size_t position_ = 0;
};

void set_type(const NpyRegion& region, std::string_view descr, NpyHeader& header) {
  const char order = descr.empty() ? '\0' : descr.front();
  const bool has_order = order == '<' || order == '>' || order == '|' || order == '=';
  const std::string_view code = descr.substr(has_order ? 1 : 0);
  for (const NpyType& type : kTypes) {
    if (type.code != code) continue;
    header.dtype = type.dtype;
    // '=', '|' and no sign at all mean this machine's order, which is little-endian.
    header.is_big_endian = order == '>';
    return;
  }
  region.refuse("got elements of type " + in_quotes(descr) +
                    ", expected f8, f4, f2, V2 (bfloat16), b1, or i or u with 1, 2, 4 or 8",
                ErrorCode::kUnsupported);
}

/// Bytes of the elements; none where they cannot be counted. Sizes of 0 count as 1 for the limit,
/// so that the strides of what passes can be counted too.
std::optional<std::uint64_t> bytes_of(const Dims& shape, DType dtype) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::int64_t>::max() / 4;
  std::uint64_t total = size_of(dtype);
  bool empty = false;
  for (const std::int64_t size : shape) {
    empty = empty || size == 0;
    const std::uint64_t factor = size == 0 ? 1 : static_cast<std::uint64_t>(size);
    if (total > kMax / factor) return std::nullopt;
    total *= factor;
  }
  return empty ? 0 : total;
}

}  // namespace

NpyHeader read_npy_header(const NpyRegion& region) {
  std::array<char, kLongPrelude> prelude{};
  if (region.size < kShortPrelude) {
    region.refuse("got " + std::to_string(region.size) + " bytes, expected a .npy file");
  }
  region.file.read_at(region.begin, prelude.data(), kShortPrelude);
  if (std::string_view(prelude.data(), kMagic.size()) != kMagic) {
    region.refuse("got other first bytes, expected \"\\x93NUMPY\" as in every .npy file");
  }
  const int major = static_cast<unsigned char>(prelude[6]);
  const int minor = static_cast<unsigned char>(prelude[7]);
  if (major < 1 || major > 3 || minor != 0) {
    region.refuse("got version " + std::to_string(major) + "." + std::to_string(minor) +
                  ", expected 1.0, 2.0 or 3.0");
  }
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t length = 0;
  std::uint64_t prelude_size = kShortPrelude;
  if (major == 1) {
    std::memcpy(&length, prelude.data() + 8, 2);
  } else {
    prelude_size = kLongPrelude;
    if (region.size < prelude_size) {
      region.refuse("got " + std::to_string(region.size) + " bytes, expected a .npy file");
    }
    region.file.read_at(region.begin + 8, &length, 4);
  }
  const std::uint64_t left = region.size - prelude_size;
  if (length > left || length > kMaxHeaderBytes) {
    region.refuse("got a header of " + std::to_string(length) + " bytes, expected at most " +
                  std::to_string(std::min(left, kMaxHeaderBytes)));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  region.file.read_at(region.begin + prelude_size, text.data(), text.size());
  DictionaryParser dictionary(region, text);
  dictionary.run();

  NpyHeader header;
  set_type(region, *dictionary.descr, header);
  header.is_fortran_order = *dictionary.fortran_order;
  if (dictionary.shape->size() > static_cast<std::size_t>(kMaxRank)) {
    region.refuse("got " + std::to_string(dictionary.shape->size()) +
                      " dimensions, expected at most " + std::to_string(kMaxRank),
                  ErrorCode::kUnsupported);
  }
  header.shape = Dims(*dictionary.shape);
  header.data_begin = region.begin + prelude_size + length;
  // Before anything is allocated: the file must hold what it claims.
  const std::optional<std::uint64_t> wanted = bytes_of(header.shape, header.dtype);
  if (!wanted || *wanted != left - length) {
    region.refuse("got " + std::to_string(left - length) + " bytes of elements, expected " +
                  (wanted ? std::to_string(*wanted) : "more than a file can hold") + " for " +
                  name_of(header.dtype) + " of shape " + header.shape.to_string());
  }
  return header;
}

std::string npy_header_text(DType dtype, const Dims& shape) {
  std::string dictionary = "{'descr': '";
  dictionary += size_of(dtype) == 1 ? '|' : '<';
  for (const NpyType& type : kTypes) {
    if (type.dtype == dtype) dictionary += type.code;
  }
  dictionary += "', 'fortran_order': False, 'shape': (";
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (dim != 0) dictionary += ' ';
    dictionary += std::to_string(shape[dim]);
    if (dim + 1 < shape.rank() || shape.rank() == 1) dictionary += ',';
  }
  dictionary += "), }";
  // NumPy leaves space for the first size to grow to 21 digits in place.
  constexpr std::size_t kRoomForSize = 21;
  if (shape.rank() > 0) {
    dictionary.append(kRoomForSize - std::to_string(shape[0]).size(), ' ');
  }
  // The elements begin at a multiple of 64 bytes, and the line before them ends.
  const std::size_t total = round_up(kShortPrelude + dictionary.size() + 1, 64);
  dictionary.resize(total - kShortPrelude - 1, ' ');
  dictionary += '\n';

  std::string text(kMagic);
  text += {'\x01', '\x00'};
  text += {static_cast<char>(dictionary.size() & 0xffU), static_cast<char>(dictionary.size() >> 8)};
  return text + dictionary;
}

}  // namespace ladon::io
