// Between the parameters of layers and matrices in f64 on the host.
#pragma once

#include <string>
#include <string_view>

#include "convert/eigen.h"
#include "ladon/attention_layer.h"
#include "ladon/context.h"
#include "ladon/tensor_view.h"

namespace ladon::convert {

TensorView view_of(RealMatrix& matrix);
ConstTensorView view_of(const RealMatrix& matrix);

/// A copy of any float view of rank 1 (a column) or 2.
RealMatrix to_matrix(const Context& host, const ConstTensorView& view);

/// A parameter, from wherever the layer is.
RealMatrix read_parameter(const Context& host, const AttentionLayer& layer, std::string_view name);
/// Throws Error where a weight of the layer is not finite: nothing can be said of what it becomes.
void require_finite(std::string_view operation, const Context& host, const AttentionLayer& layer);
/// [W | b] of a projection, so that W x + b is one product with [x; 1]. Zeros where it has no bias.
RealMatrix read_affine(const Context& host, const AttentionLayer& layer, const std::string& name);

/// The other way, into a layer on the host. The column of a bias that the layer does not have must
/// be 0.
void write_parameter(const Context& host, AttentionLayer& layer, std::string_view name,
                     const RealMatrix& matrix);
void write_affine(const Context& host, AttentionLayer& layer, const std::string& name,
                  const RealMatrix& matrix);
/// Copies a parameter that both layers have.
void copy_parameter(const Context& host, const AttentionLayer& from, AttentionLayer& to,
                    std::string_view name);

/// a b and a b^T, by the library's own kernels, which are faster than Eigen compiled for any
/// x86-64.
RealMatrix times(const Context& host, const RealMatrix& a, const RealMatrix& b);
RealMatrix times_transposed(const Context& host, const RealMatrix& a, const RealMatrix& b);

/// a C a^T, symmetric; an empty C stands for the identity.
RealMatrix second_moment(const Context& host, const RealMatrix& a, const RealMatrix& moments);

}  // namespace ladon::convert
