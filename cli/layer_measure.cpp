#include "layer_measure.h"

#include <algorithm>
#include <vector>

#include "compare_tensors.h"
#include "ladon/kv_cache.h"
#include "ladon/random.h"
#include "pinning.h"
#include "timing.h"

namespace ladon::cli {
namespace {

constexpr std::int64_t kCheckedTokens = 4;   // at the beginning of the prompt
constexpr std::int64_t kFilledAtOnce = 256;  // tokens that fill a cache
constexpr double kReadBufferBytes = 256 << 20;

bench::TimingLimits limits_of(const CompareOptions& options) {
  if (options.quick) return {.min_seconds = 0.02, .min_rounds = 2, .max_seconds = 1};
  return {.min_seconds = 1, .min_rounds = 5, .max_seconds = 8};
}

double bytes_of(DType dtype) { return static_cast<double>(size_of(dtype)); }

double largest_allowed(DType dtype) {
  // As in the self-test: f32 sums, and three roundings of 16-bit numbers on the way.
  const bool wide = dtype == DType::kF64;
  const double unit = epsilon_of(wide ? DType::kF64 : DType::kF32);
  const double rounding = wide || dtype == DType::kF32 ? 0 : epsilon_of(dtype);
  return 64 * unit + 0.75 * 3 * rounding;
}

/// One layer with its cache and inputs.
class LayerBench {
 public:
  LayerBench(const Context& context, const LayerSize& size, const LayerVariant& variant,
             const CompareOptions& options)
      : context_(context),
        reference_([&] {
          ContextOptions reference = options.machinery.context_options();
          reference.isa = Isa::kReference;
          return reference;
        }()),
        size_(size),
        options_(options),
        layer_(make_layer(size, variant, options.dtype)),
        cache_(KvCache::contiguous(layer_->cache_options(options.batch),
                                   std::max(options.prompt, options.context) + 1)),
        prompt_(options.dtype, {options.batch, options.prompt, size.embed_dim}),
        token_(options.dtype, {options.batch, 1, size.embed_dim}),
        prompt_out_(options.dtype, prompt_.shape()),
        token_out_(options.dtype, token_.shape()) {
    fill_normal(prompt_, 0, 1, /*seed=*/2);
    fill_normal(token_, 0, 1, /*seed=*/3);
  }

  void run_prompt() {
    cache_.reset();
    layer_->forward(context_, prompt_, cache_, {}, prompt_out_);
  }

  /// One more token for each sequence, which is then forgotten.
  void run_token() {
    layer_->forward(context_, token_, cache_, {}, token_out_);
    truncate(options_.context);
  }

  /// The cache as long as the context, with random keys and values.
  void fill_cache() {
    cache_.reset();
    const KvCacheOptions& holds = cache_.options();
    const std::int64_t block = std::min(kFilledAtOnce, options_.context);
    Tensor k(DType::kF32, {options_.batch, block, holds.num_kv_heads, holds.head_dim});
    Tensor v;
    fill_normal(k, 0, 1, /*seed=*/4);
    if (!holds.values_in_keys) {
      v = Tensor(DType::kF32, {options_.batch, block, holds.num_kv_heads, holds.value_dim});
      fill_normal(v, 0, 1, /*seed=*/5);
    }
    for (std::int64_t begin = 0; begin < options_.context; begin += block) {
      const std::int64_t count = std::min(block, options_.context - begin);
      cache_.append(k.view().slice(1, 0, count),
                    holds.values_in_keys ? ConstTensorView() : v.view().slice(1, 0, count));
    }
  }

  /// The first rows of the prompt, computed apart, and its last one, over the kernels' own cache.
  double prompt_error() {
    run_prompt();
    const std::int64_t first = std::min(kCheckedTokens, options_.prompt);
    const Tensor beginning = Tensor::copy_of(prompt_.view().slice(1, 0, first));
    const Tensor truth = layer_->forward(reference_, beginning);
    const double first_error = largest_error(prompt_out_.view().slice(1, 0, first), truth);
    truncate(options_.prompt - 1);
    const Tensor last =
        Tensor::copy_of(prompt_.view().slice(1, options_.prompt - 1, options_.prompt));
    const Tensor last_truth = layer_->forward(reference_, last, cache_);
    const double last_error = largest_error(
        prompt_out_.view().slice(1, options_.prompt - 1, options_.prompt), last_truth);
    return std::max(first_error, last_error);
  }

