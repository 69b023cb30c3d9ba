// ladon convert: a model folder's attention as another kind, with what that loses.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>

#include "commands.h"
#include "convert_layers.h"
#include "failure.h"
#include "ladon/error.h"
#include "model_writer.h"
#include "output_file.h"
#include "plot/curve_chart.h"
#include "progress.h"
#include "signals.h"
#include "standard_streams.h"
#include "text_table.h"
#include "units.h"

namespace ladon::cli {
namespace {

void check_options(const ConvertOptions& options) {
  const bool mla = options.to == "mla";
  const auto refuse = [](const std::string& what) { throw UsageError("convert: " + what); };
  if (options.to == "gqa" && options.kv_heads == 0 && options.sweep.empty()) {
    refuse("--to gqa: expected --kv-heads or --sweep as well");
  }
  if (options.to != "gqa" && options.kv_heads != 0) refuse("--kv-heads: expected --to gqa");
  if (!mla && options.kv_rank != 0) refuse("--kv-rank: expected --to mla");
  if (!mla && options.rope_dim) refuse("--rope-dim: expected --to mla");
  if (options.unequal && options.kv_rank == 0) {
    refuse("--unequal-ranks: expected --kv-rank as well, their mean");
  }
  if (mla && options.balance) refuse("--balance: expected --to mha, gqa or mqa");
  if (mla && options.merge != "pca") refuse("--merge: expected --to gqa or mqa");
  if (options.max_error && !(*options.max_error >= 0 && std::isfinite(*options.max_error))) {
    refuse("--max-error: got " + format_error(*options.max_error) +
           ", expected a finite number, 0 or more");
  }
  if (options.sweep.empty()) {
    if (options.output.empty()) refuse("expected --output or --sweep");
    if (!options.rope_dims.empty()) refuse("--rope-dims: expected --sweep");
    if (!options.plot.empty()) refuse("--plot: expected --sweep");
    return;
  }
  if (options.to != "gqa" && !mla) refuse("--sweep: expected --to gqa or mla");
  if (!options.output.empty()) refuse("--sweep: writes nothing, expected no --output");
  if (options.max_error) refuse("--sweep: writes nothing, expected no --max-error");
  if (options.kv_heads != 0 || options.kv_rank != 0 || options.rope_dim) {
    refuse("--sweep: gives the sizes, expected no --kv-heads, --kv-rank or --rope-dim");
  }
  if (!mla && !options.rope_dims.empty()) refuse("--rope-dims: expected --to mla");
}

/// All sizes of a sweep, or the one that is wanted.
std::vector<TargetSize> target_sizes(const ConvertOptions& options, std::int64_t num_heads) {
  std::vector<TargetSize> sizes;
  if (options.sweep.empty()) {
    TargetSize size{.kv_heads = options.to == "mha"   ? num_heads
                                : options.to == "mqa" ? 1
                                                      : options.kv_heads,
                    .rope_dim = options.rope_dim};
    if (options.kv_rank != 0) size.kv_rank = options.kv_rank;
    return {size};
  }
  for (const std::int64_t number : options.sweep) {
    if (options.to == "gqa") {
      sizes.push_back({.kv_heads = number});
      continue;
    }
    if (options.rope_dims.empty()) sizes.push_back({.kv_rank = number});
    for (const std::int64_t rope_dim : options.rope_dims) {
      sizes.push_back({.kv_rank = number, .rope_dim = rope_dim});
    }
  }
  return sizes;
}

/// Of one pass over all layers.
class LayerProgress {
 public:
  LayerProgress(Progress& progress, std::int64_t layers) : progress_(progress), layers_(layers) {}

  /// "[####....] layer 3 of 32, about 2 min left: converting".
  void show(std::int64_t layer, const char* what) {
    constexpr std::int64_t kLength = 24;
    const auto done = static_cast<std::size_t>(kLength * layer / layers_);
    const double share = static_cast<double>(layer) / static_cast<double>(layers_);
    progress_.show("[" + std::string(done, '#') + std::string(kLength - done, '.') + "] layer " +
                   std::to_string(layer + 1) + " of " + std::to_string(layers_) +
                   left_.after(share) + ": " + what);
  }

