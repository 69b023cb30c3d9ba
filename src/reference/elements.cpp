// Zeros, random elements, sums over heads, and what optimisers need besides their steps.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "core/element.h"
#include "core/host_copy.h"
#include "core/parallel.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

// Elements of one task.
constexpr std::int64_t kElementsPerTask = std::int64_t{1} << 14;

/// Calls function<T>() with the type of an f32 or f64 array, of which there are no others.
template <class Function>
auto with_compute_type(DType dtype, const Function& function) {
  return dtype == DType::kF64 ? function.template operator()<double>()
                              : function.template operator()<float>();
}

// Elements whose squares are summed at a time. The cut, and the order within it, are fixed: threads
// change no bit.
constexpr std::int64_t kMagnitudeBlock = std::int64_t{1} << 14;

/// Eight interleaved sums, so that one addition does not wait for the one before it.
template <class T>
Magnitude magnitude_of_block(const T* data, std::int64_t count, int exponent) {
  constexpr std::int64_t kSums = 8;
  double sums[kSums] = {};
  double largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(data[i]);
    largest = std::max(largest, std::abs(value));
    const double scaled = exponent == 0 ? value : std::scalbn(value, -exponent);
    sums[i % kSums] += scaled * scaled;
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return {total, largest};
}

}  // namespace

void ReferenceBackend::fill_random(const RandomFillParams& params) {
  fill_on_host(&workers(), params);
}

void ReferenceBackend::zero(const TensorView& view) {
  const bool contiguous = view.is_contiguous();
  parallel_ranges(workers(), view.num_elements(), kElementsPerTask,
                  [&](std::int64_t begin, std::int64_t end, int) {
                    if (contiguous) {  // zero is all bits zero, whatever the dtype
                      std::memset(element_at(view.data(), view.dtype(), begin), 0,
                                  static_cast<std::size_t>(end - begin) * size_of(view.dtype()));
                      return;
                    }
                    for (std::int64_t i = begin; i < end; ++i) {
                      store_element(view.data(), view.dtype(), offset_of_element(view, i), 0);
                    }
                  });
}

void ReferenceBackend::sum_heads(const HeadSumParams& params) {
  const std::int64_t width = params.groups * params.dim;
  for (std::int64_t index = 0; index < params.rows * width; ++index) {
    const std::int64_t row = index / width;
    const std::int64_t head_group = index % width / params.dim;
    const std::int64_t i = index % params.dim;
    double sum = 0;
    for (std::int64_t h = 0; h < params.group; ++h) {
      const std::int64_t head = head_group * params.group + h;
      sum += load_element(params.x.data, params.x.dtype,
                          row * params.x.stride + head * params.x_head_stride + i);
    }
    store_element(params.y.data, params.y.dtype,
                  row * params.y.stride + head_group * params.y_head_stride + i, sum);
  }
}

void ReferenceBackend::accumulate(const AccumulateParams& params) noexcept {
  with_compute_type(params.to.dtype, [&]<class T>() {
    const auto* from = static_cast<const T*>(params.from.data);
    auto* to = static_cast<T*>(params.to.data);
    for (std::int64_t i = 0; i < params.to.count; ++i) to[i] += from[i];
  });
}

void ReferenceBackend::scale(const FloatArray& array, double factor) {
  with_compute_type(array.dtype, [&]<class T>() {
    auto* data = static_cast<T*>(array.data);
    parallel_ranges(workers(), array.count, kElementsPerTask,
                    [&](std::int64_t begin, std::int64_t end, int) {
                      for (std::int64_t i = begin; i < end; ++i) {
                        data[i] = static_cast<T>(static_cast<double>(data[i]) * factor);
                      }
                    });
  });
}

Magnitude ReferenceBackend::magnitude(std::span<const FloatArray> arrays, int exponent) {
  Magnitude total;
  for (const FloatArray& array : arrays) {
    std::vector<Magnitude> blocks(static_cast<std::size_t>(ceil_div(array.count, kMagnitudeBlock)));
    with_compute_type(array.dtype, [&]<class T>() {
      const auto* data = static_cast<const T*>(array.data);
      parallel_ranges(workers(), array.count, kMagnitudeBlock,
                      [&](std::int64_t begin, std::int64_t end, int) {
                        blocks[static_cast<std::size_t>(begin / kMagnitudeBlock)] =
                            magnitude_of_block(data + begin, end - begin, exponent);
                      });
    });
    for (const Magnitude& block : blocks) {
      total.sum_of_squares += block.sum_of_squares;
      total.largest = std::max(total.largest, block.largest);
    }
  }
  return total;
}

}  // namespace ladon::reference
