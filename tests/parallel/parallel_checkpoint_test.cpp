// Checkpoints over ranks: every rank gets its slices of a published model's tensors and reads no
// more, files are those of one process, and training goes on from a file as if it had not stopped.
#include "ladon/parallel_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "parallel/layer_support.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/run_case.h"
#include "support/temp_folder.h"

namespace ladon::test {
namespace {

namespace fs = std::filesystem;

/// Runs body(folder) with a folder that all ranks share.
template <class Body>
void in_shared_folder(Communicator& communicator, const Body& body) {
  std::unique_ptr<TempFolder> made;
  Tensor name(DType::kU8, {256});
  if (communicator.rank() == 0) {
    made = std::make_unique<TempFolder>();
    std::strncpy(static_cast<char*>(name.data()), made->path().c_str(), 255);
  }
  Tensor all(DType::kU8, {communicator.size(), 256});
  all_gather(host_context(), communicator, name, all);
  body(fs::path(static_cast<const char*>(std::as_const(all).data())));
  barrier(communicator);
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

struct StoredModel {
  std::string family;
  LayerOptions options;
};

/// Separate weights, fused and transposed ones, fused by KV heads that ranks share or do not, and
/// latent ones.
std::vector<StoredModel> stored_models(int ranks) {
  const MultiHeadAttentionOptions plain{
      .embed_dim = 16 * ranks, .num_heads = 2 * ranks, .head_dim = 8, .causal = true};
  MultiHeadAttentionOptions llama = plain;
  llama.num_kv_heads = ranks;
  llama.rope = RopeOptions{};
  llama.dtype = DType::kBF16;
  MultiHeadAttentionOptions gpt2 = plain;
  gpt2.query_bias = gpt2.key_bias = gpt2.value_bias = gpt2.out_bias = true;
  MultiHeadAttentionOptions falcon = plain;
  falcon.num_kv_heads = ranks;
  MultiHeadAttentionOptions one_kv_head = plain;
  one_kv_head.num_kv_heads = 1;
  const LatentAttentionOptions deepseek{.embed_dim = 29,
                                        .num_heads = 2 * ranks,
                                        .query_rank = 11,
                                        .kv_rank = 14,
                                        .nope_dim = 6,
                                        .rope_dim = 4,
                                        .value_dim = 5,
                                        .causal = true};
  return {{"llama", llama},
          {"gpt2", gpt2},
          {"falcon", falcon},
          {"falcon", one_kv_head},
          {"deepseek_v3", deepseek}};
}

std::unique_ptr<AttentionLayer> whole_layer(const LayerOptions& options) {
  std::unique_ptr<AttentionLayer> layer;
  if (const auto* const latent = std::get_if<LatentAttentionOptions>(&options)) {
    layer = std::make_unique<LatentAttention>(*latent, 7);
  } else {
    layer = std::make_unique<MultiHeadAttention>(std::get<MultiHeadAttentionOptions>(options), 7);
  }
  randomise_vectors(*layer);
  return layer;
}

/// As describe_model() would describe them.
ModelDescription description_of(const StoredModel& stored, const AttentionLayer& layer) {
  ModelDescription model{.family = stored.family, .num_layers = 1};
  if (const auto* const latent = dynamic_cast<const LatentAttention*>(&layer)) {
    model.layers = {latent->options()};
  } else {
    model.layers = {dynamic_cast<const MultiHeadAttention&>(layer).options()};
  }
  return model;
}

TEST(ParallelCheckpoint, RanksLoadTheirSlicesAndWriteTheWhole) {
  for (const int ranks : rank_counts()) {
    for (const StoredModel& stored : stored_models(ranks)) {
      expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
        const Context& context = host_context();
        const std::unique_ptr<AttentionLayer> whole = whole_layer(stored.options);
        in_shared_folder(communicator, [&](const fs::path& folder) {
          const fs::path path = folder / "model.safetensors";
          if (communicator.rank() == 0) {
            const auto tensors = attention_tensors(*whole, stored.family, 0);
            write_safetensors(path, items_of(tensors));
          }
          barrier(communicator);
          const ShardedSafetensors weights = ShardedSafetensors::open(folder);
          const std::unique_ptr<TensorParallelLayer> layer = load_tensor_parallel_attention(
              context, communicator, weights, description_of(stored, *whole), 0);
          EXPECT_FALSE(layer->is_training());
          for (const Parameter& parameter : layer->named_parameters()) {
            const auto slice = layer->slice_of(parameter.name, communicator.rank());
            EXPECT_TRUE(
                same_bits(parameter.value, whole->parameter(parameter.name)
                                               .value.view()
                                               .slice(0, slice.first, slice.first + slice.rows)))
                << stored.family << ", " << parameter.name << ", " << ranks << " ranks";
          }
          write_tensor_parallel_attention(context, folder / "again.safetensors", *layer,
                                          stored.family, 0);
          EXPECT_TRUE(bytes_of(folder / "again.safetensors") == bytes_of(path))
              << stored.family << ", " << ranks << " ranks";
        });
      }));
    }
  }
}

