// Writes inputs, and what the C++ library makes of them, as .npy files: the Python tests read both
// and compare the bits. Usage: expected_outputs FOLDER
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <string>

#include "ladon/ladon.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::host_context;

class Folder {
 public:
  explicit Folder(std::filesystem::path path) : path_(std::move(path)) {}

  void write(const std::string& name, const ConstTensorView& view) const {
    write_npy(path_ / (name + ".npy"), view);
  }

  /// Random numbers that Python reads back.
  Tensor input(const std::string& name, DType dtype, const Dims& shape, std::uint64_t seed) const {
    Tensor tensor(dtype, shape);
    fill_normal(host_context(), tensor, 0, 1, seed);
    write(name, tensor);
    return tensor;
  }

 private:
  std::filesystem::path path_;
};

void write_attention(const Context& context, const Folder& folder, DType dtype) {
  const std::string prefix = std::string("attention_") + name_of(dtype) + "_";
  const Tensor q = folder.input(prefix + "q", dtype, {2, 37, 6, 24}, 1);
  const Tensor k = folder.input(prefix + "k", dtype, {2, 53, 2, 24}, 2);
  const Tensor v = folder.input(prefix + "v", dtype, {2, 53, 2, 20}, 3);
  const Tensor bias = folder.input(prefix + "bias", dtype, {1, 6, 37, 53}, 4);
  const Tensor sinks = folder.input(prefix + "sinks", dtype, {6}, 5);
  const Tensor dout = folder.input(prefix + "dout", dtype, {2, 37, 6, 20}, 6);
  const std::int64_t kv_lengths[] = {53, 41};
  const AttentionOptions options{.scale = 0.3,
                                 .causal = true,
                                 .window_left = 20,
                                 .bias = bias,
                                 .kv_lengths = kv_lengths,
                                 .softcap = 5,
                                 .sinks = sinks,
                                 .dropout = {.probability = 0.1, .seed = 9}};
  Tensor out(dtype, {2, 37, 6, 20});
  Tensor lse(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {2, 6, 37});
  attention(context, q, k, v, options, out, lse);
  folder.write(prefix + "out", out);
  folder.write(prefix + "lse", lse);

  Tensor dq(dtype, q.shape());
  Tensor dk(dtype, k.shape());
  Tensor dv(dtype, v.shape());
  Tensor dbias(dtype, bias.shape());
  Tensor dsinks(dtype, sinks.shape());
  attention_backward(context, q, k, v, options, {.out = out, .lse = lse, .dout = dout},
                     {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias, .dsinks = dsinks});
  folder.write(prefix + "dq", dq);
  folder.write(prefix + "dk", dk);
  folder.write(prefix + "dv", dv);
  folder.write(prefix + "dbias", dbias);
  folder.write(prefix + "dsinks", dsinks);

  Tensor weights(dtype, {2, 6, 37, 53});
  attention_weights(context, q, k, options, weights, ScoreStage::kMasked);
  folder.write(prefix + "weights", weights);

  Tensor rotated(dtype, q.shape());
  rope(context, q,
       {.layout = RopeLayout::kInterleaved,
        .rotary_dim = 16,
        .scaling = {.kind = RopeScaling::kYarn, .factor = 4, .original_context = 64}},
       {.first = 11}, rotated);
  folder.write(prefix + "rope", rotated);
}

/// A layer's forward, its training, and its decoding in chunks.
void write_layer(const Context& context, const Folder& folder, const std::string& prefix,
                 AttentionLayer& layer) {
  const Tensor x = folder.input(prefix + "x", layer.dtype(), {2, 19, 48}, 21);
  folder.write(prefix + "out", layer.forward(context, x));
  KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(2));
  folder.write(prefix + "first", layer.forward(context, x.view().slice(1, 0, 12), cache));
  folder.write(prefix + "second", layer.forward(context, x.view().slice(1, 12, 19), cache));
  const TrainingForward training = layer.forward_training(context, {.query = x});
  const InputGradients gradients = layer.backward(context, training.out, training.saved);
  folder.write(prefix + "dx", gradients.query);
  AdamW optimiser(host_context(), layer.parameters(), {.learning_rate = 0.01});
  optimiser.step(host_context());
  for (const Parameter& parameter : layer.named_parameters()) {
    folder.write(prefix + "after_" + parameter.name, parameter.value);
  }
}

void write_all(const Folder& folder) {
  const Context context({.num_threads = 2});
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    write_attention(context, folder, dtype);
    MultiHeadAttention multi_head({.embed_dim = 48,
                                   .num_heads = 6,
                                   .num_kv_heads = 2,
                                   .query_bias = true,
                                   .causal = true,
                                   .rope = RopeOptions{},
                                   .qk_norm = true,
                                   .window_left = 7,
                                   .sinks = true,
                                   .dtype = dtype},
                                  /*seed=*/33);
    write_layer(context, folder, std::string("multi_head_") + name_of(dtype) + "_", multi_head);
    LatentAttention latent({.embed_dim = 48,
                            .num_heads = 4,
                            .query_rank = 24,
                            .kv_rank = 16,
                            .nope_dim = 12,
                            .rope_dim = 8,
                            .causal = true,
                            .dtype = dtype},
                           /*seed=*/44);
    write_layer(context, folder, std::string("latent_") + name_of(dtype) + "_", latent);
  }
}

}  // namespace
}  // namespace ladon

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: expected_outputs FOLDER\n";
    return 2;
  }
  try {
    ladon::write_all(ladon::Folder(argv[1]));
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
