// ladon run: an attention layer of a model folder over an input file.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "commands.h"
#include "failure.h"
#include "json_output.h"
#include "ladon/checkpoint.h"
#include "ladon/error.h"
#include "ladon/npy.h"
#include "layer_run.h"
#include "machine.h"
#include "output_file.h"
#include "plot/canvas.h"
#include "plot/heat_map.h"
#include "plot/token_texts.h"
#include "plot/weights_page.h"
#include "progress.h"
#include "signals.h"
#include "standard_streams.h"
#include "units.h"

namespace ladon::cli {
namespace {

/// A summary of the output's elements, so that a NaN is seen at once.
struct Summary {
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();
  double mean = 0;
  std::int64_t not_finite = 0;
};

Summary summarise(const Context& context, const Tensor& tensor) {
  Summary summary;
  const Tensor copy = Tensor::copy_of(context, tensor, DType::kF64);
  const auto* values = copy.data_as<double>();
  const std::int64_t count = copy.num_elements();
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) {
      ++summary.not_finite;
      continue;
    }
    summary.least = std::min(summary.least, values[i]);
    summary.most = std::max(summary.most, values[i]);
    summary.mean += values[i];
  }
  const std::int64_t finite = count - summary.not_finite;
  if (finite == 0) return {.least = 0, .most = 0, .mean = 0, .not_finite = summary.not_finite};
  summary.mean /= static_cast<double>(finite);
  return summary;
}

const LayerOptions& layer_options(const ModelDescription& model, std::int64_t layer) {
  if (layer >= model.num_layers) {
    throw UsageError("run: --layer: got " + std::to_string(layer) + ", expected 0 to " +
                     std::to_string(model.num_layers - 1));
  }
  return model.layers[static_cast<std::size_t>(layer)];
}

/// [seq, embed] or [batch, seq, embed] as the latter.
Tensor read_input(const RunOptions& options, const std::string& path, std::int64_t embed_dim) {
  Tensor x;
  try {
    x = read_npy(path);
  } catch (const Error& error) {
    throw Failure(with_name(error.what(), path, options.input));
  }
  const bool fits = (x.rank() == 2 || x.rank() == 3) && x.size(x.rank() - 1) == embed_dim;
  if (!fits || !is_float(x.dtype())) {
    throw Failure("run: --input: " + options.input + " holds " + x.shape().to_string() + " of " +
                  name_of(x.dtype()) + ", expected floats [seq, " + std::to_string(embed_dim) +
                  "] or [batch, seq, " + std::to_string(embed_dim) + "]");
  }
  return x;
}

/// Throws before anything large is allocated.
void check_memory(const RunOptions& options, const std::string& path, const ModelDescription& model,
                  const LayerOptions& layer) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) {
    throw Failure("run: --input: cannot read " + options.input + ": " + error.message());
  }
  // Weights; input, output, projections and caches.
  const double weights = parameter_elements(layer) * (options.dtype == DType::kF64 ? 8 : 4);
  const auto input = static_cast<double>(size);
  const double wide =
      static_cast<double>(model.num_heads * model.head_dim) / static_cast<double>(model.embed_dim);
  require_memory("run: this layer and input", weights + input * (6 + 8 * wide));
}

void check_options(const RunOptions& options, const ModelDescription& model,
                   const LayerOptions& layer) {
  if (options.cached && !is_causal(layer)) {
    throw UsageError("run: --cached: the layers of " + model.family +
                     " are not causal, so a cache cannot give what the whole sequence gives");
  }
}

/// A page to explore, rather than a picture.
bool is_page(const std::string& path) { return std::filesystem::path(path).extension() == ".html"; }

/// `shape` is [batch, seq, embed].
void check_picture(const RunOptions& options, const ModelDescription& model, const Dims& shape) {
  if (options.sequence >= shape[0] || shape[1] == 0) {
    throw UsageError("run: --sequence: the input has no sequence " +
                     std::to_string(options.sequence) + " with tokens to draw");
  }
  const auto length = static_cast<double>(shape[1]);
  require_memory("run: --weights: a picture of so many tokens",
                 2 * 4 * length * length * static_cast<double>(model.num_heads));
}

