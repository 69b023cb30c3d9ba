// What a conversion knows of a layer: its projections as [W | b], and the second moments of the
// queries, keys and values that they give.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "convert/eigen.h"
#include "ladon/convert.h"

namespace ladon::convert {

/// The moments of [x; 1], a mean over tokens. Empty, which stands for the identity, without a
/// calibration. Throws Error where its width is not the layer's, or it has seen nothing.
RealMatrix input_moments(std::string_view operation, const Context& host,
                         const Calibration* calibration, std::int64_t width);

/// Throws Error (kUnsupported) where keys or values have a separate input.
void require_self_attention(std::string_view operation, const MultiHeadAttentionOptions& options);

struct LayerMoments {
  LayerMoments(const Context& host, const MultiHeadAttention& layer, const RealMatrix& inputs);

  RealMatrix query, key, value;           // [W | b]
  RealMatrix key_moments, value_moments;  // over all KV heads
  /// For each KV head, E[q q^T] of its queries before rope, summed over its query heads.
  std::vector<RealMatrix> query_moments{};
};

/// Heads 0, 1, ..., count - 1.
std::vector<std::int64_t> heads_in_order(std::int64_t count);

/// What counts as rounding in the weights of a layer of this dtype.
inline double exact_tolerance(DType dtype) { return dtype == DType::kF64 ? 1e-12 : 1e-6; }

}  // namespace ladon::convert
