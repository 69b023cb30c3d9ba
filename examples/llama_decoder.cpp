// A whole small decoder of the Llama kind, run from a model folder: embedding, norms, attention
// with a cache, gated MLP, output head, greedy sampling. Attention is Ladon's; the rest is plain
// loops on the host, here to show where the layers go in a real model.
//
//   llama_decoder --make DIR [--layers N ...]   writes a folder with a random model, a small one
//                                               unless options (kShapeOptions) say otherwise
//   llama_decoder DIR [id ...]                  continues a prompt of token ids, greedily
//   llama_decoder --check DIR [id ...]          the same, and compares every step with a run
//                                               without a cache
//   llama_decoder --record INPUTS DIR [id ...]  writes what each attention layer sees, for ladon
//                                               convert --calibrate INPUTS: of these tokens, or of
//                                               random ones, [--sequences N] [--length N]
//
// With --gpu before all of these, the attention layers and their caches are on the first GPU.
#include <ladon/ladon.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "llama_folder.h"

namespace {

using ladon::DType;
using ladon::Tensor;

/// y = x W^T for rows of x; W is [out, in].
Tensor linear(const Tensor& x, const Tensor& weight) {
  const std::int64_t rows = x.size(0);
  const std::int64_t in = weight.size(1);
  const std::int64_t out = weight.size(0);
  Tensor y(DType::kF32, {rows, out});
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = 0; n < out; ++n) {
      const float* a = x.data_as<float>() + r * in;
      const float* w = weight.data_as<float>() + n * in;
      constexpr std::int64_t kLanes = 16;  // sums that a compiler may compute side by side
      float sums[kLanes] = {};
      std::int64_t i = 0;
      for (; i + kLanes <= in; i += kLanes) {
        for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * w[i + lane];
      }
      for (; i < in; ++i) sums[0] += a[i] * w[i];
      y.data_as<float>()[r * out + n] = std::accumulate(sums, sums + kLanes, 0.0F);
    }
  }
  return y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, float epsilon) {
  const std::int64_t dim = weight.size(0);
  Tensor y(DType::kF32, x.shape());
  for (std::int64_t r = 0; r < x.size(0); ++r) {
    const float* from = x.data_as<float>() + r * dim;
    float squares = 0;
    for (std::int64_t i = 0; i < dim; ++i) squares += from[i] * from[i];
    const float factor = 1 / std::sqrt(squares / static_cast<float>(dim) + epsilon);
    for (std::int64_t i = 0; i < dim; ++i) {
      y.data_as<float>()[r * dim + i] = from[i] * factor * weight.data_as<float>()[i];
    }
  }
  return y;
}

void add_to(Tensor& x, const Tensor& more) {
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    x.data_as<float>()[i] += more.data_as<float>()[i];
  }
}

struct DecoderBlock {
  std::unique_ptr<ladon::AttentionLayer> attention;
  Tensor attention_norm, mlp_norm;
  Tensor gate, up, down;

  Tensor mlp(const Tensor& x) const {
    Tensor hidden = linear(x, gate);
    const Tensor factor = linear(x, up);
    for (std::int64_t i = 0; i < hidden.num_elements(); ++i) {
      float& value = hidden.data_as<float>()[i];
      value = value / (1 + std::exp(-value)) * factor.data_as<float>()[i];  // SiLU, gated
    }
    return linear(hidden, down);
  }
};

class Decoder {
 public:
  Decoder(const ladon::Context& context, const std::filesystem::path& folder) {
    // Everything of attention: heads, rope, biases. What else the model has is read here.
    const ladon::ModelDescription model = ladon::describe_model(folder);
    const ladon::ShardedSafetensors weights = ladon::ShardedSafetensors::open(folder);
    std::ifstream config_file(folder / "config.json");
    epsilon_ = nlohmann::json::parse(config_file).value("rms_norm_eps", 1e-6F);
    const auto load = [&](const std::string& name) { return weights.load(name, DType::kF32); };
    embedding_ = load("model.embed_tokens.weight");
    final_norm_ = load("model.norm.weight");
    if (weights.has("lm_head.weight")) head_ = load("lm_head.weight");
    for (std::int64_t i = 0; i < model.num_layers; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      blocks_.push_back(
          {.attention = ladon::load_attention(context, weights, model, i, {.dtype = DType::kF32}),
           .attention_norm = load(prefix + "input_layernorm.weight"),
           .mlp_norm = load(prefix + "post_attention_layernorm.weight"),
           .gate = load(prefix + "mlp.gate_proj.weight"),
           .up = load(prefix + "mlp.up_proj.weight"),
           .down = load(prefix + "mlp.down_proj.weight")});
    }
  }

  std::int64_t vocabulary() const { return embedding_.size(0); }
  std::size_t num_layers() const { return blocks_.size(); }