struct Report {
  const RunOptions& options;
  const ModelDescription& model;
  const AttentionLayer& layer;
  int threads;
  Isa isa;
  Dims shape;
  std::int64_t tokens;
  const LayerResult& result;
  Summary summary;
};

void print_report(const Report& report) {
  const RunOptions& options = report.options;
  std::printf("layer %lld of %s (%s): %s in %s, %lld heads, %lld KV heads\n",
              static_cast<long long>(options.layer), options.model.c_str(),
              report.model.family.c_str(), std::string(report.layer.type_name()).c_str(),
              name_of(report.layer.dtype()), static_cast<long long>(report.layer.num_heads()),
              static_cast<long long>(report.layer.num_kv_heads()));
  std::printf(
      "%s %s, %s\n%s, %s tokens/s on %d %s, %s kernels\n",
      options.input == "-" ? "standard input" : options.input.c_str(),
      report.shape.to_string().c_str(),
      options.cached ? ("cached, " + format_count(options.chunk) + " at a time").c_str() : "whole",
      format_time(report.result.seconds).c_str(),
      format_rate(static_cast<double>(report.tokens) / report.result.seconds).c_str(),
      report.threads, report.threads == 1 ? "thread" : "threads", name_of(report.isa));
  if (options.cached) {
    std::printf("the cache holds %s\n", format_bytes(report.result.cache_bytes).c_str());
  }
  std::printf("output from %.4g to %.4g, mean %.4g", report.summary.least, report.summary.most,
              report.summary.mean);
  if (report.summary.not_finite != 0) {
    std::printf("; %s elements are NaN or infinite",
                format_count(report.summary.not_finite).c_str());
  }
  std::printf("\nwrote %s\n", shown_output(options.output).c_str());
  if (!options.weights.empty()) std::printf("wrote %s\n", shown_output(options.weights).c_str());
}

Json document_of(const Report& report) {
  const RunOptions& options = report.options;
  Json document = json_document("run");
  document["model"] = options.model;
  document["family"] = report.model.family;
  document["layer"] = options.layer;
  document["layer_type"] = report.layer.type_name();
  document["dtype"] = name_of(report.layer.dtype());
  document["isa"] = name_of(report.isa);
  document["threads"] = report.threads;
  document["input"] = options.input;
  document["shape"] = std::vector<std::int64_t>(report.shape.begin(), report.shape.end());
  document["cached"] = options.cached;
  if (options.cached) {
    document["chunk"] = options.chunk;
    document["cache_bytes"] = report.result.cache_bytes;
  }
  document["seconds"] = report.result.seconds;
  document["output"] = options.output;
  if (!options.weights.empty()) document["weights"] = options.weights;
  document["summary"] = {{"least", report.summary.least},
                         {"most", report.summary.most},
                         {"mean", report.summary.mean},
                         {"not_finite", report.summary.not_finite}};
  return document;
}

/// The picture of one sequence's weights, as a file's bytes.
std::string draw_weights(const Context& context, const AttentionLayer& layer, const Tensor& x,
                         const RunOptions& options, HeatMapText text) {
  const Tensor all = weights_of(context, layer, x.view().select(0, options.sequence));
  Tensor weights(DType::kF32,
                 {static_cast<std::int64_t>(text.heads.size()), all.size(1), all.size(2)});
  for (std::size_t i = 0; i < text.heads.size(); ++i) {
    copy(context, all.view().select(0, text.heads[i]),
         weights.view().select(0, static_cast<std::int64_t>(i)));
  }
  if (is_page(options.weights)) return weights_page(weights, text);
  return draw_heat_map(options.weights, weights, text)->bytes();
}

