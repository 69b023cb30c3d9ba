#include "cached_layer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "compare_tensors.h"
#include "host_cache.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "workload.h"

namespace ladon::bench {
namespace {

constexpr std::int64_t kCheckedTokens = 4;   // at the beginning of the prompt
constexpr std::int64_t kFilledAtOnce = 256;  // tokens that fill a cache

template <class Layer>
std::unique_ptr<AttentionLayer> in_f32(const Context& host, const Layer& layer) {
  auto options = layer.options();
  options.dtype = DType::kF32;
  auto wide = std::make_unique<Layer>(Layer::zeros(options));
  for (const Parameter& parameter : layer.named_parameters()) {
    wide->set_parameter(host, parameter.name, parameter.value);
  }
  return wide;
}

/// The reference's forward pass, which a 16-bit layer runs with the same weights in f32: its
/// results, and what it computes on the way, are then not rounded to 16 bits as the layer's are.
Tensor truth_of(const Context& host, const AttentionLayer& layer, const Tensor& x, KvCache* cache) {
  const auto run = [&](const AttentionLayer& exact, const Tensor& input) {
    return cache == nullptr ? exact.forward(host, input) : exact.forward(host, input, *cache);
  };
  if (layer.dtype() != DType::kF16 && layer.dtype() != DType::kBF16) return run(layer, x);
  const Tensor input = Tensor::copy_of(host, x, DType::kF32);
  if (const auto* latent = dynamic_cast<const LatentAttention*>(&layer)) {
    return run(*in_f32(host, *latent), input);
  }
  return run(*in_f32(host, dynamic_cast<const MultiHeadAttention&>(layer)), input);
}

}  // namespace

double layer_tolerance(DType dtype) {
  // As in the self-test: f32 sums, and three roundings of 16-bit floats on the way.
  const bool wide = dtype == DType::kF64;
  const double unit = epsilon_of(wide ? DType::kF64 : DType::kF32);
  const double rounding = wide || dtype == DType::kF32 ? 0 : epsilon_of(dtype);
  return 64 * unit + 0.75 * 3 * rounding;
}

double layer_flops(const AttentionLayer& layer, std::int64_t query_len, std::int64_t kv_len) {
  double dims = static_cast<double>(layer.head_dim() + layer.value_dim());
  double weights = 0;
  for (const Parameter& parameter : layer.named_parameters()) {
    if (parameter.value.rank() == 2) weights += static_cast<double>(parameter.num_elements());
  }
  if (const auto* latent = dynamic_cast<const LatentAttention*>(&layer)) {
    if (latent->form_for(query_len, kv_len) == LatentForm::kAbsorbed) {
      dims = static_cast<double>(2 * latent->kv_rank() + latent->rope_dim());
    }
  }
  const auto queries = static_cast<double>(query_len);
  // The last query sees all keys, each one before it one less.
  const double pairs = queries * static_cast<double>(kv_len) - queries * (queries - 1) / 2;
  return 2 * weights * queries + 2 * dims * pairs * static_cast<double>(layer.num_heads());
}

CachedLayer::CachedLayer(const Context& context, std::unique_ptr<AttentionLayer> layer,
                         const LayerLengths& lengths)
    : layer_(std::move(layer)),
      lengths_(lengths),
      cache_(KvCache::contiguous(context, layer_->cache_options(lengths.batch),
                                 std::max(lengths.prompt, lengths.context) + 1)),
      prompt_(context, layer_->dtype(), {lengths.batch, lengths.prompt, layer_->embed_dim()}),
      token_(context, layer_->dtype(), {lengths.batch, 1, layer_->embed_dim()}),
      prompt_out_(context, layer_->dtype(), prompt_.shape()),
      token_out_(context, layer_->dtype(), token_.shape()) {
  if (!context.device().is_cpu()) layer_->to(context);
  fill_normal(context, prompt_, 0, 1, /*seed=*/2);
  fill_normal(context, token_, 0, 1, /*seed=*/3);
}

void CachedLayer::run_prompt(const Context& context) {
  cache_.reset();
  layer_->forward(context, prompt_, cache_, {}, prompt_out_);
}

void CachedLayer::run_token(const Context& context) {
  layer_->forward(context, token_, cache_, {}, token_out_);
  truncate(lengths_.context);
}

void CachedLayer::fill_cache(const Context& context) {
  cache_.reset();
  const KvCacheOptions& holds = cache_.options();
  const std::int64_t block = std::min(kFilledAtOnce, lengths_.context);
  Tensor k(context, DType::kF32, {lengths_.batch, block, holds.num_kv_heads, holds.head_dim});
  Tensor v;
  fill_normal(context, k, 0, 1, /*seed=*/4);
  if (!holds.values_in_keys) {
    v = Tensor(context, DType::kF32, {lengths_.batch, block, holds.num_kv_heads, holds.value_dim});
    fill_normal(context, v, 0, 1, /*seed=*/5);
  }
  for (std::int64_t begin = 0; begin < lengths_.context; begin += block) {
    const std::int64_t count = std::min(block, lengths_.context - begin);
    cache_.append(context, k.view().slice(1, 0, count),
                  holds.values_in_keys ? ConstTensorView() : v.view().slice(1, 0, count));
  }
}

/// The layer on the host for a scope, for the reference to run it.
class CachedLayer::OnHost {
 public:
  OnHost(AttentionLayer& layer, const Context& context, const Context& host)
      : layer_(layer), context_(context), moved_(!context.device().is_cpu()) {
    if (moved_) layer_.to(host);
  }
  ~OnHost() {
    if (moved_) layer_.to(context_);
  }
  OnHost(const OnHost&) = delete;
  OnHost& operator=(const OnHost&) = delete;

