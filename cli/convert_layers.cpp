#include "convert_layers.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "failure.h"
#include "ladon/npy.h"

namespace ladon::cli {
namespace {

/// Weights as the file will have them.
void round_weights(const Context& context, AttentionLayer& layer, DType dtype) {
  if (layer.dtype() == dtype) return;
  for (Parameter& parameter : layer.named_parameters()) {
    const Tensor rounded = Tensor::copy_of(context, parameter.value, dtype);
    copy(context, rounded, parameter.value);
  }
}

template <class Converted>
std::pair<std::unique_ptr<AttentionLayer>, ConversionSummary> owned(Converted converted) {
  using Layer = decltype(converted.layer);
  return {std::make_unique<Layer>(std::move(converted.layer)), std::move(converted.summary)};
}

/// Throws Failure where an input is not finite, be it one that is fitted to or one held out.
template <class T>
void check_finite(const Tensor& inputs, const std::string& path) {
  const auto* const first = inputs.data_as<T>();
  const auto* const last = first + inputs.num_elements();
  const auto* const found =
      std::find_if(first, last, [](T value) { return !std::isfinite(value); });
  if (found == last) return;
  throw Failure("convert: --calibrate: " + path + ": got " + std::to_string(*found) + " at token " +
                std::to_string((found - first) / inputs.size(2)) + ", expected finite numbers");
}

HeadMerge merge_of(const std::string& name) {
  if (name == "mean") return HeadMerge::kMean;
  return name == "first" ? HeadMerge::kFirst : HeadMerge::kPca;
}

}  // namespace

LayerInputSets read_inputs(const Context& context, const std::string& folder, std::int64_t layer,
                           std::int64_t embed_dim, DType dtype) {
  const std::filesystem::path path =
      std::filesystem::path(folder) / ("layer_" + std::to_string(layer) + ".npy");
  const Tensor read = read_npy(path);
  const int rank = read.rank();
  if (!is_float(read.dtype()) || (rank != 2 && rank != 3) || read.size(rank - 1) != embed_dim) {
    throw Failure("convert: --calibrate: " + path.string() + ": got " + name_of(read.dtype()) +
                  " " + read.shape().to_string() + ", expected floats [seq, " +
                  std::to_string(embed_dim) + "] or [batch, seq, " + std::to_string(embed_dim) +
                  "]");
  }
  // One sequence is cut, several are shared out.
  const bool one = rank == 2 || read.size(0) == 1;
  const std::int64_t seq = read.size(rank - 2);
  const std::int64_t parts = one ? seq : read.size(0);
  if (parts < 2 || seq == 0) {
    throw Failure("convert: --calibrate: " + path.string() + ": got " + read.shape().to_string() +
                  ", expected at least two tokens: some are held out to measure with");
  }
  LayerInputSets sets;
  sets.all = Tensor::copy_of(context, read.view().reshape({one ? 1 : read.size(0), seq, embed_dim}),
                             dtype);
  dtype == DType::kF64 ? check_finite<double>(sets.all, path.string())
                       : check_finite<float>(sets.all, path.string());
  const std::int64_t kept = parts - std::max<std::int64_t>(1, parts / 8);
  sets.seen = std::as_const(sets.all).view().slice(one ? 1 : 0, 0, kept);
  sets.held_out = std::as_const(sets.all).view().slice(one ? 1 : 0, kept, parts);
  return sets;
}

LayerOutcome convert_layer(const Context& context, const MultiHeadAttention& source,
                           const ConvertOptions& options, const TargetSize& size,
                           const LayerInputSets* inputs, const Calibration* calibration,
                           DType file_dtype) {
  LayerOutcome outcome;
  if (options.to == "mla") {
    std::tie(outcome.layer, outcome.summary) = owned(
        to_mla(context, source, {.kv_rank = size.kv_rank, .rope_dim = size.rope_dim}, calibration));
  } else {
    std::tie(outcome.layer, outcome.summary) = owned(
        to_gqa(context, source, {.num_kv_heads = size.kv_heads, .merge = merge_of(options.merge)},
               calibration));
  }
  if (inputs != nullptr && options.refit && !outcome.summary.exact) {
    OutputFit fit(source, *outcome.layer);
    for (std::int64_t n = 0; n < inputs->seen.size(0); ++n) {
      fit.add(context, inputs->seen.select(0, n));
    }
    fit.apply(context, *outcome.layer);
  }
  if (options.balance) {
    if (file_dtype == DType::kF16) {
      throw Failure(
          "convert: --balance: got weights in f16, expected bf16, f32 or f64: small ones "
          "would be rounded");
    }
    const auto& heads = dynamic_cast<const MultiHeadAttention&>(*outcome.layer);
    outcome.layer =
        std::make_unique<MultiHeadAttention>(balance_channels(context, heads, calibration).layer);
  }
  round_weights(context, *outcome.layer, file_dtype);
  if (inputs != nullptr) {
    const auto& order = outcome.summary.head_order;
    // Of what it was fitted to, as much as is held out says enough.
    const std::int64_t sequences = std::min(inputs->seen.size(0), inputs->held_out.size(0));
    outcome.seen =
        compare_layers(context, source, *outcome.layer, inputs->seen.slice(0, 0, sequences), order);
    outcome.held_out = compare_layers(context, source, *outcome.layer, inputs->held_out, order);
  }
  return outcome;
}

}  // namespace ladon::cli