  /// One cache for each layer.
  std::vector<ladon::KvCache> new_caches(const ladon::Context& context) const {
    std::vector<ladon::KvCache> caches;
    for (const DecoderBlock& block : blocks_) {
      caches.push_back(ladon::KvCache::contiguous(context, block.attention->cache_options()));
    }
    return caches;
  }

  /// Logits of the last of these tokens, which follow those in the caches. With `inputs`, what each
  /// attention layer sees, [tokens, embed], is added to it.
  std::vector<float> forward(const ladon::Context& context, const std::vector<std::int64_t>& tokens,
                             std::vector<ladon::KvCache>& caches,
                             std::vector<Tensor>* inputs = nullptr) const {
    const auto count = static_cast<std::int64_t>(tokens.size());
    Tensor x(DType::kF32, {count, embedding_.size(1)});
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t id = tokens[static_cast<std::size_t>(t)];
      ladon::copy(host_, embedding_.view().select(0, id), x.view().select(0, t));
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const DecoderBlock& block = blocks_[i];
      Tensor normed = rms_norm(x, block.attention_norm, epsilon_);
      add_to(x, block.attention->forward(context, normed.to(context), caches[i]).to_host());
      if (inputs != nullptr) inputs->push_back(std::move(normed));
      add_to(x, block.mlp(rms_norm(x, block.mlp_norm, epsilon_)));
    }
    const Tensor last = Tensor::copy_of(host_, x.view().slice(0, count - 1, count));
    const Tensor logits =
        linear(rms_norm(last, final_norm_, epsilon_), head_.rank() == 0 ? embedding_ : head_);
    return {logits.data_as<float>(), logits.data_as<float>() + logits.num_elements()};
  }

 private:
  ladon::Context host_;
  float epsilon_ = 0;
  Tensor embedding_, final_norm_, head_;  // the head is the embedding where the file has none
  std::vector<DecoderBlock> blocks_;
};

std::int64_t most_likely(const std::vector<float>& logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

void check_tokens(const Decoder& decoder, const std::vector<std::int64_t>& tokens) {
  for (const std::int64_t id : tokens) {
    if (id < 0 || id >= decoder.vocabulary()) {
      throw std::runtime_error("got token " + std::to_string(id) + ", expected one below " +
                               std::to_string(decoder.vocabulary()));
    }
  }
}

/// Writes layer_0.npy, layer_1.npy, ..., [sequences, tokens, embed].
int record(const ladon::Context& context, const std::filesystem::path& target,
           const std::filesystem::path& folder, const std::vector<std::int64_t>& tokens,
           std::int64_t count, std::int64_t length) {
  const Decoder decoder(context, folder);
  check_tokens(decoder, tokens);
  std::vector<std::vector<std::int64_t>> sequences = {tokens};
  if (tokens.empty()) {
    ladon::Random random(/*seed=*/1);
    sequences.assign(static_cast<std::size_t>(count),
                     std::vector<std::int64_t>(static_cast<std::size_t>(length)));
    for (auto& sequence : sequences) {
      for (std::int64_t& id : sequence) id = random.below(decoder.vocabulary());
    }
  }
  const ladon::Context host;
  std::vector<Tensor> inputs;  // all layers of the first sequence, then of the second, ...
  for (const auto& sequence : sequences) {
    std::vector<ladon::KvCache> caches = decoder.new_caches(context);
    decoder.forward(context, sequence, caches, &inputs);
  }
  std::filesystem::create_directories(target);
  for (std::size_t layer = 0; layer < decoder.num_layers(); ++layer) {
    const Tensor& first = inputs[layer];
    Tensor all(DType::kF32,
               {static_cast<std::int64_t>(sequences.size()), first.size(0), first.size(1)});
    for (std::size_t n = 0; n < sequences.size(); ++n) {
      ladon::copy(host, inputs[n * decoder.num_layers() + layer],
                  all.view().select(0, static_cast<std::int64_t>(n)));
    }
    ladon::write_npy(target / ("layer_" + std::to_string(layer) + ".npy"), all);
  }
  return 0;
}

int decode(const ladon::Context& context, const std::filesystem::path& folder,
           std::vector<std::int64_t> tokens, bool check) {
  constexpr int kNewTokens = 16;
  const Decoder decoder(context, folder);
  check_tokens(decoder, tokens);
  std::vector<ladon::KvCache> caches = decoder.new_caches(context);
  std::vector<std::int64_t> next = tokens;  // the prompt at once, then token by token
  double largest = 0;
  for (int step = 0; step < kNewTokens; ++step) {
    const std::vector<float> logits = decoder.forward(context, next, caches);
    if (check) {
      std::vector<ladon::KvCache> fresh = decoder.new_caches(context);
      const std::vector<float> whole = decoder.forward(context, tokens, fresh);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        largest = std::max(largest, static_cast<double>(std::fabs(logits[i] - whole[i])));
      }
    }
    next = {most_likely(logits)};
    tokens.push_back(next.front());
  }
  for (const std::int64_t token : tokens) std::printf("%lld ", static_cast<long long>(token));
  std::printf(
      "\ncache: %lld bytes for %lld tokens and %zu layers\n",
      static_cast<long long>(caches.front().bytes_used()) * static_cast<long long>(caches.size()),
      static_cast<long long>(caches.front().length()), caches.size());
  if (!check) return 0;
  std::printf("largest difference to a run without a cache: %.1e\n", largest);
  return largest < 1e-4 ? 0 : 1;
}

