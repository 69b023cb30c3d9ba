// Reads the ONNX operator suite of ../shared/conformance: a JSON list of cases, and a safetensors
// file with their inputs and expected outputs.
//
// Test-only and on purpose independent of the library's own checkpoint reader, so that a fault
// there cannot hide a fault in a kernel.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ladon/tensor.h"

namespace ladon::conformance {

/// One node of the suite. Tensors are found by slot name ("Q", "attn_mask", ...); a slot that the
/// node leaves out has no entry.
struct OnnxCase {
  std::string name;
  std::string op;
  std::int64_t opset = 0;
  std::map<std::string, double> attributes;
  std::map<std::string, Tensor> inputs;
  /// int64 inputs (nonpad_kv_seqlen, position_ids) in row-major order; Tensor has no integer dtype.
  std::map<std::string, std::vector<std::int64_t>> integer_inputs;
  std::map<std::string, Tensor> expected;

  std::optional<double> attribute(const std::string& attribute_name) const;
  /// An attribute that is a whole number; throws when the node does not carry it.
  std::int64_t integer_attribute(const std::string& attribute_name) const;
  /// Whether a switch (is_causal, interleaved) is on; off is the default of all of them.
  bool flag(const std::string& attribute_name) const;

  /// An absent view where the node leaves the slot out.
  ConstTensorView input(const std::string& slot) const;
  bool wants(const std::string& output_slot) const { return expected.contains(output_slot); }
};

/// LADON_CONFORMANCE_DIR if that is set, else ../shared/conformance next to the project.
std::filesystem::path conformance_dir();

/// The two files of the suite in `dir`.
std::filesystem::path onnx_cases_path(const std::filesystem::path& dir);
std::filesystem::path onnx_tensors_path(const std::filesystem::path& dir);

/// Every case in the file's order. Throws std::runtime_error when a file is not what it should be.
std::vector<OnnxCase> read_onnx_suite(const std::filesystem::path& dir);

}  // namespace ladon::conformance
