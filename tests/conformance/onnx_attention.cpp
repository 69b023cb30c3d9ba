#include "conformance/onnx_attention.h"

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ladon/attention.h"
#include "ladon/rope.h"
#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::conformance {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// ONNX's [batch, seq, heads * dim] or [batch, heads, seq, dim] as Ladon's [batch, seq, heads,
/// dim], over the same memory.
template <class View>
View as_heads(const View& tensor, std::int64_t num_heads) {
  if (tensor.rank() == 4) return tensor.transpose(1, 2);
  return tensor.reshape(
      Dims{tensor.size(0), tensor.size(1), num_heads, tensor.size(2) / num_heads});
}

/// The node's number of heads: an attribute for 3-D inputs, a dimension for 4-D ones.
std::int64_t num_heads_of(const OnnxCase& onnx_case, const ConstTensorView& tensor,
                          const std::string& attribute_name) {
  if (tensor.rank() == 4) return tensor.size(1);
  return onnx_case.integer_attribute(attribute_name);
}

/// The operator's present_key or present_value, [batch, num_kv_heads, past + new, dim]: the past,
/// then the new tokens (given in Ladon's layout).
Tensor concatenate(const ConstTensorView& past, const ConstTensorView& current) {
  const std::int64_t past_len = past.absent() ? 0 : past.size(2);
  const std::int64_t total_len = past_len + current.size(1);
  Tensor present =
      filled(current.dtype(), {current.size(0), current.size(2), total_len, current.size(3)}, kNan);
  if (!past.absent()) copy(test::host_context(), past, present.view().slice(2, 0, past_len));
  copy(test::host_context(), current.transpose(1, 2), present.view().slice(2, past_len, total_len));
  return present;
}

/// A mask of fewer dimensions gets leading ones (NumPy's rule, so rank 3 is [heads, query, key]).
ConstTensorView as_rank_4(const ConstTensorView& mask) {
  if (mask.rank() > 4) throw std::runtime_error("attn_mask has more than four dimensions");
  Dims shape{1, 1, 1, 1};
  Dims strides{0, 0, 0, 0};
  const int missing = 4 - mask.rank();
  for (int dim = 0; dim < mask.rank(); ++dim) {
    shape[missing + dim] = mask.size(dim);
    strides[missing + dim] = mask.stride(dim);
  }
  return {mask.data(), mask.dtype(), shape, strides};
}

/// attn_mask may stop before the last key; keys past its end are masked. The reference pads even a
/// mask of width 1, so a mask is never broadcast along the keys.
Tensor pad_keys(const ConstTensorView& mask, std::int64_t kv_len) {
  Dims shape = mask.shape();
  shape[3] = kv_len;
  Tensor padded = filled(mask.dtype(), shape, mask.dtype() == DType::kBool ? 0 : -kInfinity);
  copy(test::host_context(), mask, padded.view().slice(3, 0, mask.size(3)));
  return padded;
}

/// Query i stands at past_len + i, or where nonpad_kv_seqlen is given at its sequence's length -
/// query_len + i, which is Ladon's bottom-right corner.
void set_causal(std::int64_t query_len, std::int64_t kv_len, std::int64_t past_len,
                AttentionOptions& options) {
  const bool ends_together = past_len + query_len == kv_len;
  if (!options.kv_lengths.empty() || ends_together) {
    options.causal = true;
    options.alignment = Alignment::kBottomRight;
  } else if (past_len == 0) {
    options.causal = true;
    options.alignment = Alignment::kTopLeft;
  } else {
    // More new keys than queries after a past: neither corner. Counted from the top left, seeing
    // no key past past_len + i is a window that reaches past_len to the right.
    options.alignment = Alignment::kTopLeft;
    options.window_right = past_len;
  }
}

/// qk_matmul_output_mode as the operator's text of ONNX 1.23 has it. Earlier references exchange
/// modes 1 and 2; the vectors follow the newer one.
ScoreStage stage_of_mode(std::int64_t mode) {
  switch (mode) {
    case 0: return ScoreStage::kScaled;
    case 1: return ScoreStage::kSoftcapped;
    case 2: return ScoreStage::kMasked;
    case 3: return ScoreStage::kProbability;
    default: throw std::runtime_error("unknown qk_matmul_output_mode");
  }
}

