#include "compare_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/host_copy.h"
#include "ladon/tensor.h"

namespace ladon::bench {

double largest_error(const ConstTensorView& got, const ConstTensorView& truth) {
  const Tensor a = host_copy_of(got, DType::kF64);
  const Tensor b = host_copy_of(truth, DType::kF64);
  const auto* x = a.data_as<double>();
  const auto* y = b.data_as<double>();
  double largest = 0;
  double difference = 0;
  for (std::int64_t i = 0; i < b.num_elements(); ++i) {
    if (!std::isfinite(x[i]) || !std::isfinite(y[i])) {
      return std::numeric_limits<double>::infinity();
    }
    largest = std::max(largest, std::abs(y[i]));
    difference = std::max(difference, std::abs(x[i] - y[i]));
  }
  return largest == 0 ? difference : difference / largest;
}

bool same_bits(const ConstTensorView& a, const ConstTensorView& b) {
  if (!(a.shape() == b.shape()) || a.dtype() != b.dtype()) return false;
  const std::size_t bytes = static_cast<std::size_t>(a.num_elements()) * size_of(a.dtype());
  return bytes == 0 || std::memcmp(a.data(), b.data(), bytes) == 0;
}

}  // namespace ladon::bench