/// Bytes of a file's mapping that this process has touched, and those around them that the kernel
/// has mapped with them.
std::int64_t mapped_bytes(const fs::path& path) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool in_file = false;
  std::int64_t total = 0;
  while (std::getline(maps, line)) {
    const std::size_t name = line.find(" /");
    const bool is_mapping = line.find('-') < line.find(' ') &&
                            line.find(':') != std::string::npos &&
                            line.find("kB") == std::string::npos;
    if (is_mapping) in_file = name != std::string::npos && line.substr(name + 1) == path;
    if (in_file && line.starts_with("Rss:")) total += 1024 * std::stoll(line.substr(4));
  }
  return total;
}

TEST(ParallelCheckpoint, ARankReadsItsOwnSlicesAlone) {
  const int ranks = rank_counts().back();
  if (runs_here(ranks, 0) && runs_here(ranks, ranks - 1)) {
    GTEST_SKIP() << "ranks of one process share the mapping";
  }
  const MultiHeadAttentionOptions options{.embed_dim = 1536,
                                          .num_heads = 12,
                                          .num_kv_heads = 12,
                                          .head_dim = 128,
                                          .key_dim = 1536,
                                          .value_input_dim = 1536,
                                          .causal = true};
  expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
    in_shared_folder(communicator, [&](const fs::path& folder) {
      const fs::path path = fs::canonical(folder) / "model.safetensors";
      if (communicator.rank() == 0) {
        const MultiHeadAttention whole = MultiHeadAttention::zeros(options);
        write_safetensors(path, items_of(attention_tensors(whole, "llama", 0)));
      }
      barrier(communicator);
      const ShardedSafetensors weights = ShardedSafetensors::open(folder);
      const ModelDescription model{.family = "llama", .num_layers = 1, .layers = {options}};
      const auto layer =
          load_tensor_parallel_attention(host_context(), communicator, weights, model, 0);
      const std::int64_t own = 4 * layer->parameter_count();
      const std::int64_t mapped = mapped_bytes(path);
      EXPECT_GE(mapped, own);
      // The kernel maps pages around those that are touched, here up to 1 MiB of them: at both ends
      // of four slices.
      EXPECT_LE(mapped, own + 8 * (std::int64_t{1} << 20));
    });
  }));
}

/// Trains towards zero outputs.
template <class Layer>
void train(const Context& context, Layer& layer, AdamW& optimiser, int steps) {
  const Tensor x = normal(layer.dtype(), {1, 9, layer.embed_dim()}, 1);
  for (int step = 0; step < steps; ++step) {
    layer.zero_grad(context);
    const TrainingForward forward = layer.forward_training(context, {.query = x});
    layer.backward(context, forward.out, forward.saved);
    optimiser.step(context);
  }
}

void expect_same_weights(const AttentionLayer& a, const AttentionLayer& b,
                         const std::string& what) {
  for (const Parameter& parameter : a.named_parameters()) {
    EXPECT_TRUE(same_bits(parameter.value, b.parameter(parameter.name).value))
        << parameter.name << ", " << what;
  }
}

template <class Whole, class Layer, class Options>
void expect_training_goes_on(int ranks, const Options& options) {
  const Whole whole(options, 3);
  const std::string what = std::to_string(ranks) + " ranks";
  expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
    const Context context(ContextOptions{.num_threads = 1});
    constexpr AdamWOptions kAdamW{.learning_rate = 0.003};
    in_shared_folder(communicator, [&](const fs::path& folder) {
      const fs::path path = folder / "step4.safetensors";
      Layer unbroken(communicator, options);
      unbroken.set_whole_parameters(context, whole);
      AdamW optimiser(context, unbroken.parameters(), kAdamW);
      train(context, unbroken, optimiser, 4);
      save_training(context, path, unbroken, optimiser);
      train(context, unbroken, optimiser, 5);

      Layer resumed(communicator, options);
      AdamW resumed_optimiser(context, resumed.parameters(), kAdamW);
      load_training(context, path, resumed, resumed_optimiser);
      EXPECT_EQ(resumed_optimiser.steps_taken(), 4);
      // One process reads the same file, and writes it again.
      Whole alone = Whole::zeros(options);
      AdamW alone_optimiser(context, alone.parameters(), kAdamW);
      load_training(context, path, alone, alone_optimiser);
      for (const Parameter& parameter : alone.named_parameters()) {
        EXPECT_TRUE(same_bits(parameter.value, resumed.whole_parameter(context, parameter.name)))
            << parameter.name << ", " << what;
      }
      if (communicator.rank() == 0) {
        save_training(context, folder / "alone.safetensors", alone, alone_optimiser);
        EXPECT_TRUE(bytes_of(folder / "alone.safetensors") == bytes_of(path)) << what;
      }
      train(context, resumed, resumed_optimiser, 5);
      expect_same_weights(resumed, unbroken, what);
    });
  }));
}

