// The rotary positions of a config, in the old style (rope_theta next to rope_scaling)
// and in the new (rope_parameters, one for the model or one for each type of layer).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "ladon/rope.h"
#include "models/config_fields.h"

namespace ladon::models {

/// By the type of layer; the empty name stands for every type without an entry.
using RopeOfType = std::map<std::string, RopeOptions, std::less<>>;

/// How a family writes its rope.
struct RopeColumns {
  double base = 10000;                    // the default
  std::string_view theta = "rope_theta";  // the field of the base, outside rope_parameters
  std::string_view fraction{};            // of the rotated part of a head; empty: all of it
  double default_fraction = 1;
  std::string_view theta_of_windows{};  // of windowed layers, whose rope is not scaled
};

/// `path` is the file's, `context` RopeScalingOptions::context. Throws Error, kUnsupported for a
/// kind of scaling that Ladon lacks.
RopeOfType read_rope(ConfigFields& fields, const std::string& path, const RopeColumns& columns,
                     std::int64_t head_dim, std::int64_t context,
                     std::span<const std::string> ignored);

}  // namespace ladon::models