  double token_error() {
    run_token();
    const Tensor truth = layer_->forward(reference_, token_, cache_);
    truncate(options_.context);
    return largest_error(token_out_, truth);
  }

  double prompt_flops() const {
    return static_cast<double>(options_.batch) *
           layer_flops(size_, *layer_, options_.prompt, options_.prompt);
  }
  double token_flops() const {
    return static_cast<double>(options_.batch) *
           layer_flops(size_, *layer_, 1, options_.context + 1);
  }
  /// All weights, and the cache.
  double token_bytes() const {
    return weight_bytes() + cache_bytes_per_token() * static_cast<double>(options_.batch) *
                                static_cast<double>(options_.context);
  }
  double weight_count() const { return static_cast<double>(layer_->parameter_count()); }
  double weight_bytes() const { return weight_count() * bytes_of(options_.dtype); }
  /// While the cache holds something.
  double cache_bytes_per_token() const {
    return static_cast<double>(cache_.bytes_used()) /
           static_cast<double>(options_.batch * options_.context);
  }
  double reduction() const { return cache_.reduction(); }

 private:
  void truncate(std::int64_t length) {
    for (std::int64_t b = 0; b < options_.batch; ++b) cache_.truncate(b, length);
  }

  const Context& context_;
  Context reference_;
  const LayerSize& size_;
  const CompareOptions& options_;
  std::unique_ptr<AttentionLayer> layer_;
  KvCache cache_;
  Tensor prompt_, token_, prompt_out_, token_out_;
};

}  // namespace

double memory_to_measure(const LayerSize& size, const CompareOptions& options) {
  const double number = bytes_of(options.dtype);
  const double gradient = options.dtype == DType::kF64 ? 8 : 4;
  const auto batch = static_cast<double>(options.batch);
  const auto prompt = static_cast<double>(options.prompt);
  const double tokens = static_cast<double>(std::max(options.prompt, options.context)) + 1;
  double most = 0;
  for (const LayerVariant& variant : layer_variants(size)) {
    const double layer = weight_elements(size, variant) * (number + gradient);
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
  LayerBench one(context, size, variant, options);
  LayerMeasurement result{.variant = variant, .details = describe(size, variant)};
  result.weights = one.weight_count();
  result.allowed = largest_allowed(options.dtype);

  say(kind + ": checking the prompt");
  result.error = one.prompt_error();
  const bench::Work fma = bench::fma_ceiling(context, options.dtype);
  const bench::Work read = buffer.read_ceiling(context);
  const auto tokens = static_cast<double>(options.batch);
  {
    say(kind + ": timing the prompt");
    const bench::PinnedThreads pinned(context);
    const auto timed = bench::time_in_turns({{[&] { one.run_prompt(); }, one.prompt_flops()}, fma},
                                            limits_of(options));
    const double per_token = one.prompt_flops() / (tokens * static_cast<double>(options.prompt));
    result.fma_gflops = timed.pieces[1].rate / 1e9;
    result.prefill = {.tokens_per_second = timed.pieces[0].rate / per_token,
                      .ceiling = timed.pieces[1].rate / per_token,
                      .bound = "FMA",
                      .disturbed = timed.disturbed};
  }
  say(kind + ": checking a token");
  one.fill_cache();
  result.cache_bytes_per_token = one.cache_bytes_per_token();
  result.reduction = one.reduction();
  result.error = std::max(result.error, one.token_error());
  {
    say(kind + ": timing tokens");
    const bench::PinnedThreads pinned(context);
    const auto timed =
        bench::time_in_turns({{[&] { one.run_token(); }, tokens}, read, fma}, limits_of(options));
    const double read_seconds = one.token_bytes() / timed.pieces[1].rate;
    const double fma_seconds = one.token_flops() / timed.pieces[2].rate;
    result.read_gbps = timed.pieces[1].rate / 1e9;
    result.decode = {.tokens_per_second = timed.pieces[0].rate,
                     .ceiling = tokens / std::max(read_seconds, fma_seconds),
                     .bound = read_seconds >= fma_seconds ? "memory" : "FMA",
                     .disturbed = timed.disturbed};
  }
  return result;
}

}  // namespace ladon::cli
