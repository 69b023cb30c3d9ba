// Copies rows of keys and values into and out of a cache's slots, with conversion.
//
// The bound is memory: each row is read once and written once. Large copies bypass the caches,
// which avoids reading what is overwritten. Quantising takes two passes over a row in L1, in f32,
// and every element is the nearest one. int8 of 16-bit rows takes one product an element
// (nearest_factor()): 21 cycles for 128 elements with AVX-512, 32 with AVX2, of 38 and 45 for the
// row. Looking for elements in doubt and deciding them one by one took 44 and 60, because one bf16
// row in four has an element in the middle between 63 and 64: half its largest. Storing int8 past
// the caches, through a copy or from registers, was 10 to 30 % slower in this kernel alone;
// prefetching rows and slots a group of 8 ahead was 12 % slower in the benchmark.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/exact_rows.inl"

namespace ladon::cpu {
namespace {

/// Keys or values: their slots, and the rows outside the cache.
struct KvRowsPart {
  const KvSlots& slots;
  const Operand& rows;
  std::int64_t first;  // first element of the run's first token
  std::int64_t dim;
};

/// Calls function(part) for keys and for values, where they are present.
template <class Function>
inline void for_each_part(const KvRowsParams& params, const KvRun& run, const Function& function) {
  if (params.k.data != nullptr) {
    function(KvRowsPart{params.k_slots, params.k, run.k, params.head_dim});
  }
  if (params.v.data != nullptr) {
    function(KvRowsPart{params.v_slots, params.v, run.v, params.value_dim});
  }
}

/// One row: its first element inside and outside the cache, and its length.
struct KvRow {
  std::int64_t inside;
  std::int64_t outside;
  std::int64_t count;
  float* scale;
};

/// Calls function(row) for every head of a task's tokens; all heads of a token are one row where
/// they are contiguous on both sides and have no scales.
template <class Function>
inline void for_each_kv_row(const KvRowsParams& params, const KvRowsTask& task,
                            const KvRowsPart& part, const Function& function) {
  const std::int64_t heads = params.num_kv_heads;
  const KvSlots& slots = part.slots;
  const bool whole =
      !params.format.scaled &&
      (heads == 1 || (part.rows.head_stride == part.dim && slots.head_stride == part.dim));
  for (std::int64_t token = task.begin; token < task.end; ++token) {
    const std::int64_t slot = params.runs[task.run].slot + token;
    KvRow row{slot * slots.slot_stride, part.first + token * part.rows.token_stride, part.dim,
              nullptr};
    if (whole) {
      row.count = heads * part.dim;
      function(row);
      continue;
    }
    for (std::int64_t head = 0; head < heads; ++head) {
      if (params.format.scaled) {
        row.scale = slots.scales + slot * slots.scale_slot_stride + head * slots.scale_head_stride;
      }
      function(row);
      row.inside += slots.head_stride;
      row.outside += part.rows.head_stride;
    }
  }
}

struct KvRowsScratch {
  double* row;  // one head
  std::size_t bytes;