 private:
  Progress& progress_;
  std::int64_t layers_;
  TimeLeft left_;
};

/// A layer as it is in the folder, in f32 or f64, with its inputs where there are some.
struct SourceLayer {
  std::unique_ptr<AttentionLayer> layer{};
  DType file_dtype = DType::kF32;
  std::optional<LayerInputSets> inputs{};
  std::optional<Calibration> calibration{};

  const MultiHeadAttention& heads() const {
    return dynamic_cast<const MultiHeadAttention&>(*layer);
  }
  const Calibration* given() const { return calibration ? &*calibration : nullptr; }
};

SourceLayer load_source(const Context& context, const ShardedSafetensors& weights,
                        const ModelDescription& model, std::int64_t n,
                        const ConvertOptions& options, LayerProgress& progress) {
  SourceLayer source;
  progress.show(n, "reading");
  source.layer = load_attention(context, weights, model, n);
  source.file_dtype = source.layer->dtype();
  const DType dtype = source.file_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  source.layer = load_attention(context, weights, model, n, {.dtype = dtype});
  if (!options.calibrate.empty()) {
    progress.show(n, "calibrating");
    source.inputs = read_inputs(context, options.calibrate, n, model.embed_dim, dtype);
    source.calibration.emplace(model.embed_dim);
    source.calibration->add(context, source.inputs->seen);
  }
  return source;
}

/// Runs the work on a layer, and says which one it was where that fails.
template <class Work>
auto in_layer(std::int64_t layer, Work&& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw Failure("convert: layer " + std::to_string(layer) + ": " + error.what());
  }
}

/// What one layer has become, without its weights.
struct Row {
  std::int64_t layer = 0;
  TargetSize size{};
  ConversionSummary summary{};
  std::optional<LayerComparison> seen{}, held_out{};
};

Json json_of(const Row& row) {
  Json json;
  json["layer"] = row.layer;
  if (row.size.kv_heads != 0) json["kv_heads"] = row.size.kv_heads;
  if (row.size.kv_rank) json["kv_rank"] = *row.size.kv_rank;
  if (row.size.rope_dim) json["rope_dim"] = *row.size.rope_dim;
  json["cache_before"] = row.summary.cache_before;
  json["cache_after"] = row.summary.cache_after;
  json["exact"] = row.summary.exact;
  json["discarded"] = row.summary.discarded;
  json["rope_discarded"] = row.summary.rope_discarded;
  if (row.held_out) {
    json["error"] = row.held_out->output_error;
    json["error_after_first"] = row.held_out->output_error_after_first;
    json["calibrated_error"] = row.seen->output_error;
    json["weights_divergence"] = row.held_out->weights_divergence;
  }
  return json;
}

std::string size_text(const TargetSize& size) {
  if (size.kv_heads != 0) return std::to_string(size.kv_heads) + " KV heads";
  return (size.kv_rank ? "rank " + std::to_string(*size.kv_rank) : std::string("full rank")) +
         (size.rope_dim ? " + " + std::to_string(*size.rope_dim) : std::string(", all rope"));
}

void print_rows(const std::vector<Row>& rows, const ConvertOptions& options) {
  TextTable table({{"layer"},
                   {"size", Align::kLeft},
                   {"cache"},
                   {"was"},
                   {"error"},
                   {"after first"},
                   {"calibrated"},
                   {"divergence"},
                   {"", Align::kLeft}});
  const auto number = [](const std::optional<LayerComparison>& loss, double LayerComparison::*of) {
    return loss ? format_error((*loss).*of) : std::string("-");
  };
  for (const Row& row : rows) {
    table.add({std::to_string(row.layer), size_text(row.size),
               std::to_string(row.summary.cache_after), std::to_string(row.summary.cache_before),
               number(row.held_out, &LayerComparison::output_error),
               number(row.held_out, &LayerComparison::output_error_after_first),
               number(row.seen, &LayerComparison::output_error),
               number(row.held_out, &LayerComparison::weights_divergence),
               row.summary.exact ? "exact" : ""});
  }
  std::fputs(table.text().c_str(), stdout);
  std::puts("cache: elements of a token. error: of the written weights on inputs held out.");
  if (options.calibrate.empty()) {
    std::puts("Weights alone: no inputs to calibrate with, and no error measured.");
  }
}

/// Means over the layers for each size, as a curve for each rope_dim.
std::vector<Curve> curves_of(const std::vector<Row>& rows, const std::vector<TargetSize>& sizes) {
  std::map<std::string, Curve> curves;
  for (const TargetSize& size : sizes) {
    Point mean;
    double count = 0;
    for (const Row& row : rows) {
      if (row.size.kv_heads != size.kv_heads || row.size.kv_rank != size.kv_rank ||
          row.size.rope_dim != size.rope_dim) {
        continue;
      }
      mean.x += static_cast<double>(row.summary.cache_after) /
                static_cast<double>(row.summary.cache_before);
      mean.y += row.held_out->output_error;
      ++count;
    }
    const std::string name = size.kv_heads != 0 ? "GQA"
                             : size.rope_dim    ? "MLA, rope " + std::to_string(*size.rope_dim)
                                                : std::string("MLA, all rope");
    Curve& curve = curves[name];
    curve.name = name;
    curve.points.push_back({mean.x / count, mean.y / count});
  }
  std::vector<Curve> result;
  result.reserve(curves.size());
  for (auto& [name, curve] : curves) result.push_back(std::move(curve));
  return result;
}

/// The config of the new folder.
Json new_config(Json config, const ConvertOptions& options, const ModelDescription& model,
                const std::vector<LatentAttentionOptions>& layers, std::int64_t kv_heads) {
  if (options.to != "mla") {
    config["num_key_value_heads"] = kv_heads;
    return config;
  }
  config["model_type"] = "ladon_latent";
  config["ladon_source_family"] = model.family;
  for (const char* const name : {"architectures", "auto_map", "rope_theta", "rope_scaling",
                                 "rope_parameters", "num_key_value_heads", "head_dim"}) {
    config.erase(name);
  }
  Json latent = {{"kv_ranks", Json::array()},
                 {"nope_dims", Json::array()},
                 {"value_dim", layers.front().value_dim},
                 {"frequencies", Json::array()},
                 {"magnitudes", Json::array()},
                 {"scales", Json::array()},
                 {"query_bias", layers.front().query_bias},
                 {"kv_bias", layers.front().kv_bias},
                 {"out_bias", layers.front().out_bias},
                 {"causal", layers.front().causal}};
  for (const LatentAttentionOptions& layer : layers) {
    latent["kv_ranks"].push_back(layer.kv_rank);
    latent["nope_dims"].push_back(layer.nope_dim);
    latent["frequencies"].push_back(layer.rope.frequencies);
    latent["magnitudes"].push_back(layer.rope.magnitude);
    latent["scales"].push_back(*layer.scale);
  }
  config["ladon_latent"] = std::move(latent);
  return config;
}

/// Whether the family's config can say this number of KV heads, before minutes of work.
void check_kv_heads(const ConvertOptions& options, const ModelDescription& model,
                    std::int64_t kv_heads) {
  if (options.to == "mla" || model.num_kv_heads == kv_heads) return;
  static constexpr const char* kFamilies[] = {"llama", "mistral", "qwen2",
                                              "qwen3", "gemma2",  "gpt_oss"};
  if (std::find(std::begin(kFamilies), std::end(kFamilies), model.family) == std::end(kFamilies)) {
    throw Failure("convert: --model: family " + model.family +
                  " has no field for KV heads; only --to mla can be written");
  }
}

/// The tensors of one layer in the file's dtype.
std::vector<NamedTensor> tensors_of(const Context& context, const AttentionLayer& layer,
                                    const std::string& family, std::int64_t index, DType dtype) {
  std::vector<NamedTensor> tensors = attention_tensors(layer, family, index);
  for (NamedTensor& tensor : tensors) tensor.value = Tensor::copy_of(context, tensor.value, dtype);
  return tensors;
}

}  // namespace

