// The rotary positions of a config, in the old style (rope_theta next to rope_scaling)
// and in the new (rope_parameters, one for the model or one for each type of layer).
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>

#include "ladon/rope.h"
#include "models/config_fields.h"

namespace ladon::models {

/// By the type of layer; the empty name stands for every type without an entry.
using RopeOfType = std::map<std::string, RopeOptions, std::less<>>;

/// `path` is the file's. Throws Error, kUnsupported for a kind of scaling that Ladon lacks.
RopeOfType read_rope(ConfigFields& fields, const std::string& path, double default_base,
                     std::span<const std::string> ignored);

/// Every name that read_rope() reads.
inline constexpr std::string_view kRopeFields =
    "rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "original_max_position_embeddings";

}  // namespace ladon::models