/// Options with a number each, and their defaults.
using Options = std::map<std::string, std::int64_t>;

const Options kShapeOptions = {{"--layers", 2},    {"--width", 64},       {"--heads", 4},
                               {"--kv-heads", 2},  {"--hidden", 160},     {"--vocabulary", 300},
                               {"--theta", 10000}, {"--planted-rank", 0}, {"--planted-heads", 8},
                               {"--bf16", 0}};
const Options kRecordOptions = {{"--sequences", 16}, {"--length", 64}};

std::int64_t number_of(const std::string& text) {
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) {
    throw std::runtime_error("got " + text + ", expected a number, 0 or more");
  }
  return number;
}

/// Takes the options out of the arguments.
Options take_options(std::vector<std::string>& arguments, const Options& known) {
  Options options = known;
  std::vector<std::string> rest;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto option = options.find(arguments[i]);
    if (option == options.end()) {
      rest.push_back(arguments[i]);
    } else if (++i < arguments.size()) {
      option->second = number_of(arguments[i]);
    } else {
      throw std::runtime_error("got " + option->first + " without a number");
    }
  }
  arguments = std::move(rest);
  return options;
}

LlamaShape shape_of(const Options& options) {
  const LlamaShape shape{.layers = options.at("--layers"),
                         .embed_dim = options.at("--width"),
                         .num_heads = options.at("--heads"),
                         .num_kv_heads = options.at("--kv-heads"),
                         .hidden = options.at("--hidden"),
                         .vocabulary = options.at("--vocabulary"),
                         .rope_theta = static_cast<double>(options.at("--theta")),
                         .dtype = options.at("--bf16") != 0 ? DType::kBF16 : DType::kF32,
                         .planted_rank = options.at("--planted-rank"),
                         .planted_heads = options.at("--planted-heads")};
  if (shape.num_kv_heads < 1 || shape.num_heads % shape.num_kv_heads != 0 || shape.num_heads < 1 ||
      shape.embed_dim % (2 * shape.num_heads) != 0) {
    throw std::runtime_error(
        "got sizes that do not divide: --kv-heads must divide --heads, and "
        "twice --heads --width");
  }
  for (const std::int64_t size : {shape.layers, shape.embed_dim, shape.hidden, shape.vocabulary,
                                  shape.planted_heads, options.at("--theta")}) {
    if (size < 1) throw std::runtime_error("got a size of 0, expected 1 or more");
  }
  return shape;
}

int run(std::vector<std::string> arguments) {
  const bool on_gpu = !arguments.empty() && arguments[0] == "--gpu";
  if (on_gpu) arguments.erase(arguments.begin());
  const std::string mode = arguments.empty() ? "" : arguments[0];
  const bool make = mode == "--make";
  const bool check = mode == "--check";
  const bool recording = mode == "--record";
  const Options options = take_options(arguments, make        ? kShapeOptions
                                                  : recording ? kRecordOptions
                                                              : Options());
  const std::size_t folder = recording ? 2 : make || check ? 1 : 0;
  if (arguments.size() <= folder || (make && arguments.size() > folder + 1)) {
    std::fputs(
        "usage: llama_decoder [--gpu] [--make | --check | --record INPUTS] FOLDER [token id ...]\n",
        stderr);
    return 2;
  }
  if (make) {
    make_llama(ladon::Context(), arguments[folder], shape_of(options));
    return 0;
  }
  std::vector<std::int64_t> tokens;
  for (std::size_t i = folder + 1; i < arguments.size(); ++i) {
    tokens.push_back(number_of(arguments[i]));
  }
  ladon::ContextOptions where;
  if (on_gpu) where.device = ladon::Device::kCuda;
  const ladon::Context context(where);
  if (recording) {
    return record(context, arguments[1], arguments[folder], tokens, options.at("--sequences"),
                  options.at("--length"));
  }
  if (tokens.empty()) tokens = {1, 17, 42, 99, 7};
  return decode(context, arguments[folder], tokens, check);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_decoder: %s\n", error.what());
    return 1;
  }
}
