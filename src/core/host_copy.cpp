// Every dtype into every other, any strides. One function for each pair of types copies a row; the
// loops around it are merged where both views walk them as one.
#include "core/host_copy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/element.h"
#include "core/parallel.h"

namespace ladon {
namespace {

/// A bool as it is stored: any byte, where a C++ bool may hold 0 and 1 alone.
struct BoolByte {
  std::uint8_t byte;
};

/// An integer in another type: the nearest value that To has.
template <class To, class From>
To convert_integer(From value) noexcept {
  if constexpr (std::is_integral_v<To>) {
    if (std::in_range<To>(value)) return static_cast<To>(value);
    return std::cmp_less(value, 0) ? std::numeric_limits<To>::min()
                                   : std::numeric_limits<To>::max();
  } else if constexpr (std::is_same_v<To, double> || std::is_same_v<To, float>) {
    return static_cast<To>(value);
  } else {
    // The smaller floats are reached by way of a double. One of 2^53 or more takes its last bits as
    // one sticky bit, or it would be rounded twice; that bit is far below what To keeps.
    constexpr From kLow = sizeof(From) == 8 ? static_cast<From>(0x7ff) : From{0};
    const auto exact = static_cast<double>(value);
    if (kLow == 0 || std::fabs(exact) < 0x1p53 || (value & kLow) == 0) return To(exact);
    return To(static_cast<double>((value & ~kLow) | (kLow + 1)));
  }
}

template <class To, class From>
To convert(From value) noexcept {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, BoolByte>) {
    return static_cast<To>(value.byte != 0 ? 1.0F : 0.0F);
  } else if constexpr (std::is_integral_v<From>) {
    if constexpr (std::is_same_v<To, BoolByte>) {
      return {static_cast<std::uint8_t>(value != 0)};
    } else {
      return convert_integer<To>(value);
    }
  } else if constexpr (std::is_integral_v<To>) {
    if constexpr (std::is_same_v<From, double>) {
      return round_to_integer<To>(value);
    } else {
      return round_to_integer<To>(static_cast<double>(static_cast<float>(value)));
    }
  } else if constexpr (std::is_same_v<From, double>) {
    if constexpr (std::is_same_v<To, BoolByte>) {
      return {static_cast<std::uint8_t>(value != 0)};
    } else {
      return static_cast<To>(value);
    }
  } else if constexpr (std::is_same_v<To, BoolByte>) {
    return {static_cast<std::uint8_t>(static_cast<float>(value) != 0)};
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

struct CopyRow {
  std::int64_t count;
  std::int64_t from_stride;
  std::int64_t to_stride;
};

using CopyRowFunction = void (*)(const void* from, void* to, const CopyRow& row);

template <class From, class To>
void copy_row(const void* from, void* to, const CopyRow& row) {
  const auto* source = static_cast<const From*>(from);
  auto* target = static_cast<To*>(to);
  if (std::is_same_v<From, To> && row.from_stride == 1 && row.to_stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(row.count) * sizeof(To));
    return;
  }
  for (std::int64_t i = 0; i < row.count; ++i) {
    target[i * row.to_stride] = convert<To>(source[i * row.from_stride]);
  }
}

template <class From>
CopyRowFunction copy_row_from(DType to) noexcept {
  switch (to) {
    case DType::kF64: return copy_row<From, double>;
    case DType::kF32: return copy_row<From, float>;
    case DType::kF16: return copy_row<From, float16>;
    case DType::kBF16: return copy_row<From, bfloat16>;
    case DType::kI8: return copy_row<From, std::int8_t>;
    case DType::kU8: return copy_row<From, std::uint8_t>;
    case DType::kI16: return copy_row<From, std::int16_t>;
    case DType::kU16: return copy_row<From, std::uint16_t>;
    case DType::kI32: return copy_row<From, std::int32_t>;
    case DType::kU32: return copy_row<From, std::uint32_t>;
    case DType::kI64: return copy_row<From, std::int64_t>;
    case DType::kU64: return copy_row<From, std::uint64_t>;
    case DType::kF8E4M3: return copy_row<From, float8_e4m3>;
    case DType::kBool: break;
  }
  return copy_row<From, BoolByte>;
}

CopyRowFunction choose_copy_row(DType from, DType to) noexcept {
  switch (from) {
    case DType::kF64: return copy_row_from<double>(to);
    case DType::kF32: return copy_row_from<float>(to);
    case DType::kF16: return copy_row_from<float16>(to);
    case DType::kBF16: return copy_row_from<bfloat16>(to);
    case DType::kI8: return copy_row_from<std::int8_t>(to);
    case DType::kU8: return copy_row_from<std::uint8_t>(to);
    case DType::kI16: return copy_row_from<std::int16_t>(to);
    case DType::kU16: return copy_row_from<std::uint16_t>(to);
    case DType::kI32: return copy_row_from<std::int32_t>(to);
    case DType::kU32: return copy_row_from<std::uint32_t>(to);
    case DType::kI64: return copy_row_from<std::int64_t>(to);
    case DType::kU64: return copy_row_from<std::uint64_t>(to);
    case DType::kF8E4M3: return copy_row_from<float8_e4m3>(to);
    case DType::kBool: break;
  }
  return copy_row_from<BoolByte>(to);
}

/// The loops of a copy, outermost first: dimensions that both views walk as one are one loop.
struct CopyLoops {
  std::array<CopyRow, kMaxRank> loops{};
  int count = 0;