  KvRowsScratch(const KvRowsParams& params, Scratch base) {
    ScratchArena arena(base);
    row = arena.take<double>(larger(params.head_dim, params.value_dim));
    bytes = arena.used();
  }
};

/// How a row is stored: the bits of an element, which may be those of floats, and a vector of them
/// as f32.
template <DType kDType>
struct ElementBits {
  using Bits = std::uint16_t;
  static F32 load(const Bits* p) { return load_half<kDType>(p); }
};
template <>
struct ElementBits<DType::kF32> {
  using Bits __attribute__((may_alias)) = std::uint32_t;
  static F32 load(const Bits* p) { return cpu::load<F32>(reinterpret_cast<const float*>(p)); }
};
template <>
struct ElementBits<DType::kF64> {
  using Bits __attribute__((may_alias)) = std::uint64_t;
};

/// The bits of a row's largest magnitude: magnitudes are ordered as their bits are. Infinities and
/// NaN are the largest of all.
template <DType kFrom>
inline auto largest_bits(const void* from, std::int64_t dim) {
  using Bits = typename ElementBits<kFrom>::Bits;
  const Bits* const row = static_cast<const Bits*>(from);
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  Bits top = 0;
  for (std::int64_t i = 0; i < dim; ++i) {
    const auto magnitude = static_cast<Bits>(row[i] & kMagnitude);
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

/// The scale that makes the largest magnitude `number`, rounded to float because readers multiply
/// by the float. NaN where the row is not finite or the scale would not be; 0 below the smallest
/// normal float, where floats lose precision.
inline float scale_of(double largest_value, double number) {
  constexpr double kLargest = -static_cast<double>(MathConstants<float>::kLowest);
  constexpr double kSmallestScale = 0x1p-126;
  if (!(largest_value <= number * kLargest)) return __builtin_nanf("");
  const double step = largest_value / number;
  return step < kSmallestScale ? 0.0F : static_cast<float>(step);
}

/// An element over its row's scale, as the nearest integer from -127 to 127.
inline signed char quantised(double element, float scale) {
  const double units = __builtin_nearbyint(element / static_cast<double>(scale));
  return static_cast<signed char>(units > 127 ? 127 : units < -127 ? -127 : units);
}

/// A vector over its row's scale, as the nearest integers. Products with the reciprocal are off by
/// at most 127 * 2^-23, so the nearest is what they round to or its neighbour. What remains of x is
/// a multiple of half a unit in the scale's last place and at most as large as the scale: exact.
inline F32 quantised(F32 x, F32 scale, F32 reciprocal) {
  const F32 units = round_to_integer(x * reciprocal);
  const F32 remainder = fma(zero<F32>() - units, scale, x);
  const F32 distance = abs(remainder);
  const F32 just_below = scale * broadcast<F32>(0.5F - 0x1p-23F);
  if (!any<F32>(less(just_below, distance))) return units;
  const F32 half = scale * broadcast<F32>(0.5F);
  const F32 step =
      select(less(remainder, zero<F32>()), broadcast<F32>(-0.5F), broadcast<F32>(0.5F));
  const F32 even = round_to_integer(units + step);  // of the two in the middle between which x is
  return select(less(distance, half), units,
                select(identical(distance, half), even, units + step + step));
}

/// A factor for rows of 16-bit elements: rounding an element's product with it gives the integer
/// nearest to the element over the scale. 0 where there is none.
///
/// Let x and the largest be X and T, whole numbers of up to 11 bits, times powers of two. The
/// distance of x * 127 / largest from a middle k + 1/2 is 0 or at least one part in 254 X, thus in
/// 2^19, which the roundings of scale, factor and product (2^-24 each) cannot bridge. Where it is
/// 0, the scale's own rounding says on which side of the middle x / scale is, and the factor is
/// moved to that side, by more than those roundings. A scale that was not rounded leaves x / scale
/// in the middle, and so does a product with its reciprocal, if that is exact too.
inline float nearest_factor(double largest_value, float scale) {
  constexpr double kNudge = 0x1p-22;
  const double exact_scale = static_cast<double>(scale);
  const double reached = 127 * exact_scale;
  if (reached > largest_value) return static_cast<float>((1 - kNudge) / exact_scale);
  if (reached < largest_value) return static_cast<float>((1 + kNudge) / exact_scale);
  const float reciprocal = 1 / scale;
  return static_cast<double>(reciprocal) * exact_scale == 1 ? reciprocal : 0;
}

/// A row over its scale, as integers.
template <DType kFrom>
inline void quantise_row(const typename ElementBits<kFrom>::Bits* row, std::int64_t dim,
                         double largest_value, float scale, signed char* to) {
  std::int64_t i = 0;
  // Beyond these, factors, reciprocals and remainders lose precision.
  const bool is_moderate = scale > 0x1p-100F && scale < 0x1p100F;
  if constexpr (kFrom == DType::kBF16 || kFrom == DType::kF16) {
    const float factor = is_moderate ? nearest_factor(largest_value, scale) : 0;
    if (factor != 0) {
      for (; i + F32::kLanes <= dim; i += F32::kLanes) {
        store_i8(to + i, ElementBits<kFrom>::load(row + i) * broadcast<F32>(factor));
      }
    }
  }
  if constexpr (kFrom != DType::kF64 && kFusesMultiplyAdd) {
    if (is_moderate) {
      const F32 divisor = broadcast<F32>(scale);
      const F32 reciprocal = broadcast<F32>(1 / scale);
      for (; i + F32::kLanes <= dim; i += F32::kLanes) {
        store_i8(to + i, quantised(ElementBits<kFrom>::load(row + i), divisor, reciprocal));
      }
    }
  }
  for (; i < dim; ++i) {
    double element;
    load_row(row + i, kFrom, 1, &element);
    to[i] = quantised(element, scale);
  }
}

/// The nearest e4m3 of an element over its row's scale. Flattened: a function shared with the rest
/// of the library must not be compiled in this unit.
__attribute__((flatten)) inline unsigned char nearest_fp8(double element, float scale) {
  return detail::float_to_float8_bits(round_to_odd(element / static_cast<double>(scale)));
}

/// A row over its scale, as e4m3. Products with the reciprocal are off by 2^-23 at most: where a
/// little less and a little more round to the same code, it is the nearest. One of a million random
/// elements, and those in the middle of two codes, leave doubt.
template <DType kFrom>
inline void quantise_row(const typename ElementBits<kFrom>::Bits* row, std::int64_t dim,
                         float scale, unsigned char* to) {
  std::int64_t i = 0;
  const auto decide = [&](std::int64_t at) {
    double element;
    load_row(row + at, kFrom, 1, &element);
    to[at] = nearest_fp8(element, scale);
  };
  if constexpr (kFrom != DType::kF64) {
    const F32 below = broadcast<F32>((1 - 0x1p-21F) / scale);
    const F32 above = broadcast<F32>((1 + 0x1p-21F) / scale);
    for (; i + F32::kLanes <= dim; i += F32::kLanes) {
      const F32 x = ElementBits<kFrom>::load(row + i);
      unsigned char other[F32::kLanes];
      store_f8(to + i, x * below);
      store_f8(other, x * above);
      if (__builtin_memcmp(to + i, other, sizeof other) == 0) continue;
      for (std::int64_t j = i; j < i + F32::kLanes; ++j) {
        if (to[j] != other[j - i]) decide(j);
      }
    }
  }
  for (; i < dim; ++i) decide(i);
}

/// A row to be quantised.
struct QuantisedRow {
  const void* from;
  void* to;
  float* scale;
};
/// So many are quantised together: while one waits for its scale, others are read.
inline constexpr std::int64_t kRowsAtOnce = 8;

/// Quantises up to kRowsAtOnce rows. One with a NaN or an infinity gets a scale of NaN, so that it
/// reads back as NaN.
template <DType kFrom, DType kTo>
inline void quantise_rows(const QuantisedRow* rows, std::int64_t count, std::int64_t dim) {
  using Bits = typename ElementBits<kFrom>::Bits;
  Bits tops[kRowsAtOnce];
  for (std::int64_t r = 0; r < count; ++r) {
    tops[r] = largest_bits<kFrom>(rows[r].from, dim);
  }
  double largest_values[kRowsAtOnce];
  load_row(tops, kFrom, count, largest_values);
  for (std::int64_t r = 0; r < count; ++r) {
    *rows[r].scale = scale_of(largest_values[r], largest_quantised(kTo));
  }
  for (std::int64_t r = 0; r < count; ++r) {
    const float scale = *rows[r].scale;
    const Bits* const from = static_cast<const Bits*>(rows[r].from);
    if (!(scale == scale) || scale == 0) {
      constexpr int kOne = kTo == DType::kF8E4M3 ? 0x38 : 1;
      __builtin_memset(rows[r].to, scale == 0 ? 0 : kOne, static_cast<std::size_t>(dim));
    } else if constexpr (kTo == DType::kF8E4M3) {
      quantise_row<kFrom>(from, dim, scale, static_cast<unsigned char*>(rows[r].to));
    } else {
      static_assert(kTo == DType::kI8);
      quantise_row<kFrom>(from, dim, largest_values[r], scale,
                          static_cast<signed char*>(rows[r].to));
    }
  }
}

/// Gathers rows and quantises them a few at a time.
class RowQuantiser {
 public:
  RowQuantiser(DType dtype, std::int64_t dim, DType stored)
      : dtype_(dtype), dim_(dim), stored_(stored) {}

  void add(const QuantisedRow& row) {
    rows_[count_++] = row;
    if (count_ == kRowsAtOnce) finish();
  }
  void finish() {
    if (count_ == 0) return;  // as always where rows are not quantised
    with_float_dtype(dtype_, [&](auto from) {
      with_code_dtype(stored_, [&](auto to) {
        quantise_rows<decltype(from)::kDType, decltype(to)::kDType>(rows_, count_, dim_);
      });
    });
    count_ = 0;
  }

 private:
  DType dtype_;
  std::int64_t dim_;
  DType stored_;
  QuantisedRow rows_[kRowsAtOnce];
  std::int64_t count_ = 0;
};

/// Converts a row; past the caches where the operation is larger than they are.
inline void move_row(const void* from, DType from_dtype, std::int64_t n, void* to, DType to_dtype,
                     bool streams) {
  if (!streams || from_dtype != to_dtype) return convert_row(from, from_dtype, n, to, to_dtype);
  copy_streaming(static_cast<char*>(to), static_cast<const char*>(from),
                 n * static_cast<std::int64_t>(size_of(to_dtype)));
}

template <class V>
void write_kv(const KvRowsParams& params, const KvRowsTask& task, Scratch) {
  const DType stored = params.format.dtype;
  for_each_part(params, params.runs[task.run], [&](const KvRowsPart& part) {
    const DType dtype = part.rows.dtype;
    RowQuantiser quantiser(dtype, part.dim, stored);
    for_each_kv_row(params, task, part, [&](const KvRow& row) {
      const void* from = at(part.rows.data, dtype, row.outside);
      void* to = at(part.slots.data, stored, row.inside);
      if (params.format.scaled) {
        quantiser.add({from, to, row.scale});
      } else {
        move_row(from, dtype, row.count, to, stored, task.streams);
      }
    });
    quantiser.finish();
  });
  if (task.streams) finish_streaming();
}

template <class V>
std::size_t write_kv_scratch(const KvRowsParams&) {
  return 0;
}

template <class V>
void gather_kv(const KvRowsParams& params, const KvRowsTask& task, Scratch memory) {
  const KvRowsScratch scratch(params, memory);
  const DType stored = params.format.dtype;
  for_each_part(params, params.runs[task.run], [&](const KvRowsPart& part) {
    const DType dtype = part.rows.dtype;
    for_each_kv_row(params, task, part, [&](const KvRow& row) {
      const void* from = at(part.slots.data, stored, row.inside);
      void* to = at(part.rows.data, dtype, row.outside);
      if (!params.format.scaled) {
        return move_row(from, stored, row.count, to, dtype, task.streams);
      }
      load_scaled_row(from, stored, row.count, static_cast<double>(*row.scale), scratch.row);
      store_rounded(scratch.row, row.count, to, dtype);
    });
  });
  if (task.streams) finish_streaming();
}

template <class V>
std::size_t gather_kv_scratch(const KvRowsParams& params) {
  return KvRowsScratch(params, {}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
