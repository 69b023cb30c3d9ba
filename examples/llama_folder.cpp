#include "llama_folder.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using ladon::DType;
using ladon::Tensor;

constexpr std::uint64_t kSeed = 7;
constexpr double kNoise = 0.1;

/// Draws tensors one after the other, each from its own stream.
class Weights {
 public:
  Weights(const ladon::Context& context, DType dtype) : context_(context), dtype_(dtype) {}

  Tensor normal(std::int64_t rows, std::int64_t columns, double deviation) {
    Tensor tensor(DType::kF32, {rows, columns});
    ladon::fill_normal(context_, tensor, 0, deviation, kSeed, stream_++);
    return tensor;
  }
  /// Rows have a norm of about 1, so that inputs of size 1 give outputs of size 1.
  Tensor matrix(std::int64_t rows, std::int64_t columns) {
    return normal(rows, columns, 1 / std::sqrt(static_cast<double>(columns)));
  }
  ladon::Random random() { return ladon::Random(kSeed, stream_++); }

  void add(const std::string& name, const Tensor& tensor) {
    tensors_.push_back({name, Tensor::copy_of(context_, tensor, dtype_)});
  }
  void add_matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    add(name, matrix(rows, columns));
  }
  void add_norm(const std::string& name, std::int64_t size) {
    Tensor tensor(DType::kF32, {size});
    ladon::fill_uniform(context_, tensor, 0.8, 1.2, kSeed, stream_++);
    add(name, tensor);
  }
  const std::vector<ladon::NamedTensor>& tensors() const { return tensors_; }

 private:
  const ladon::Context& context_;
  DType dtype_;
  std::uint64_t stream_ = 0;
  std::vector<ladon::NamedTensor> tensors_;
};

/// y += factor x, over rows of matrices of the same width.
void add_row(Tensor& to, std::int64_t row, double factor, const Tensor& from,
             std::int64_t from_row) {
  const std::int64_t width = to.size(1);
  float* const y = to.data_as<float>() + row * width;
  const float* const x = from.data_as<float>() + from_row * width;
  const auto f = static_cast<float>(factor);
  for (std::int64_t i = 0; i < width; ++i) y[i] += f * x[i];
}

/// Rows [first, first + a.size(0)) of y += a x, from row `from` of x on.
void add_product(Tensor& y, std::int64_t first, const Tensor& a, const Tensor& x,
                 std::int64_t from) {
  for (std::int64_t row = 0; row < a.size(0); ++row) {
    for (std::int64_t n = 0; n < a.size(1); ++n) {
      const auto factor = static_cast<double>(a.data_as<float>()[row * a.size(1) + n]);
      add_row(y, first + row, factor, x, from + n);
    }
  }
}

/// Keys and values as LlamaShape describes them.
std::pair<Tensor, Tensor> planted(Weights& weights, const LlamaShape& shape) {
  const std::int64_t dim = shape.embed_dim / shape.num_heads;
  const std::int64_t pairs = dim / 2;
  const std::int64_t fast = 5 * pairs / 8;
  const std::int64_t rows = shape.num_kv_heads * dim;
  const std::int64_t heads = std::min(shape.planted_heads, shape.num_kv_heads);
  Tensor key(DType::kF32, {rows, shape.embed_dim});
  Tensor value(DType::kF32, {rows, shape.embed_dim});

  const Tensor shared = weights.matrix(2 * fast, shape.embed_dim);
  const Tensor basis = weights.matrix(shape.planted_rank, shape.embed_dim);
  Tensor base_key(DType::kF32, {heads * dim, shape.embed_dim});
  Tensor base_value(DType::kF32, {heads * dim, shape.embed_dim});
  add_product(base_key, 0, weights.matrix(heads * dim, shape.planted_rank), basis, 0);
  add_product(base_value, 0, weights.matrix(heads * dim, shape.planted_rank), basis, 0);

  ladon::Random random = weights.random();
  for (std::int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const std::int64_t base = head % heads * dim;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      // Elements pair and pair + pairs are one complex number.
      const bool is_fast = pair < fast;
      const auto factor =
          std::polar(is_fast ? random.uniform(0.7, 1.3) : 1.0, random.uniform(0, 6.28));
      const Tensor& from = is_fast ? shared : base_key;
      const std::int64_t a = is_fast ? 2 * pair : base + pair;
      const std::int64_t b = is_fast ? a + 1 : a + pairs;
      add_row(key, head * dim + pair, factor.real(), from, a);
      add_row(key, head * dim + pair, -factor.imag(), from, b);
      add_row(key, head * dim + pair + pairs, factor.imag(), from, a);
      add_row(key, head * dim + pair + pairs, factor.real(), from, b);
    }
    add_product(value, head * dim, weights.matrix(dim, dim), base_value, base);
  }
  for (Tensor* const tensor : {&key, &value}) {
    const Tensor noise = weights.matrix(rows, shape.embed_dim);
    for (std::int64_t row = 0; row < rows; ++row) add_row(*tensor, row, kNoise, noise, row);
  }
  return {std::move(key), std::move(value)};
}

