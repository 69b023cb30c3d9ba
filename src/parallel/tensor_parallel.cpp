// TensorParallelAttention: construction, weights, clipping, and what its calls agree on.

#include "parallel/tensor_parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "ladon/optim.h"
#include "layers/layer_weights.h"
#include "parallel/host_messages.h"

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
  if (whole.qk_norm && whole.qk_norm_span != QkNormSpan::kHead) {
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

}  // namespace

TensorParallelAttention::TensorParallelAttention(Communicator& communicator,
                                                 const MultiHeadAttentionOptions& options)
    : communicator_(communicator),
      whole_(multi_head::complete_options(options)),
      own_(slice_options(whole_, communicator.rank(), communicator.size())),
      first_head_(own_.num_heads * communicator.rank()),
      first_kv_head_(whole_.num_kv_heads * communicator.rank() / communicator.size()),
      identity_(std::make_shared<const char>()) {
  const std::int64_t query_width = own_.num_heads * own_.head_dim;
  const std::int64_t kv_width = own_.num_kv_heads * own_.head_dim;
  const std::int64_t out_rows =
      share_of(whole_.embed_dim, communicator.rank(), communicator.size()).length();
  const auto add = [&](const std::string& name, const Dims& shape) -> Parameter& {
    return parameters_.emplace_back(Parameter::zeros_without_gradient(name, own_.dtype, shape));
  };
  const auto add_projection = [&](const std::string& name, std::int64_t out, std::int64_t in,
                                  bool bias) {
    add(name + ".weight", {out, in});
    if (bias) add(name + ".bias", {out});
  };
  parameters_.reserve(11);
  add_projection("q_proj", query_width, own_.embed_dim, own_.query_bias);
  add_projection("k_proj", kv_width, own_.key_dim, own_.key_bias);
  add_projection("v_proj", kv_width, own_.value_input_dim, own_.value_bias);
  add_projection("out_proj", out_rows, whole_.num_heads * whole_.head_dim, own_.out_bias);
  if (own_.qk_norm) {
    for (const char* name : {"q_norm.weight", "k_norm.weight"}) {
      const double unit = 1 - own_.qk_norm_offset;
      fill_weight(add(name, {own_.head_dim}), unit, unit);
    }
  }
  if (own_.sinks) add("sinks", {own_.num_heads});
  if (!own_.alibi_slopes.empty()) {
    alibi_slopes_ = Tensor::from_values(DType::kF64, {own_.num_heads}, own_.alibi_slopes);
  }
  plan_ = std::make_shared<const MultiHeadAttention::Plan>(own_, parameters_);
}

TensorParallelAttention::~TensorParallelAttention() = default;

void TensorParallelAttention::to(const Context& context) {
  Tensor slopes = alibi_slopes_.to(context);
  AttentionLayer::to(context);
  alibi_slopes_ = std::move(slopes);
}

TensorParallelAttention::Slice TensorParallelAttention::slice_of(const Parameter& parameter,
                                                                 int rank) const {
  const std::string_view name = parameter.name;
  const int ranks = communicator_.size();
  const std::int64_t own_rows = parameter.value.size(0);  // the same on all ranks, but for out_proj
  if (name.starts_with("out_proj")) {
    const Share share = share_of(whole_.embed_dim, rank, ranks);
    return {whole_.embed_dim, share.begin, share.length(), rank};
  }
  if (name.starts_with("k_proj") || name.starts_with("v_proj")) {
    const std::int64_t head = whole_.num_kv_heads * rank / ranks;
    const auto replicas = static_cast<int>(std::max<std::int64_t>(1, ranks / whole_.num_kv_heads));
    return {whole_.num_kv_heads * whole_.head_dim, head * whole_.head_dim, own_rows,
            rank / replicas * replicas};
  }
  if (name.starts_with("q_proj") || name == "sinks") {
    return {own_rows * ranks, own_rows * rank, own_rows, rank};
  }
  return {own_rows, 0, own_rows, 0};  // norms
}

void TensorParallelAttention::set_whole_parameter(const Context& context, std::string_view name,
                                                  const ConstTensorView& whole) {
  const Parameter& own = parameter(name);
  const Slice slice = slice_of(own, communicator_.rank());
  Dims expected = own.value.shape();
  expected[0] = slice.whole_rows;
  if (!(whole.shape() == expected)) {
    fail("TensorParallelAttention::set_whole_parameter", name,
         got_shape(whole) + ", expected the whole's " + expected.to_string());
  }
  set_parameter(context, name, whole.slice(0, slice.first, slice.first + slice.rows));
}

