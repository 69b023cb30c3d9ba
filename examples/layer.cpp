// A layer in ten lines: the attention of Llama-3-8B, run on a few tokens.
#include <ladon/ladon.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

int run() {
  // 32 query heads share 8 KV heads. bf16 as the model's checkpoint; f32 is the default.
  const ladon::MultiHeadAttention layer({.embed_dim = 4096,
                                         .num_heads = 32,
                                         .num_kv_heads = 8,
                                         .head_dim = 128,
                                         .causal = true,
                                         .rope = ladon::RopeOptions{.base = 500000},
                                         .dtype = ladon::DType::kBF16},
                                        /*seed=*/1);
  ladon::Tensor x(layer.dtype(), {1, 6, layer.embed_dim()});  // [batch, seq, embed_dim]
  const ladon::Context context;                               // all CPUs, the fastest kernels
  ladon::fill_normal(context, x, 0, 1, /*seed=*/2);

  const ladon::Tensor out = layer.forward(context, x);

  for (const ladon::Parameter& parameter : layer.named_parameters()) {
    std::printf("%-16s %s\n", parameter.name.c_str(), parameter.value.shape().to_string().c_str());
  }
  std::printf("%lld parameters in %s\n", static_cast<long long>(layer.parameter_count()),
              ladon::name_of(layer.dtype()));
  std::printf("%s -> %s\n", x.shape().to_string().c_str(), out.shape().to_string().c_str());

  // 4096 x 4096 for queries and for the output, 1024 x 4096 for keys and for values.
  bool good = layer.is_gqa() && layer.parameter_count() == 41943040 && out.shape() == x.shape();
  const ladon::bfloat16* y = out.data_as<ladon::bfloat16>();
  for (std::int64_t i = 0; i < out.num_elements(); ++i) good = good && std::isfinite(float(y[i]));
  return good ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "layer: %s\n", error.what());
    return 1;
  }
}
