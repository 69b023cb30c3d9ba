// The ways to run a loaded layer over a whole input, and what must come out.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ladon/attention_layer.h"
#include "models/model_folder.h"

namespace ladon::test {

/// One thread.
const Context& test_context();

/// Ways to run a layer over a whole input; all must give the same.
struct WayToRun {
  std::string name;
  std::function<Tensor(const AttentionLayer& layer, const Tensor& x)> call;
};
/// Those that the layer allows: only a causal one can be run in chunks.
std::vector<WayToRun> runs(const AttentionLayer& loaded);

/// Two sequences, [batch, length, embed_dim], f64.
Tensor input_of(const FamilyCase& setup);
/// What plain attention makes of it, in a row.
std::vector<double> plain_output(const FamilyCase& setup, int layer, const Tensor& x);

struct Difference {
  double largest = 0;  // of the differences
  double scale = 0;    // the largest expected number
};
Difference difference(const Tensor& out, const std::vector<double>& expected);

/// The names of the cases: all, or those of one kind of layer.
std::vector<std::string> case_names();
std::vector<std::string> case_names(bool latent);

}  // namespace ladon::test
