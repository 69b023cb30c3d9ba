// TensorParallelAttention: construction.

#include "parallel/tensor_parallel.h"

#include <algorithm>
#include <string>

#include "core/fail.h"
#include "layers/layer_weights.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "TensorParallelAttention";

MultiHeadAttentionOptions slice_options(const MultiHeadAttentionOptions& whole, int rank,
                                        int ranks) {
  if (whole.num_heads % ranks != 0) {
    fail(kOperation, "num_heads",
         "got " + std::to_string(whole.num_heads) + " for " + std::to_string(ranks) +
             " ranks, expected a multiple of the ranks");
  }
  if (whole.num_kv_heads % ranks != 0 && ranks % whole.num_kv_heads != 0) {
    fail(kOperation, "num_kv_heads",
         "got " + std::to_string(whole.num_kv_heads) + " for " + std::to_string(ranks) +
             " ranks, expected a multiple or a divisor of the ranks");
  }
  if (whole.qk_norm && whole.qk_norm_span == QkNormSpan::kAllHeads) {
    fail(ErrorCode::kUnsupported, kOperation, "qk_norm_span",
         "got a norm over all heads, expected one over each head: ranks have some of the heads");
  }
  MultiHeadAttentionOptions own = whole;
  own.num_heads = whole.num_heads / ranks;
  own.num_kv_heads = std::max<std::int64_t>(1, whole.num_kv_heads / ranks);
  if (!whole.alibi_slopes.empty()) {
    const auto first =
        whole.alibi_slopes.begin() + static_cast<std::ptrdiff_t>(own.num_heads * rank);
    own.alibi_slopes.assign(first, first + static_cast<std::ptrdiff_t>(own.num_heads));
  }
  return own;
}

/// In signatures; what parameters show is left out.
std::string describe_options(const MultiHeadAttentionOptions& options) {
  CallSignature signature;
  signature.add("num_heads", options.num_heads);
  signature.add("num_kv_heads", options.num_kv_heads);
  signature.add("causal", std::int64_t{options.causal});
  signature.add("scale", options.scale.value_or(0));
  signature.add("softcap", options.softcap);
  signature.add("window_left", options.window_left.value_or(-1));
  signature.add("window_right", options.window_right.value_or(-1));
  signature.add("dropout", options.dropout);
  signature.add("qk_norm_epsilon", options.qk_norm_epsilon);
  signature.add("qk_norm_offset", options.qk_norm_offset);
  signature.add("qk_norm_centered", std::int64_t{options.qk_norm_centered});
  signature.add("alibi_slopes", options.alibi_slopes);
  if (options.rope) describe_rope(signature, *options.rope, options.head_dim);
  return signature.text();
}

}  // namespace

TensorParallelAttention::TensorParallelAttention(Communicator& communicator,
                                                 const MultiHeadAttentionOptions& options)
    : TensorParallelLayer(communicator),
      whole_(multi_head::complete_options(options)),
      own_(slice_options(whole_, communicator.rank(), communicator.size())),
      first_head_(own_.num_heads * communicator.rank()),
      first_kv_head_(whole_.num_kv_heads * communicator.rank() / communicator.size()),
      identity_(std::make_shared<const char>()) {
  const std::int64_t ranks = communicator.size();
  const std::int64_t query_width = whole_.num_heads * whole_.head_dim;
  const std::int64_t kv_width = whole_.num_kv_heads * whole_.head_dim;
  const auto add_projection = [&](const std::string& name, std::int64_t out, std::int64_t in,
                                  bool bias, std::int64_t parts) {
    add_parameter(name + ".weight", whole_.dtype, {out, in}, parts);
    if (bias) add_parameter(name + ".bias", whole_.dtype, {out}, parts);
  };
  const std::int64_t kv_parts = std::min(ranks, whole_.num_kv_heads);
  add_projection("q_proj", query_width, whole_.embed_dim, whole_.query_bias, ranks);
  add_projection("k_proj", kv_width, whole_.key_dim, whole_.key_bias, kv_parts);
  add_projection("v_proj", kv_width, whole_.value_input_dim, whole_.value_bias, kv_parts);
  add_projection("out_proj", whole_.embed_dim, query_width, whole_.out_bias, ranks);
  if (whole_.qk_norm) {
    const double unit = 1 - whole_.qk_norm_offset;
    const bool cut = whole_.qk_norm_span == QkNormSpan::kEachHead;
    const auto add_norm = [&](const char* name, std::int64_t heads, std::int64_t parts) {
      const Dims shape = multi_head::norm_shape(whole_, heads);
      fill_weight(add_parameter(name, whole_.dtype, shape, cut ? parts : 1), unit, unit);
    };
    add_norm("q_norm.weight", whole_.num_heads, ranks);
    add_norm("k_norm.weight", whole_.num_kv_heads, kv_parts);
  }
  if (whole_.sinks) add_parameter("sinks", whole_.dtype, {whole_.num_heads}, ranks);
  if (!own_.alibi_slopes.empty()) {
    alibi_slopes_ = Tensor::from_values(DType::kF64, {own_.num_heads}, own_.alibi_slopes);
  }
  plan_ = std::make_shared<const MultiHeadAttention::Plan>(own_, parameters_);
  description_ = describe_options(whole_);
}

TensorParallelAttention::~TensorParallelAttention() = default;

void TensorParallelAttention::to(const Context& context) {
  Tensor slopes = alibi_slopes_.to(context);
  AttentionLayer::to(context);
  alibi_slopes_ = std::move(slopes);
}

multi_head::LayerHeads TensorParallelAttention::own_heads() const {
  return {*this, own_, *plan_, alibi_slopes_, first_head_, whole_.num_heads / whole_.num_kv_heads};
}

KvCacheOptions TensorParallelAttention::cache_options(std::int64_t batch,
                                                      std::optional<KvFormat> format) const {
  KvCacheOptions options = AttentionLayer::cache_options(batch, format);
  options.num_kv_heads = own_.num_kv_heads;
  options.num_heads = own_.num_heads;
  return options;
}

}  // namespace ladon
