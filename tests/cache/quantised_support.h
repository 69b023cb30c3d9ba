// Quantised storage by its definition, for tests: numbers of e4m3, scales, and how far off what is
// stored may be.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cache/cache_support.h"
#include "core/element.h"
#include "ladon/dtype.h"
#include "ladon/tensor.h"

namespace ladon::test {

/// Of a tensor on the host.
inline double largest_in_row(const Tensor& tensor, std::int64_t row, std::int64_t dim) {
  double largest = 0;
  for (std::int64_t i = 0; i < dim; ++i) {
    largest = std::max(largest, std::fabs(number_at(tensor, row * dim + i)));
  }
  return largest;
}

inline constexpr DType kQuantised[] = {DType::kI8, DType::kF8E4M3};

/// e4m3 by its definition.
inline double fp8_number(int code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// The code of the nearest number, ties to the even one; the codes of 0 to 448 are in order.
inline int nearest_fp8(double number) {
  const double magnitude = std::fabs(number);
  int code = 0;
  while (code < 0x7e && fp8_number(code + 1) <= magnitude) ++code;
  if (code < 0x7e) {
    const double below = magnitude - fp8_number(code);
    const double above = fp8_number(code + 1) - magnitude;
    if (above < below || (above == below && code % 2 != 0)) ++code;
  }
  return code | (std::signbit(number) ? 0x80 : 0);
}

/// The scale of a row, by its definition.
inline float scale_of(DType storage, double largest) {
  const double scale = largest / (storage == DType::kI8 ? 127 : 448);
  return scale < 0x1p-126 ? 0.0F : static_cast<float>(scale);
}

/// The most that a number of a row can be off.
inline double most_off(DType storage, double number, double largest) {
  if (storage == DType::kI8) return largest / 254;
  return std::max(std::fabs(number) / 16,
                  static_cast<double>(scale_of(storage, largest)) * std::ldexp(1, -10));
}

/// One number of each row of a tensor on the host, in a fixed column, is `factor` times as large:
/// what keys of real models look like.
inline void add_outliers(Tensor& tensor, double factor) {
  const std::int64_t dim = tensor.size(3);
  for (std::int64_t row = 0; row < tensor.num_elements() / dim; ++row) {
    const double value = number_at(tensor, row * dim + 5);
    store_element(tensor.data(), tensor.dtype(), row * dim + 5, value * factor);
  }
}

}  // namespace ladon::test