void TensorParallelAttention::set_whole_parameters(const Context& context,
                                                   const MultiHeadAttention& whole) {
  for (const Parameter& own : named_parameters()) {
    set_whole_parameter(context, own.name, whole.parameter(own.name).value);
  }
}

Tensor TensorParallelAttention::whole_parameter(const Context& context,
                                                std::string_view name) const {
  const Operation operation("TensorParallelAttention::whole_parameter", context);
  Tensor whole;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        check_device(operation, "layer", device());
        static_cast<void>(parameter(name));
        describe_layer(context, *this, signature);
        signature.add("name", name);
      },
      [&](CollectiveCall& call) {
        const Parameter& own = parameter(name);
        Dims shape = own.value.shape();
        shape[0] = slice_of(own, call.rank()).whole_rows;
        whole = Tensor::uninitialized(own.value.dtype(), shape);
        Tensor mine = Tensor::uninitialized(own.value.dtype(), own.value.shape());
        copy(context, own.value, mine);
        // The first rank that has some rows sends them.
        const Slice sent = slice_of(own, call.rank());
        exchange_bytes(
            call,
            [&](int /*other*/) {
              return sent.first_rank == call.rank() ? host_bytes(std::as_const(mine))
                                                    : std::span<const std::byte>();
            },
            [&](int other) {
              const Slice slice = slice_of(own, other);
              if (slice.first_rank != other) return std::span<std::byte>();
              return host_bytes(whole.view().slice(0, slice.first, slice.first + slice.rows));
            });
      },
      [] {});
  return whole;
}

double TensorParallelAttention::clip_gradients(const Context& context, double max_norm) {
  const Operation operation("TensorParallelAttention::clip_gradients", context);
  double own_norm = 0;
  double norm = 0;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        std::vector<Parameter*> counted;
        for (Parameter& parameter : parameters_) {
          if (slice_of(parameter, communicator_.rank()).first_rank == communicator_.rank()) {
            counted.push_back(&parameter);
          }
        }
        if (!(max_norm > 0)) {
          fail(operation, "max_norm", "got " + text_of(max_norm) + ", expected a positive number");
        }
        constexpr double kNormAlone = std::numeric_limits<double>::infinity();
        own_norm = ladon::clip_gradients(context, counted, kNormAlone);
        describe_layer(context, *this, signature);
        signature.add("max_norm", max_norm);
      },
      [&](CollectiveCall& call) {
        std::vector<double> norms(static_cast<std::size_t>(call.size()));
        gather_bytes(call, std::as_bytes(std::span(&own_norm, 1)), [&](int other) {
          return std::as_writable_bytes(std::span(&norms[static_cast<std::size_t>(other)], 1));
        });
        for (const double part : norms) norm = std::hypot(norm, part);
      },
      [&] {
        if (!std::isfinite(norm) || norm <= max_norm) return;
        for (Parameter& parameter : parameters_) {
          Tensor& gradient = parameter.gradient;
          backend_of(context).scale({gradient.data(), gradient.dtype(), gradient.num_elements()},
                                    max_norm / norm);
        }
      });
  return norm;
}

KvCacheOptions TensorParallelAttention::cache_options(std::int64_t batch,
                                                      std::optional<KvFormat> format) const {
  KvCacheOptions options = AttentionLayer::cache_options(batch, format);
  options.num_kv_heads = own_.num_kv_heads;
  options.num_heads = own_.num_heads;
  return options;
}

ConstTensorView slice_heads(const ConstTensorView& view, const Share& heads) {
  return view.absent() || view.size(1) == 1 ? view : view.slice(1, heads.begin, heads.end);
}

void describe_layer(const Context& context, const TensorParallelAttention& layer,
                    CallSignature& signature) {
  const MultiHeadAttentionOptions& options = layer.options();
  signature.add("isa", name_of(context.isa()));
  signature.add("dtype", name_of(options.dtype));
  signature.add("embed_dim", options.embed_dim);
  signature.add("num_heads", options.num_heads);
  signature.add("num_kv_heads", options.num_kv_heads);
  signature.add("head_dim", options.head_dim);
  signature.add("key_dim", options.key_dim);
  signature.add("value_input_dim", options.value_input_dim);
  signature.add("parameters", static_cast<std::int64_t>(layer.named_parameters().size()));
  signature.add("softcap", options.softcap);
  signature.add("window_left", options.window_left.value_or(-1));
  signature.add("window_right", options.window_right.value_or(-1));
  signature.add("rope", std::int64_t{options.rope.has_value()});
  signature.add("dropout", options.dropout);
  signature.add("training", std::int64_t{layer.is_training()});
}

}  // namespace ladon