int run_convert(const ConvertOptions& options) {
  check_options(options);
  if (!options.output.empty()) check_new_folder(options.output);
  if (!options.plot.empty()) {
    check_picture_path("convert: --plot", options.plot);
    claim_standard_output("convert", {options.plot}, options.json);
    check_writable("convert: --plot", output_path(options.plot));
  }
  const ModelDescription model =
      describe_model(options.model, {.ignored_fields = options.ignored_fields});
  if (std::holds_alternative<LatentAttentionOptions>(model.layers.front())) {
    throw Failure("convert: --model: family " + model.family +
                  " is latent attention already; no family's files hold what it converts to");
  }
  std::vector<TargetSize> sizes = target_sizes(options, model.num_heads);
  const Json config = read_config_json(options.model);
  if (options.sweep.empty()) check_kv_heads(options, model, sizes.front().kv_heads);
  const ShardedSafetensors weights = ShardedSafetensors::open(options.model);
  const Context context(options.machinery.context_options());
  const auto num_layers = static_cast<std::int64_t>(model.layers.size());

  std::vector<Row> rows;
  std::vector<ReplacedLayer> replaced;
  std::vector<LatentAttentionOptions> latents;
  {
    Progress progress;
    const auto load = [&](std::int64_t n, LayerProgress& layers) {
      return load_source(context, weights, model, n, options, layers);
    };
    std::vector<std::int64_t> ranks;
    if (options.unequal) {
      std::vector<std::vector<double>> spectra;
      LayerProgress layers(progress, num_layers);
      for (std::int64_t n = 0; n < num_layers; ++n) {
        const SourceLayer layer = load(n, layers);
        layers.show(n, "finding its rank");
        spectra.push_back(in_layer(n, [&] {
          return to_mla(context, layer.heads(),
                        {.kv_rank = options.kv_rank, .rope_dim = options.rope_dim}, layer.given())
              .summary.spectrum;
        }));
      }
      ranks = share_ranks(spectra, options.kv_rank);
    }
    LayerProgress layers(progress, num_layers);
    for (std::int64_t n = 0; n < num_layers; ++n) {
      const SourceLayer layer = load(n, layers);
      if (options.unequal) sizes.front().kv_rank = ranks[static_cast<std::size_t>(n)];
      for (const TargetSize& size : sizes) {
        layers.show(n, "converting");
        LayerOutcome outcome = in_layer(n, [&] {
          return convert_layer(context, layer.heads(), options, size,
                               layer.inputs ? &*layer.inputs : nullptr, layer.given(),
                               layer.file_dtype);
        });
        rows.push_back({n, size, std::move(outcome.summary), outcome.seen, outcome.held_out});
        // Written so that NaN is too large.
        if (options.max_error && !(outcome.held_out->output_error <= *options.max_error)) {
          progress.clear();
          throw Failure("convert: --max-error: layer " + std::to_string(n) + " has an error of " +
                        format_error(outcome.held_out->output_error) + ", more than " +
                        format_error(*options.max_error) + "; nothing was written");
        }
        if (options.output.empty()) continue;
        const std::string family = options.to == "mla" ? "ladon_latent" : model.family;
        replaced.push_back(
            replace_layer(weights, attention_tensors(layer.heads(), model.family, n),
                          tensors_of(context, *outcome.layer, family, n, layer.file_dtype)));
        if (options.to == "mla") {
          latents.push_back(dynamic_cast<const LatentAttention&>(*outcome.layer).options());
        }
      }
    }
    if (!options.output.empty()) {
      progress.show("writing " + options.output);
      write_model(weights, new_config(config, options, model, latents, sizes.front().kv_heads),
                  replaced, options.output);
    }
  }
  if (!options.plot.empty()) {
    const HeldSignals held;
    OutputFile picture("convert: --plot", output_path(options.plot),
                       draw_curve_chart(options.plot, curves_of(rows, sizes),
                                        "Error over cache, " + model.family + " to " + options.to,
                                        "means over " + std::to_string(num_layers) + " layers")
                           ->bytes());
    picture.commit();
  }
  if (!options.json) {
    print_rows(rows, options);
    for (const std::string* path : {&options.output, &options.plot}) {
      if (!path->empty()) std::printf("wrote %s\n", shown_output(*path).c_str());
    }
    return kExitGood;
  }
  Json document = json_document("convert");
  document["model"] = options.model;
  document["family"] = model.family;
  document["to"] = options.to;
  document["calibrated"] = !options.calibrate.empty();
  if (!options.output.empty()) document["output"] = options.output;
  document["rows"] = Json::array();
  for (const Row& row : rows) document["rows"].push_back(json_of(row));
  print_json(document);
  return kExitGood;
}

}  // namespace ladon::cli