 private:
  AttentionLayer& layer_;
  const Context& context_;
  bool moved_;
};

Tensor CachedLayer::expected_token(const Context& context, const Context& reference,
                                   const Tensor& x) {
  const OnHost moved(*layer_, context, reference);
  HostCache host(context, cache_);
  return truth_of(reference, *layer_, x, host.copy() == nullptr ? &cache_ : host.copy());
}

double CachedLayer::prompt_error(const Context& context) {
  const Context reference = reference_for(context);
  run_prompt(context);
  const std::int64_t first = std::min(kCheckedTokens, lengths_.prompt);
  const std::int64_t before = lengths_.prompt - 1;
  const auto tokens = [&](const Tensor& tensor, std::int64_t begin, std::int64_t end) {
    return Tensor::copy_of(context, tensor.view().slice(1, begin, end)).to_host();
  };
  Tensor truth;
  {
    const OnHost moved(*layer_, context, reference);
    truth = truth_of(reference, *layer_, tokens(prompt_, 0, first), nullptr);
  }
  const double first_error = largest_error(tokens(prompt_out_, 0, first), truth);
  truncate(before);
  const Tensor last_truth =
      expected_token(context, reference, tokens(prompt_, before, lengths_.prompt));
  return std::max(first_error,
                  largest_error(tokens(prompt_out_, before, lengths_.prompt), last_truth));
}

double CachedLayer::token_error(const Context& context) {
  const Context reference = reference_for(context);
  run_token(context);
  const Tensor truth = expected_token(context, reference, token_.to_host());
  truncate(lengths_.context);
  return largest_error(token_out_.to_host(), truth);
}

double CachedLayer::prompt_flops() const {
  return static_cast<double>(lengths_.batch) *
         layer_flops(*layer_, lengths_.prompt, lengths_.prompt);
}

double CachedLayer::token_flops() const {
  return static_cast<double>(lengths_.batch) * layer_flops(*layer_, 1, lengths_.context + 1);
}

double CachedLayer::weight_bytes() const {
  return weight_count() * static_cast<double>(size_of(layer_->dtype()));
}

double CachedLayer::cache_bytes_per_token() const {
  return static_cast<double>(cache_.bytes_used()) /
         static_cast<double>(lengths_.batch * lengths_.context);
}

void CachedLayer::truncate(std::int64_t length) {
  for (std::int64_t b = 0; b < lengths_.batch; ++b) cache_.truncate(b, length);
}

}  // namespace ladon::bench
