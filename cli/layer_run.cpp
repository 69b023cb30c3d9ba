#include "layer_run.h"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <variant>

#include "ladon/kv_cache.h"
#include "ladon/latent_attention.h"

namespace ladon::cli {
namespace {

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

bool is_causal(const LayerOptions& layer) {
  return std::visit([](const auto& options) { return options.causal; }, layer);
}

std::int64_t window_of(const LayerOptions& layer) {
  const auto* const heads = std::get_if<MultiHeadAttentionOptions>(&layer);
  return heads != nullptr && heads->window_left ? *heads->window_left + 1 : 0;
}

double parameter_elements(const LayerOptions& layer) {
  return std::visit(
      [](const auto& options) {
        using Options = std::decay_t<decltype(options)>;
        const auto embed = static_cast<double>(options.embed_dim);
        const auto heads = static_cast<double>(options.num_heads);
        if constexpr (std::is_same_v<Options, LatentAttentionOptions>) {
          const auto rank = static_cast<double>(options.query_rank);
          const auto query = heads * static_cast<double>(options.nope_dim + options.rope_dim);
          const auto value =
              static_cast<double>(options.value_dim == 0 ? options.nope_dim : options.value_dim);
          const auto nope = static_cast<double>(options.nope_dim);
          return (rank == 0 ? embed * query : rank * (embed + query)) +
                 embed * static_cast<double>(options.kv_rank + options.rope_dim) +
                 static_cast<double>(options.kv_rank) * heads * (nope + value) +
                 embed * heads * value;
        } else {
          const auto dim = static_cast<double>(options.head_dim);
          const auto kv_heads = static_cast<double>(
              options.num_kv_heads == 0 ? options.num_heads : options.num_kv_heads);
          return 2 * embed * dim * (heads + kv_heads);
        }
      },
      layer);
}

LayerResult run_whole(const Context& context, const AttentionLayer& layer, const Tensor& x) {
  const Stopwatch watch;
  LayerResult result{.out = layer.forward(context, x)};
  result.seconds = watch.seconds();
  return result;
}

LayerResult run_cached(const Context& context, const AttentionLayer& layer, const Tensor& x,
                       const CachedRun& how) {
  const std::int64_t length = x.size(1);
  KvCache cache = KvCache::contiguous(context, layer.cache_options(x.size(0), how.cache_dtype),
                                      std::max<std::int64_t>(1, length));
  LayerResult result{.out = Tensor(x.dtype(), x.shape())};
  const Stopwatch watch;
  for (std::int64_t begin = 0; begin < length; begin += how.chunk) {
    const std::int64_t end = std::min(length, begin + how.chunk);
    layer.forward(context, x.view().slice(1, begin, end), cache, {},
                  result.out.view().slice(1, begin, end));
    if (how.progress) how.progress(end);
  }
  result.seconds = watch.seconds();
  result.cache_bytes = cache.bytes_used();
  return result;
}

Tensor weights_of(const Context& context, const AttentionLayer& layer, const ConstTensorView& x) {
  const std::int64_t length = x.size(0);
  Tensor weights(DType::kF32, {1, layer.num_heads(), length, length});
  const ConstTensorView batch_of_one = x.reshape({1, length, x.size(1)});
  layer.forward(context, batch_of_one, {.weights = weights});
  return Tensor::copy_of(context, weights.view().select(0, 0));
}

}  // namespace ladon::cli