OnnxOutputs run_attention(const Context& context, const OnnxCase& onnx_case) {
  const ConstTensorView onnx_q = onnx_case.input("Q");
  const ConstTensorView onnx_k = onnx_case.input("K");
  const ConstTensorView onnx_v = onnx_case.input("V");
  const std::int64_t num_heads = num_heads_of(onnx_case, onnx_q, "q_num_heads");
  const std::int64_t num_kv_heads = num_heads_of(onnx_case, onnx_k, "kv_num_heads");
  const ConstTensorView q = as_heads(onnx_q, num_heads);
  ConstTensorView k = as_heads(onnx_k, num_kv_heads);
  ConstTensorView v = as_heads(onnx_v, num_kv_heads);

  OnnxOutputs outputs;
  const ConstTensorView past_key = onnx_case.input("past_key");
  const ConstTensorView past_value = onnx_case.input("past_value");
  const std::int64_t past_len = past_key.absent() ? 0 : past_key.size(2);
  if (!past_key.absent() || onnx_case.wants("present_key")) {
    k = outputs.emplace("present_key", concatenate(past_key, k)).first->second.view();
    k = k.transpose(1, 2);
  }
  if (!past_value.absent() || onnx_case.wants("present_value")) {
    v = outputs.emplace("present_value", concatenate(past_value, v)).first->second.view();
    v = v.transpose(1, 2);
  }
  const std::int64_t query_len = q.size(1);
  const std::int64_t kv_len = k.size(1);

  // softmax_precision is not mapped: Ladon's softmax is never below f32.
  AttentionOptions options;
  options.scale = onnx_case.attribute("scale");
  options.softcap = onnx_case.attribute("softcap").value_or(0);
  const auto lengths = onnx_case.integer_inputs.find("nonpad_kv_seqlen");
  if (lengths != onnx_case.integer_inputs.end()) options.kv_lengths = lengths->second;
  if (onnx_case.flag("is_causal")) set_causal(query_len, kv_len, past_len, options);

  Tensor padded_mask;
  if (const ConstTensorView attn_mask = onnx_case.input("attn_mask"); !attn_mask.absent()) {
    ConstTensorView mask = as_rank_4(attn_mask);
    if (mask.size(3) < kv_len) {
      padded_mask = pad_keys(mask, kv_len);
      mask = padded_mask;
    }
    (mask.dtype() == DType::kBool ? options.mask : options.bias) = mask;
  }

  // Outputs start as NaN, so that an element that is never written shows.
  Dims y_shape = onnx_q.shape();
  y_shape[onnx_q.rank() - 1] = onnx_q.rank() == 4 ? v.size(3) : num_heads * v.size(3);
  Tensor y = filled(q.dtype(), y_shape, kNan);
  test::host_attention(context, q, k, v, options, as_heads(y.view(), num_heads));
  outputs.emplace("Y", std::move(y));

  if (onnx_case.wants("qk_matmul_output")) {
    const double mode = onnx_case.attribute("qk_matmul_output_mode").value_or(0);
    Tensor weights = filled(q.dtype(), {q.size(0), num_heads, query_len, kv_len}, kNan);
    test::host_attention_weights(context, q, k, options, weights,
                                 stage_of_mode(static_cast<std::int64_t>(mode)));
    outputs.emplace("qk_matmul_output", std::move(weights));
  }
  return outputs;
}

OnnxOutputs run_rotary_embedding(const Context& context, const OnnxCase& onnx_case) {
  const ConstTensorView input = onnx_case.input("input");
  const std::int64_t num_heads = num_heads_of(onnx_case, input, "num_heads");

  RopeOptions options;
  options.layout =
      onnx_case.flag("interleaved") ? RopeLayout::kInterleaved : RopeLayout::kHalfSplit;
  const double rotary_dim = onnx_case.attribute("rotary_embedding_dim").value_or(0);
  options.rotary_dim = static_cast<std::int64_t>(rotary_dim);

  // Without position_ids the caches are 3-D, one row a token, and the positions stay unset.
  RopePositions positions;
  const auto position_ids = onnx_case.integer_inputs.find("position_ids");
  if (position_ids != onnx_case.integer_inputs.end()) {
    positions.explicit_positions = position_ids->second;
  }
  const RopeTable table{.cos = onnx_case.input("cos_cache"), .sin = onnx_case.input("sin_cache")};

  Tensor output = filled(input.dtype(), input.shape(), kNan);
  test::host_rope(context, as_heads(input, num_heads), options, table, positions,
                  as_heads(output.view(), num_heads));
  OnnxOutputs outputs;
  outputs.emplace("output", std::move(output));
  return outputs;
}

}  // namespace

Tensor filled(DType dtype, const Dims& shape, double value) {
  const Tensor one = Tensor::from_values(dtype, {1}, {value});
  Dims strides = shape;
  for (int dim = 0; dim < shape.rank(); ++dim) strides[dim] = 0;
  Tensor result = Tensor::uninitialized(dtype, shape);
  copy(test::host_context(), ConstTensorView(one.data(), dtype, shape, strides), result);
  return result;
}

OnnxOutputs run_onnx_case(const Context& context, const OnnxCase& onnx_case) {
  if (onnx_case.op == "Attention") return run_attention(context, onnx_case);
  if (onnx_case.op == "RotaryEmbedding") return run_rotary_embedding(context, onnx_case);
  throw std::runtime_error("unknown op " + onnx_case.op);
}

}  // namespace ladon::conformance
