// Derivatives by central differences, of variables on any device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/contexts.h"

namespace ladon::test {

/// The derivative of loss(), which reads `variable`, for each of its elements.
template <class Loss>
std::vector<double> slopes_of(const Context& context, Tensor& variable, const Loss& loss,
                              double step = 1e-5) {
  const std::vector<double> kept = elements_of(variable);
  std::vector<double> slopes;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto set = [&](double element) {
      set_element(context, variable, static_cast<std::int64_t>(i), element);
    };
    set(kept[i] + step);
    const double above = loss();
    set(kept[i] - step);
    const double below = loss();
    set(kept[i]);
    slopes.push_back((above - below) / (2 * step));
  }
  return slopes;
}

}  // namespace ladon::test
