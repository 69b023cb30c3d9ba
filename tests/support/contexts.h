// Tests that run once in each place that this machine has.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/context.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "support/places.h"

namespace ladon::test {

inline std::string place_name(const testing::TestParamInfo<Place>& info) {
  return info.param.name();
}
inline void PrintTo(const Place& place, std::ostream* stream) { *stream << place.name(); }

/// A contiguous copy on the host of a view on the Context's device.
inline Tensor host_copy(const Context& context, const ConstTensorView& view) {
  Tensor host = Tensor::uninitialized(view.dtype(), view.shape());
  copy(context, view, host);
  return host;
}

/// The elements of a tensor, wherever it is.
inline std::vector<double> elements_of(const Tensor& tensor) {
  const Tensor host = tensor.to_host();
  std::vector<double> elements;
  for (std::int64_t i = 0; i < host.num_elements(); ++i) {
    elements.push_back(load_element(host.data(), host.dtype(), i));
  }
  return elements;
}
/// The elements of a view on the Context's device or on the host, in row-major order.
inline std::vector<double> elements_of(const Context& context, const ConstTensorView& view) {
  return elements_of(host_copy(context, view));
}

/// Writes elements of a contiguous view: all of them, or one.
inline void set_elements(const Context& context, const TensorView& view,
                         const std::vector<double>& elements) {
  copy(context, Tensor::from_values(view.dtype(), view.shape(), elements), view);
}
inline void set_element(const Context& context, const TensorView& view, std::int64_t index,
                        double element) {
  set_elements(context, view.reshape({view.num_elements()}).slice(0, index, index + 1), {element});
}

/// Bytes of 0xFF, which are NaN in every floating dtype, on the Context's device.
inline Tensor poisoned(const Context& context, DType dtype, const Dims& shape) {
  Tensor host = Tensor::uninitialized(dtype, shape);
  const auto bytes = static_cast<std::size_t>(host.num_elements()) * size_of(dtype);
  if (bytes != 0) std::memset(host.data(), 0xFF, bytes);
  return host.to(context);
}

class ContextTest : public testing::TestWithParam<Place> {
 protected:
  /// A tensor of the host's, in the place.
  Tensor there(const Tensor& tensor) const { return tensor.to(context_); }
  /// Random elements, in the place.
  Tensor normal(DType dtype, const Dims& shape, std::uint64_t seed, std::uint64_t stream = 0,
                double deviation = 1) const {
    Tensor tensor(context_, dtype, shape);
    fill_normal(context_, tensor, 0, deviation, seed, stream);
    return tensor;
  }

  /// A layer, in the place.
  template <class Layer>
  Layer there(Layer layer) const {
    layer.to(context_);
    return layer;
  }
  bool same_bits(const ConstTensorView& a, const ConstTensorView& b) const {
    if (!(a.shape() == b.shape()) || a.dtype() != b.dtype()) return false;
    const Tensor host_a = host_copy(context_, a);
    const Tensor host_b = host_copy(context_, b);
    const auto bytes = static_cast<std::size_t>(host_a.num_elements()) * size_of(a.dtype());
    return bytes == 0 || std::memcmp(host_a.data(), host_b.data(), bytes) == 0;
  }

  Context context_ = GetParam().context();
};

#define LADON_FOR_EACH_CONTEXT(Suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(EachContext, Suite, testing::ValuesIn(::ladon::test::places()), \
                           ::ladon::test::place_name)

}  // namespace ladon::test