TEST(ParallelCheckpoint, TrainingGoesOnFromAFile) {
  for (const int ranks : rank_counts()) {
    expect_training_goes_on<MultiHeadAttention, TensorParallelAttention>(
        ranks, MultiHeadAttentionOptions{.embed_dim = 29,
                                         .num_heads = 2 * ranks,
                                         .num_kv_heads = 1,
                                         .head_dim = 8,
                                         .query_bias = true,
                                         .causal = true,
                                         .qk_norm = true,
                                         .dtype = DType::kBF16});
    expect_training_goes_on<LatentAttention, TensorParallelLatentAttention>(
        ranks, LatentAttentionOptions{.embed_dim = 29,
                                      .num_heads = 2 * ranks,
                                      .query_rank = 11,
                                      .kv_rank = 14,
                                      .nope_dim = 6,
                                      .rope_dim = 4,
                                      .causal = true});
  }
}

TEST(ParallelCheckpoint, WhatFailsOnOneRankFailsOnAll) {
  expect_all_return(run_ranks(2, [](Communicator& communicator) {
    const Context& context = host_context();
    const MultiHeadAttentionOptions options{.embed_dim = 8, .num_heads = 2};
    TensorParallelAttention layer(communicator, options);
    AdamW optimiser(context, layer.parameters(), {});
    in_shared_folder(communicator, [&](const fs::path& folder) {
      const bool is_first = communicator.rank() == 0;
      const auto code = [&](ErrorCode of_first) {
        return is_first ? of_first : ErrorCode::kCommunication;
      };
      // Rank 0 cannot open its file; nor write all of it.
      const std::string unopened =
          error_of([&] { save_training(context, folder / "nowhere" / "file", layer, optimiser); },
                   code(ErrorCode::kIo));
      EXPECT_NE(unopened.find("save_training"), std::string::npos) << unopened;
      error_of([&] { save_training(context, "/dev/full", layer, optimiser); },
               code(ErrorCode::kIo));
      EXPECT_EQ(communicator.broken(), "");
      // Rank 1 reads another file.
      const fs::path path = folder / "training.safetensors";
      save_training(context, path, layer, optimiser);
      layer.set_parameter(context, "q_proj.weight", normal(DType::kF32, {4, 8}, 1));
      const Tensor before = Tensor::copy_of(context, layer.parameter("q_proj.weight").value);
      const fs::path other = is_first ? path : folder / "missing.safetensors";
      error_of([&] { load_training(context, other, layer, optimiser); },
               is_first ? ErrorCode::kCommunication : ErrorCode::kIo);
      EXPECT_TRUE(same_bits(layer.parameter("q_proj.weight").value, before));
      load_training(context, path, layer, optimiser);
      EXPECT_FALSE(same_bits(layer.parameter("q_proj.weight").value, before));

      AdamW of_others(context, {&layer.parameter("q_proj.weight")}, {});
      EXPECT_EQ(error_of([&] { save_training(context, path, layer, of_others); }),
                "save_training: optimiser: got one for other parameters, expected that of the "
                "layer's, in their order");
      TensorParallelAttention wider(communicator, {.embed_dim = 10, .num_heads = 2});
      AdamW of_wider(context, wider.parameters(), {});
      EXPECT_EQ(error_of([&] { load_training(context, path, wider, of_wider); }, ErrorCode::kIo),
                "load_training: " + path.string() +
                    ": tensor \"q_proj.weight\": got f32 [8, 8], expected f32 [10, 10]");
      EXPECT_EQ(error_of([&] {
                  write_tensor_parallel_attention(context, path, layer, "deepseek_v3", 0);
                }),
                "attention_tensors: layer: got multi-head attention, expected latent attention in "
                "family deepseek_v3");
    });
  }));
}

}  // namespace
}  // namespace ladon::test
