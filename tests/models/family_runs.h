// The ways to run a loaded layer over a whole input, and what must come out.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ladon/attention_layer.h"
#include "models/model_folder.h"

namespace ladon::test {

/// The CPU, one thread.
const Context& test_context();
/// On the fastest kernels and on the devices, one thread each.
const std::vector<Context>& test_contexts();

/// Ways to run a layer over a whole input of the host's; all must give the same, on the host.
struct WayToRun {
  std::string name;
  std::function<Tensor(const AttentionLayer& layer, const Tensor& x)> call;
};
/// Those that the layer, which is on the Context's device, allows: only a causal one can be run in
/// chunks. The Context must outlive them.
std::vector<WayToRun> runs(const Context& context, const AttentionLayer& loaded);

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
