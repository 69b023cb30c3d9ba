// A config.json as far as its cache, its weights and its context go, whatever the family.
#pragma once

#include <cstdint>
#include <string>

#include "model_shape.h"

namespace ladon::cli {

/// What the usual fields of a config say, family known or not.
struct ModelConfig {
  std::string family;  // model_type; of a model with several parts, that of its text part
  ModelShape shape;
  /// Of all layers and embeddings, by the usual shape of a decoder; 0 where fields are missing.
  double num_parameters = 0;
  double bytes_per_parameter = 2;
};

/// `path` is a regular file. Throws Failure where the fields of attention are missing or absurd.
ModelConfig read_model_config(const std::string& path);

}  // namespace ladon::cli
