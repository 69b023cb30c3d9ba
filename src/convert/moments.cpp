#include "convert/moments.h"

#include <numeric>
#include <string>

#include "convert/calibration_impl.h"
#include "convert/matrices.h"
#include "core/fail.h"

namespace ladon::convert {

RealMatrix input_moments(std::string_view operation, const Context& host,
                         const Calibration* calibration, std::int64_t width) {
  if (calibration == nullptr) return {};
  if (calibration->width() != width) {
    fail(operation, "calibration",
         "got a width of " + std::to_string(calibration->width()) +
             ", expected embed_dim = " + std::to_string(width));
  }
  if (calibration->tokens() == 0) {
    fail(operation, "calibration", "got no tokens, expected some inputs of the layer");
  }
  const Calibration::Impl& sums = calibration->impl();
  RealMatrix moments(width + 1, width + 1);
  moments.topLeftCorner(width, width) = to_matrix(host, sums.products);
  moments.topRightCorner(width, 1) = to_matrix(host, sums.sums);
  moments.bottomLeftCorner(1, width) = moments.topRightCorner(width, 1).transpose();
  moments(width, width) = static_cast<double>(calibration->tokens());
  moments /= static_cast<double>(calibration->tokens());
  return moments;
}

void require_self_attention(std::string_view operation, const MultiHeadAttentionOptions& options) {
  const auto refuse = [&](std::string_view field, std::int64_t width) {
    fail(ErrorCode::kUnsupported, operation, field,
         "got " + std::to_string(width) + ", expected embed_dim = " +
             std::to_string(options.embed_dim) + ": only self-attention is converted");
  };
  if (options.key_dim != options.embed_dim) refuse("key_dim", options.key_dim);
  if (options.value_input_dim != options.embed_dim) {
    refuse("value_input_dim", options.value_input_dim);
  }
}

std::vector<std::int64_t> heads_in_order(std::int64_t count) {
  std::vector<std::int64_t> heads(static_cast<std::size_t>(count));
  std::iota(heads.begin(), heads.end(), std::int64_t{0});
  return heads;
}

LayerMoments::LayerMoments(const Context& host, const MultiHeadAttention& layer,
                           const RealMatrix& inputs)
    : query(read_affine(host, layer, "q_proj")),
      key(read_affine(host, layer, "k_proj")),
      value(read_affine(host, layer, "v_proj")),
      key_moments(second_moment(host, key, inputs)),
      value_moments(second_moment(host, value, inputs)) {
  const std::int64_t dim = layer.head_dim();
  const std::int64_t group = layer.num_heads() / layer.num_kv_heads();
  const RealMatrix weighted = inputs.size() == 0 ? query : times_transposed(host, query, inputs);
  for (std::int64_t head = 0; head < layer.num_heads(); ++head) {
    if (head % group == 0) query_moments.push_back(RealMatrix::Zero(dim, dim));
    const RealMatrix moment = times_transposed(host, weighted.middleRows(head * dim, dim),
                                               query.middleRows(head * dim, dim));
    query_moments.back() += 0.5 * (moment + moment.transpose());
  }
}

}  // namespace ladon::convert
