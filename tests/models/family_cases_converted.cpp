// Folders as conversions write them: latent layers of several sizes, with explicit frequencies.
#include <utility>

#include "models/family_case_parts.h"
#include "models/plain_latent.h"

namespace ladon::test {

std::vector<FamilyCase> converted_cases() {
  constexpr int kEmbed = 20;
  constexpr int kHeads = 3;
  constexpr int kValue = 5;
  struct Layer {
    int kv_rank, nope;
    std::vector<double> frequencies;
    double magnitude, scale;
  };
  const std::vector<Layer> layers = {{10, 6, {0.9, 0.05, 0.4, 0.2}, 1.5, 0.3},
                                     {7, 3, {1.5, 0.25, 0.75}, 1.25, 0.5}};
  FamilyCase setup;
  setup.name = setup.family = "ladon_latent";
  setup.latent = true;
  setup.config = R"({"model_type":"ladon_latent","ladon_source_family":"llama","hidden_size":20,
    "num_attention_heads":3,"num_key_value_heads":1,"num_hidden_layers":2,"rope_theta":500.0,
    "ladon_latent":{"kv_ranks":[10,7],"nope_dims":[6,3],"value_dim":5,
    "frequencies":[[0.9,0.05,0.4,0.2],[1.5,0.25,0.75]],"magnitudes":[1.5,1.25],
    "scales":[0.3,0.5],"query_bias":true,"kv_bias":true,"out_bias":true,"causal":true}})";
  setup.num_layers = 2;
  setup.embed_dim = kEmbed;
  setup.prefix_in_file = setup.prefix_saved = "model.layers.%.self_attn.";
  TensorMaker maker(12);
  for (int n = 0; n < setup.num_layers; ++n) {
    const Layer& layer = layers[static_cast<std::size_t>(n)];
    const int rope = 2 * static_cast<int>(layer.frequencies.size());
    const auto add = [&](const std::string& proj, int out, int in, bool bias) {
      add_linear(setup.tensors, maker, layer_prefix(setup.prefix_in_file, n) + proj, {out, in}, in,
                 bias ? out : 0);
    };
    add("q_proj", kHeads * (layer.nope + rope), kEmbed, true);
    add("kv_a_proj_with_mqa", layer.kv_rank + rope, kEmbed, true);
    add("kv_b_proj", kHeads * (layer.nope + kValue), layer.kv_rank, false);
    add("o_proj", kEmbed, kHeads * kValue, true);
  }
  setup.plain = [=, names = setup.prefix_in_file](const TensorMap& tensors, int n) {
    const Layer& layer = layers[static_cast<std::size_t>(n)];
    const std::string prefix = layer_prefix(names, n);
    PlainLatent plain;
    plain.num_heads = kHeads;
    plain.kv_rank = layer.kv_rank;
    plain.nope = layer.nope;
    plain.rope = 2 * static_cast<int>(layer.frequencies.size());
    plain.value = kValue;
    plain.embed = kEmbed;
    plain.query_up = linear_of(tensors, prefix + "q_proj");
    plain.latent = linear_of(tensors, prefix + "kv_a_proj_with_mqa");
    plain.expanded = linear_of(tensors, prefix + "kv_b_proj");
    plain.out = linear_of(tensors, prefix + "o_proj");
    plain.scale = layer.scale;
    plain.frequencies = layer.frequencies;
    plain.rope_magnitude = layer.magnitude;
    return PlainRun([plain](const Rows& x) { return plain.run(x); });
  };
  std::vector<FamilyCase> cases;
  cases.push_back(std::move(setup));
  return cases;
}

}  // namespace ladon::test
