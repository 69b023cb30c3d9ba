// The work of `ladon convert`, layer by layer: inputs, conversion, and what it lost.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "ladon/checkpoint.h"
#include "ladon/convert.h"

namespace ladon::cli {

/// One size that a layer can be converted to.
struct TargetSize {
  std::int64_t kv_heads = 0;              // mha, gqa, mqa
  std::optional<std::int64_t> kv_rank{};  // mla
  std::optional<std::int64_t> rope_dim{};
};

/// Inputs of one layer: those that conversions are fitted to, and those that they are measured on.
struct LayerInputSets {
  Tensor all;
  ConstTensorView seen{};  // [batch, seq, embed]
  ConstTensorView held_out{};
};

struct LayerOutcome {
  std::unique_ptr<AttentionLayer> layer{};
  ConversionSummary summary{};
  std::optional<LayerComparison> seen{};  // none without inputs
  std::optional<LayerComparison> held_out{};
};

/// The inputs in `folder`/layer_<n>.npy, in the dtype that the layer computes in. The last eighth
/// is held out: of the sequences of [batch, seq, embed], of the tokens of [seq, embed].
LayerInputSets read_inputs(const Context& context, const std::string& folder, std::int64_t layer,
                           std::int64_t embed_dim, DType dtype);

/// Converts, refits the output projection where there are inputs and something was lost, rounds the
/// weights to the file's dtype, and measures those.
LayerOutcome convert_layer(const Context& context, const MultiHeadAttention& source,
                           const ConvertOptions& options, const TargetSize& size,
                           const LayerInputSets* inputs, const Calibration* calibration,
                           DType file_dtype);

}  // namespace ladon::cli