/// What the picture shows besides the weights; checked before anything is computed. `shape` is
/// [batch, seq, embed].
HeatMapText picture_text(const RunOptions& options, const ModelDescription& model,
                         const LayerOptions& layer, const Dims& shape) {
  HeatMapText text{
      .title =
          "Attention weights, layer " + std::to_string(options.layer) + " (" + model.family + ")",
      .subtitle = std::to_string(shape[1]) + " tokens" +
                  (shape[0] > 1 ? " of sequence " + std::to_string(options.sequence) : ""),
      .causal = is_causal(layer),
      .window = window_of(layer)};
  text.heads = options.heads.empty()
                   ? parse_numbers("0-" + std::to_string(model.num_heads - 1), model.num_heads)
                   : parse_numbers(options.heads, model.num_heads);
  if (options.tokens.empty()) return text;
  text.tokens = read_token_texts("run: --tokens", options.tokens);
  if (std::cmp_not_equal(text.tokens.size(), shape[1])) {
    throw Failure("run: --tokens: " + options.tokens + " has " +
                  std::to_string(text.tokens.size()) + " texts, expected one for each of " +
                  std::to_string(shape[1]) + " tokens");
  }
  if (!is_page(options.weights) && shape[1] > kMostTokenTexts) {
    throw UsageError("run: --tokens: a picture has space for the texts of " +
                     std::to_string(kMostTokenTexts) + " tokens, the input has " +
                     std::to_string(shape[1]) + "; a page (.html) takes any number");
  }
  return text;
}

}  // namespace

int run_layer(const RunOptions& options) {
  if (!options.weights.empty()) {
    check_picture_path("run: --weights", options.weights, /*pages=*/true);
  }
  claim_standard_output("run", {options.output, options.weights}, options.json);
  const std::string output_at = output_path(options.output);
  const std::string weights_at = output_path(options.weights);
  check_writable("run: --output", output_at);
  if (!options.weights.empty()) {
    check_writable("run: --weights", weights_at);
    check_different("run: --weights", weights_at, "--output", output_at);
  }
  const ModelDescription model =
      describe_model(options.model, {.ignored_fields = options.ignored_fields});
  const LayerOptions& layer_is = layer_options(model, options.layer);
  check_options(options, model, layer_is);
  const std::string input_at = input_path("run: --input", options.input);
  check_memory(options, input_at, model, layer_is);

  const Tensor input = read_input(options, input_at, model.embed_dim);
  const bool batched = input.rank() == 3;
  const Dims shape = batched ? input.shape() : Dims{1, input.size(0), input.size(1)};
  HeatMapText text;
  if (!options.weights.empty()) {
    check_picture(options, model, shape);
    text = picture_text(options, model, layer_is, shape);
  }
  const DType dtype = options.dtype.value_or(input.dtype());
  const Context context(options.machinery.context_options());
  const auto layer = load_attention(
      context, options.model, options.layer,
      {.dtype = dtype, .ignored_fields = options.ignored_fields, .rope_context = shape[1]});
  const Tensor x = Tensor::copy_of(context, input.view().reshape(shape), dtype);
  LayerResult result;
  std::string picture;
  {
    Progress progress;
    progress.show("running the layer");
    if (options.cached) {
      CachedRun how{.chunk = options.chunk, .cache_dtype = options.cache_dtype};
      const TimeLeft left;
      how.progress = [&](std::int64_t tokens) {
        const double share = static_cast<double>(tokens) / static_cast<double>(shape[1]);
        progress.show(
            "token " + format_count(tokens) + " of " + format_count(shape[1]) + left.after(share),
            false);
      };
      result = run_cached(context, *layer, x, how);
    } else {
      result = run_whole(context, *layer, x);
    }
    if (!options.weights.empty()) {
      progress.show("drawing the weights");
      picture = draw_weights(context, *layer, x, options, std::move(text));
    }
  }
  const Tensor output =
      Tensor::copy_of(context, result.out.view().reshape(input.shape()), input.dtype());
  {
    // Both or none: what is likely to fail is done before the first of them gets its name.
    const HeldSignals held;
    std::optional<OutputFile> drawn;
    if (!picture.empty()) drawn.emplace("run: --weights", weights_at, picture);
    write_npy(output_at, output);
    if (drawn) drawn->commit();
  }
  const Report report{options,
                      model,
                      *layer,
                      context.num_threads(),
                      context.isa(),
                      input.shape(),
                      shape[0] * shape[1],
                      result,
                      summarise(context, output)};
  if (options.json) {
    print_json(document_of(report));
  } else {
    print_report(report);
  }
  return kExitGood;
}

}  // namespace ladon::cli
