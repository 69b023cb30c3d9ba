// Small model folders, made by the tests: a config, tensors under the family's own names, and the
// plain attention that they stand for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ladon/tensor.h"
#include "models/plain_attention.h"

namespace ladon::test {

/// Tensors by name, f64, with numbers that f32 can hold.
using TensorMap = std::map<std::string, Tensor>;

/// A layer's attention in plain loops: tokens to results.
using PlainRun = std::function<Rows(const Rows& x)>;

struct FamilyCase {
  std::string name;
  std::string family;
  bool latent = false;
  std::string config;
  int num_layers = 2;
  int embed_dim = 0;
  int rope_context = 0;  // as LoadOptions has it
  /// What the names begin with in this folder, and what attention_tensors() gives.
  std::string prefix_in_file, prefix_saved;
  /// Under a layer's prefix, and no weights of attention.
  std::vector<std::string> other_tensors{};
  TensorMap tensors{};
  std::function<PlainRun(const TensorMap& tensors, int layer)> plain;
};

/// Every family, and every variant of it that changes what is read.
std::vector<FamilyCase> family_cases();
FamilyCase family_case(const std::string& name);

/// The names that a layer of the case's folder has, and those that saving must give, in pairs.
std::vector<std::pair<std::string, std::string>> layer_names(const FamilyCase& setup, int layer);

/// Writes config.json and the tensors, in one file, or in two by an index.
void write_model(const std::filesystem::path& folder, const FamilyCase& setup, DType dtype,
                 bool sharded = false);
/// The tensors alone.
void write_tensors(const std::filesystem::path& folder, const TensorMap& tensors, DType dtype);

/// Draws numbers for the tensors of a case.
class TensorMaker {
 public:
  explicit TensorMaker(std::uint64_t seed) : seed_(seed) {}
  /// `spread` is the standard deviation, `middle` the mean.
  Tensor make(const Dims& shape, double spread, double middle = 0);

 private:
  std::uint64_t seed_;
  std::uint64_t stream_ = 0;
};

/// A weight [out, in] and a bias as a function: row -> number. Either may be seen [in, out].
struct PlainLinear {
  const Tensor* weight;
  const Tensor* bias = nullptr;
  bool transposed = false;

  double operator()(const std::vector<double>& x, int row) const;
};

/// The tensor, which must be there.
const Tensor* tensor_at(const TensorMap& tensors, const std::string& name);
/// The same, or null.
const Tensor* find_tensor(const TensorMap& tensors, const std::string& name);
std::vector<double> numbers_of(const Tensor& tensor);

}  // namespace ladon::test