  CopyLoops(const ConstTensorView& from, const TensorView& to) noexcept {
    for (int dim = 0; dim < from.rank(); ++dim) {
      if (from.size(dim) == 1) continue;
      const CopyRow next{from.size(dim), from.stride(dim), to.stride(dim)};
      if (count != 0) {
        CopyRow& outer = loops[static_cast<std::size_t>(count - 1)];
        if (outer.from_stride == next.from_stride * next.count &&
            outer.to_stride == next.to_stride * next.count) {
          outer = {outer.count * next.count, next.from_stride, next.to_stride};
          continue;
        }
      }
      loops[static_cast<std::size_t>(count++)] = next;
    }
  }
};

/// Copies iterations [begin, end) of the outermost loop.
void copy_part(const ConstTensorView& from, const TensorView& to, const CopyLoops& plan,
               CopyRowFunction copy_one_row, std::int64_t begin, std::int64_t end) noexcept {
  CopyLoops part = plan;
  std::int64_t from_offset = 0;
  std::int64_t to_offset = 0;
  if (part.count != 0) {
    from_offset = begin * part.loops[0].from_stride;
    to_offset = begin * part.loops[0].to_stride;
    part.loops[0].count = end - begin;
  }
  const int outer_count = std::max(part.count - 1, 0);
  const CopyRow row =
      part.count == 0 ? CopyRow{1, 1, 1} : part.loops[static_cast<std::size_t>(outer_count)];
  std::array<std::int64_t, kMaxRank> index{};
  for (;;) {
    copy_one_row(element_at(from.data(), from.dtype(), from_offset),
                 element_at(to.data(), to.dtype(), to_offset), row);
    // Count up like an odometer: the innermost loop first, carrying outwards.
    int loop = outer_count - 1;
    for (; loop >= 0; --loop) {
      const CopyRow& outer = part.loops[static_cast<std::size_t>(loop)];
      std::int64_t& position = index[static_cast<std::size_t>(loop)];
      from_offset += outer.from_stride;
      to_offset += outer.to_stride;
      if (++position < outer.count) break;
      from_offset -= outer.from_stride * outer.count;
      to_offset -= outer.to_stride * outer.count;
      position = 0;
    }
    if (loop < 0) return;
  }
}

// Elements of one task: some tens of microseconds, so that handing it out costs little in
// comparison.
constexpr std::int64_t kElementsPerTask = std::int64_t{1} << 16;

}  // namespace

void copy_on_host(const Workers* workers, const ConstTensorView& from, const TensorView& to) {
  const std::int64_t count = from.num_elements();
  if (count == 0) return;
  const CopyRowFunction copy_one_row = choose_copy_row(from.dtype(), to.dtype());
  const CopyLoops plan(from, to);
  const std::int64_t outermost = plan.count == 0 ? 1 : plan.loops[0].count;
  if (workers == nullptr || count <= kElementsPerTask || outermost == 1) {
    return copy_part(from, to, plan, copy_one_row, 0, outermost);
  }
  const std::int64_t grain = std::max<std::int64_t>(1, kElementsPerTask / (count / outermost));
  parallel_ranges(*workers, outermost, grain, [&](std::int64_t begin, std::int64_t end, int) {
    copy_part(from, to, plan, copy_one_row, begin, end);
  });
}

Tensor host_copy_of(const ConstTensorView& view, DType dtype) {
  Tensor result = Tensor::uninitialized(dtype, view.shape());
  copy_on_host(nullptr, view, result);
  return result;
}

}  // namespace ladon
