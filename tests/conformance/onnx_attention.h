// Runs ONNX's Attention (opset 23 and 24) and RotaryEmbedding (opset 23) nodes on Ladon.
#pragma once

#include <map>
#include <string>

#include "conformance/safetensors_fixture.h"
#include "ladon/context.h"
#include "ladon/tensor.h"

namespace ladon::conformance {

/// Every output that the case lists, by slot name, in ONNX's own shape and layout.
using OnnxOutputs = std::map<std::string, Tensor>;

/// A new tensor with `value` in every element.
Tensor filled(DType dtype, const Dims& shape, double value);

/// Dispatches on the node's op. Throws ladon::Error where Ladon refuses the call, and
/// std::runtime_error for an op or an attribute that this mapping does not know.
OnnxOutputs run_onnx_case(const Context& context, const OnnxCase& onnx_case);

}  // namespace ladon::conformance
