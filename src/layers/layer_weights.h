// Which of a layer's parameters are which: looked up once, when the layer is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ladon/attention_layer.h"

namespace ladon {

/// Stands for a parameter that a layer does not have.
inline constexpr int kNoParameter = -1;

/// The parameters of one linear map.
struct LinearIndex {
  int weight = kNoParameter;
  int bias = kNoParameter;
};

/// The number of the parameter with this name; kNoParameter where there is none.
inline int index_of(std::span<const Parameter> parameters, std::string_view name) noexcept {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == name) return static_cast<int>(i);
  }
  return kNoParameter;
}

/// "name.weight" and "name.bias".
inline LinearIndex linear_index_of(std::span<const Parameter> parameters, std::string_view name) {
  const std::string prefix(name);
  return {index_of(parameters, prefix + ".weight"), index_of(parameters, prefix + ".bias")};
}

/// A new layer's weight on the host: uniform in [low, high), or just `low` where they are equal.
void fill_weight(Parameter& parameter, double low, double high, std::uint64_t seed = 0,
                 std::uint64_t stream = 0);

/// A parameter's value; absent where the layer has none.
inline ConstTensorView weight_of(const AttentionLayer& layer, int index) {
  if (index == kNoParameter) return {};
  return layer.named_parameters()[static_cast<std::size_t>(index)].value;
}

}  // namespace ladon