void write_config(const std::filesystem::path& path, const LlamaShape& shape) {
  std::ofstream config(path);
  config << nlohmann::json{{"model_type", "llama"},
                           {"architectures", {"LlamaForCausalLM"}},
                           {"hidden_size", shape.embed_dim},
                           {"intermediate_size", shape.hidden},
                           {"num_hidden_layers", shape.layers},
                           {"num_attention_heads", shape.num_heads},
                           {"num_key_value_heads", shape.num_kv_heads},
                           {"vocab_size", shape.vocabulary},
                           {"rms_norm_eps", 1e-5},
                           {"rope_theta", shape.rope_theta},
                           {"hidden_act", "silu"},
                           {"max_position_embeddings", 512},
                           {"tie_word_embeddings", false},
                           {"torch_dtype", shape.dtype == DType::kBF16 ? "bfloat16" : "float32"}}
                .dump(2);
  if (!config.flush()) throw std::runtime_error("could not write config.json");
}

}  // namespace

void make_llama(const ladon::Context& context, const std::filesystem::path& folder,
                const LlamaShape& shape) {
  std::filesystem::create_directories(folder);
  const std::int64_t width = shape.embed_dim;
  const std::int64_t kv_rows = shape.num_kv_heads * (width / shape.num_heads);
  Weights weights(context, shape.dtype);
  weights.add("model.embed_tokens.weight", weights.normal(shape.vocabulary, width, 1));
  weights.add_norm("model.norm.weight", width);
  weights.add_matrix("lm_head.weight", shape.vocabulary, width);
  for (std::int64_t n = 0; n < shape.layers; ++n) {
    const std::string layer = "model.layers." + std::to_string(n) + ".";
    weights.add_norm(layer + "input_layernorm.weight", width);
    weights.add_norm(layer + "post_attention_layernorm.weight", width);
    weights.add_matrix(layer + "self_attn.q_proj.weight", width, width);
    if (shape.planted_rank > 0) {
      const auto [key, value] = planted(weights, shape);
      weights.add(layer + "self_attn.k_proj.weight", key);
      weights.add(layer + "self_attn.v_proj.weight", value);
    } else {
      weights.add_matrix(layer + "self_attn.k_proj.weight", kv_rows, width);
      weights.add_matrix(layer + "self_attn.v_proj.weight", kv_rows, width);
    }
    weights.add_matrix(layer + "self_attn.o_proj.weight", width, width);
    weights.add_matrix(layer + "mlp.gate_proj.weight", shape.hidden, width);
    weights.add_matrix(layer + "mlp.up_proj.weight", shape.hidden, width);
    weights.add_matrix(layer + "mlp.down_proj.weight", width, shape.hidden);
  }
  ladon::write_safetensors(folder / "model.safetensors", ladon::items_of(weights.tensors()),
                           {{"format", "pt"}});
  write_config(folder / "config.json", shape);
}
