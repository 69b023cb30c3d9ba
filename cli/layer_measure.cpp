#include "layer_measure.h"

#include <algorithm>

#include "cached_layer.h"
#include "device_work.h"
#include "pinning.h"
#include "timing.h"

namespace ladon::cli {
namespace {

constexpr double kReadBufferBytes = 1 << 30;  // of a GPU: two to copy between, and products

bench::TimingLimits limits_of(const CompareOptions& options) {
  if (options.quick) return {.min_seconds = 0.02, .min_rounds = 2, .max_seconds = 1};
  return {.min_seconds = 1, .min_rounds = 5, .max_seconds = 8};
}

double bytes_of(DType dtype) { return static_cast<double>(size_of(dtype)); }

}  // namespace

double memory_to_measure(const LayerSize& size, const CompareOptions& options) {
  const double number = bytes_of(options.dtype);
  const auto batch = static_cast<double>(options.batch);
  const auto prompt = static_cast<double>(options.prompt);
  const double tokens = static_cast<double>(std::max(options.prompt, options.context)) + 1;
  double most = 0;
  for (const LayerVariant& variant : layer_variants(size)) {
    const double layer = weight_elements(size, variant) * number;
    const double cache = batch * tokens * cache_elements(size, variant) * number;
    // Inputs, outputs, queries, attended values; expanded keys and values; a step in f32.
    const auto wide = static_cast<double>(size.num_heads * (size.head_dim + size.rope_dim));
    const double activations =
        batch * prompt * (2 * static_cast<double>(size.embed_dim) + 5 * wide) * (number + 4) / 2;
    most = std::max(most, layer + cache + activations);
  }
  return most + kReadBufferBytes;
}

LayerMeasurement measure_layer(const Context& context, const bench::ReadBuffer& buffer,
                               const LayerSize& size, const LayerVariant& variant,
                               const CompareOptions& options,
                               const std::function<void(const std::string&)>& say) {
  const std::string kind(variant.kind);
  say(kind + ": making the layer");
  bench::CachedLayer one(
      context, make_layer(size, variant, options.dtype),
      {.batch = options.batch, .prompt = options.prompt, .context = options.context});
  LayerMeasurement result{.variant = variant, .details = describe(size, variant)};
  result.weights = one.weight_count();
  result.allowed = bench::layer_tolerance(options.dtype);

  say(kind + ": checking the prompt");
  result.error = one.prompt_error(context);
  const bool pairs = options.dtype == DType::kBF16;
  const bench::Limit limit =
      bench::limit_here(context, pairs ? bench::Limit::kAmx : bench::Limit::kFma);
  const bench::Work fma = bench::compute_ceiling(context, limit, options.dtype);
  const bench::Work read = buffer.read_ceiling(context);
  const auto tokens = static_cast<double>(options.batch);
  {
    say(kind + ": timing the prompt");
    const bench::PinnedThreads pinned(context);
    const auto timed =
        bench::time_in_turns({bench::work_on(
                                  context, [&] { one.run_prompt(context); }, one.prompt_flops()),
                              fma},
                             limits_of(options));
    const double per_token = one.prompt_flops() / (tokens * static_cast<double>(options.prompt));
    result.fma_gflops = timed.pieces[1].rate / 1e9;
    result.prefill = {.tokens_per_second = timed.pieces[0].rate / per_token,
                      .ceiling = timed.pieces[1].rate / per_token,
                      .bound = bench::name_of(limit),
                      .disturbed = timed.disturbed};
  }
  say(kind + ": checking a token");
  one.fill_cache(context);
  result.cache_bytes_per_token = one.cache_bytes_per_token();
  result.reduction = one.cache_reduction();
  result.error = std::max(result.error, one.token_error(context));
  {
    say(kind + ": timing tokens");
    const bench::PinnedThreads pinned(context);
    const auto timed = bench::time_in_turns({bench::work_on(
                                                 context, [&] { one.run_token(context); }, tokens),
                                             read, fma},
                                            limits_of(options));
    const double read_seconds = one.token_bytes() / timed.pieces[1].rate;
    const double fma_seconds = one.token_flops() / timed.pieces[2].rate;
    result.read_gbps = timed.pieces[1].rate / 1e9;
    result.decode = {.tokens_per_second = timed.pieces[0].rate,
                     .ceiling = tokens / std::max(read_seconds, fma_seconds),
                     .bound = read_seconds >= fma_seconds ? "memory" : bench::name_of(limit),
                     .disturbed = timed.disturbed};
  }
  return result;
}

}  // namespace ladon::cli
