// Layers out of every family's folder against plain attention, whole and cached, in f64 and f32;
// the way back into the family's names; and multi-head layers spoilt one setting at a time (latent
// ones are in latent_families_test.cpp).
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "models/family_runs.h"
#include "models/model_folder.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

class Families : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<AttentionLayer> load(int index, std::optional<DType> dtype = {}) const {
    return load_attention(host_context(), temp_.path(), index,
                          {.dtype = dtype, .rope_context = setup_.rope_context});
  }

  FamilyCase setup_ = family_case(GetParam());
  TempFolder temp_;
};

TEST_P(Families, AgreeWithPlainAttention) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    write_model(temp_.path(), setup_, dtype);
    const Tensor x = input_of(setup_);
    const Tensor converted = Tensor::copy_of(host_context(), x, dtype);
    for (int index = 0; index < setup_.num_layers; ++index) {
      const auto layer = load(index);
      EXPECT_EQ(layer->dtype(), dtype);
      EXPECT_FALSE(layer->is_training());
      const std::vector<double> expected = plain_output(setup_, index, x);
      for (const Context& context : test_contexts()) {
        layer->to(context);
        for (const WayToRun& run : runs(context, *layer)) {
          SCOPED_TRACE(run.name + ", layer " + std::to_string(index) + ", " + name_of(dtype) +
                       " on " + context.device().to_string());
          const Difference off = difference(run.call(*layer, converted), expected);
          EXPECT_GT(off.scale, 0.1);
          EXPECT_LE(off.largest, dtype == DType::kF64 ? 1e-10 : 1e-5 * off.scale);
        }
      }
    }
  }
}

TEST_P(Families, InShardsAndInOtherDTypes) {
  write_model(temp_.path(), setup_, DType::kF64, /*sharded=*/true);
  const Tensor x = input_of(setup_);
  const int last = setup_.num_layers - 1;
  const std::vector<double> expected = plain_output(setup_, last, x);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const auto layer = load(last, dtype);
    EXPECT_EQ(layer->dtype(), dtype);
    const Tensor converted = Tensor::copy_of(host_context(), x, dtype);
    for (const Context& context : test_contexts()) {
      layer->to(context);
      const Tensor out = layer->forward(context, converted.to(context)).to_host();
      const Difference off = difference(out, expected);
      // Weights, inputs and results are rounded, and errors add up over a few dozen products.
      EXPECT_LE(off.largest, 100 * epsilon_of(dtype) * off.scale)
          << name_of(dtype) << " on " << context.device().to_string();
    }
  }
}

TEST_P(Families, ComeBackUnderTheirNames) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    write_model(temp_.path(), setup_, dtype);
    for (int index = 0; index < setup_.num_layers; ++index) {
      const auto layer = load(index);
      const std::vector<NamedTensor> saved = attention_tensors(*layer, setup_.family, index);
      const auto names = layer_names(setup_, index);
      ASSERT_EQ(saved.size(), names.size());
      for (const auto& [in_file, expected_name] : names) {
        const auto found = std::find_if(
            saved.begin(), saved.end(),
            [&, name = expected_name](const NamedTensor& each) { return each.name == name; });
        ASSERT_NE(found, saved.end()) << expected_name;
        const Tensor& original = setup_.tensors.at(in_file);
        EXPECT_EQ(found->value.shape(), original.shape()) << in_file;
        EXPECT_EQ(bytes_of(found->value),
                  bytes_of(Tensor::copy_of(host_context(), original, dtype)))
            << in_file;
      }
      // Elsewhere: a folder with that layer alone.
      const TempFolder other;
      write_bytes(other / "config.json", setup_.config);
      write_safetensors(other / "model.safetensors", items_of(saved));
      const auto again = load_attention(host_context(), other.path(), index);
      for (const Parameter& parameter : layer->named_parameters()) {
        EXPECT_EQ(bytes_of(parameter.value), bytes_of(again->parameter(parameter.name).value))
            << parameter.name;
      }
    }
  }
}

// ---- spoilt layers ---------------------------------------------------------------------------

using Options = MultiHeadAttentionOptions;

/// A layer with these options and the weights of another.
MultiHeadAttention remade(const MultiHeadAttention& layer, const Options& options) {
  MultiHeadAttention fresh(options);
  for (Parameter& parameter : fresh.named_parameters()) {
    parameter.value = Tensor::copy_of(host_context(), layer.parameter(parameter.name).value);
  }
  fresh.eval();
  return fresh;
}

/// Rows of two heads exchanged, in a projection's weight and bias.
void swap_heads(MultiHeadAttention& layer, const std::string& projection, std::int64_t a,
                std::int64_t b) {
  for (const std::string kind : {".weight", ".bias"}) {
    if (!layer.has_parameter(projection + kind)) continue;
    Tensor& value = layer.parameter(projection + kind).value;
    const std::int64_t d = layer.head_dim();
    const Tensor kept = Tensor::copy_of(host_context(), value.view().slice(0, a * d, (a + 1) * d));
    copy(host_context(), Tensor::copy_of(host_context(), value.view().slice(0, b * d, (b + 1) * d)),
         value.view().slice(0, a * d, (a + 1) * d));
    copy(host_context(), kept, value.view().slice(0, b * d, (b + 1) * d));
  }
}

/// Changes a layer as a mistake in loading would; false where there is nothing to change.
struct Mutation {
  std::string name;
  std::function<bool(MultiHeadAttention& layer)> spoil;
};

Mutation of_options(const std::string& name, const std::function<bool(Options&)>& change) {
  return {name, [=](MultiHeadAttention& layer) {
            Options options = layer.options();
            if (!change(options)) return false;
            layer = remade(layer, options);
            return true;
          }};
}

Mutation of_weights(const std::string& parameter) {
  return {"no " + parameter, [=](MultiHeadAttention& layer) {
            if (!layer.has_parameter(parameter)) return false;
            Tensor& value = layer.parameter(parameter).value;
            value = Tensor(value.dtype(), value.shape());
            return true;
          }};
}

std::vector<Mutation> mutations() {
  return {
      of_options("another layout of rope",
                 [](Options& o) {
                   if (!o.rope) return false;
                   const bool half = o.rope->layout == RopeLayout::kHalfSplit;
                   o.rope->layout = half ? RopeLayout::kInterleaved : RopeLayout::kHalfSplit;
                   return true;
                 }),
      of_options("all of a head rotated",
                 [](Options& o) {
                   const bool part = o.rope && o.rope->rotary_dim != 0 &&
                                     o.rope->scaling.kind == RopeScaling::kNone;
                   if (part) o.rope->rotary_dim = 0;
                   return part;
                 }),
      of_options("the other factors of longrope",
                 [](Options& o) {
                   if (!o.rope || o.rope->scaling.kind != RopeScaling::kLongRope) return false;
                   std::swap(o.rope->scaling.short_factors, o.rope->scaling.long_factors);
                   return true;
                 }),
      of_options("no offset of the norms",
                 [](Options& o) { return std::exchange(o.qk_norm_offset, 0) != 0; }),
      of_options("another base",
                 [](Options& o) {
                   if (o.rope) o.rope->base *= 3;
                   return o.rope.has_value();
                 }),
      of_options("no scaling of rope",
                 [](Options& o) {
                   // Up to its first context, dynamic scaling changes nothing.
                   const bool scaled = o.rope && o.rope->scaling.kind != RopeScaling::kNone &&
                                       (o.rope->scaling.kind != RopeScaling::kDynamic ||
                                        o.rope->scaling.context != 0);
                   if (scaled) o.rope->scaling = {};
                   return scaled;
                 }),
      of_options("truncated YaRN",
                 [](Options& o) {
                   const bool exact = o.rope && o.rope->scaling.kind == RopeScaling::kYarn &&
                                      !o.rope->scaling.truncate;
                   if (exact) o.rope->scaling.truncate = true;
                   return exact;
                 }),
      of_options("no rope",
                 [](Options& o) { return std::exchange(o.rope, std::nullopt).has_value(); }),
      of_options("no norm", [](Options& o) { return std::exchange(o.qk_norm, false); }),
      of_options("an RMS norm instead of a layer norm",
                 [](Options& o) { return std::exchange(o.qk_norm_centered, false); }),
      of_options("another epsilon",
                 [](Options& o) {
                   o.qk_norm_epsilon = 1e-6;
                   return o.qk_norm;
                 }),
      of_options("another scale",
                 [](Options& o) {
                   o.scale = 1.3 * o.scale.value_or(1 / std::sqrt(double(o.head_dim)));
                   return true;
                 }),
      of_options("the usual scale",
                 [](Options& o) {
                   const double usual = 1 / std::sqrt(double(o.head_dim));
                   return std::exchange(o.scale, std::nullopt).value_or(usual) != usual;
                 }),
      of_options("no window",
                 [](Options& o) { return std::exchange(o.window_left, std::nullopt).has_value(); }),
      of_options("a window one wider",
                 [](Options& o) {
                   if (o.window_left) ++*o.window_left;
                   return o.window_left.has_value();
                 }),
      of_options("no softcap", [](Options& o) { return std::exchange(o.softcap, 0) != 0; }),
      of_options("slopes in another order",
                 [](Options& o) {
                   std::reverse(o.alibi_slopes.begin(), o.alibi_slopes.end());
                   return !o.alibi_slopes.empty();
                 }),
      of_options("slopes of another size",
                 [](Options& o) {
                   for (double& slope : o.alibi_slopes) slope *= 2;
                   return !o.alibi_slopes.empty();
                 }),
      of_options("no sinks", [](Options& o) { return std::exchange(o.sinks, false); }),
      of_options("other causality",
                 [](Options& o) {
                   o.causal = !o.causal;
                   return true;
                 }),
      {"query heads in another order",
       [](MultiHeadAttention& layer) {
         swap_heads(layer, "q_proj", 0, layer.num_heads() - 1);
         return true;
       }},
      {"key heads in another order",
       [](MultiHeadAttention& layer) {
         if (layer.num_kv_heads() == 1) return false;
         swap_heads(layer, "k_proj", 0, layer.num_kv_heads() - 1);
         return true;
       }},
      {"value heads in another order",
       [](MultiHeadAttention& layer) {
         if (layer.num_kv_heads() == 1) return false;
         swap_heads(layer, "v_proj", 0, layer.num_kv_heads() - 1);
         return true;
       }},
      {"keys for values",
       [](MultiHeadAttention& layer) {
         std::swap(layer.parameter("k_proj.weight").value, layer.parameter("v_proj.weight").value);
         return true;
       }},
      of_weights("q_proj.bias"),
      of_weights("v_proj.bias"),
      of_weights("out_proj.bias"),
  };
}

class MultiHeadFamilies : public Families {};

TEST_P(MultiHeadFamilies, SpoiltLayersDoNotAgree) {
  write_model(temp_.path(), setup_, DType::kF64);
  const Tensor x = input_of(setup_);
  int spoilt = 0;
  for (int index = 0; index < setup_.num_layers; ++index) {
    const auto loaded = load(index);
    const std::vector<double> expected = plain_output(setup_, index, x);
    for (const Mutation& mutation : mutations()) {
      MultiHeadAttention layer = dynamic_cast<const MultiHeadAttention&>(*loaded);
      if (!mutation.spoil(layer)) continue;
      ++spoilt;
      const Difference off = difference(layer.forward(test_context(), x.view()), expected);
      EXPECT_GT(off.largest, 1e-3 * off.scale)
          << mutation.name << ", layer " << index << ": the tolerance is 1e-10";
    }
  }
  EXPECT_GT(spoilt, 5 * setup_.num_layers);
}

INSTANTIATE_TEST_SUITE_P(, Families, testing::ValuesIn(case_names()),
                         [](const auto& param) { return param.param; });
INSTANTIATE_TEST_SUITE_P(, MultiHeadFamilies, testing::ValuesIn(case_names(/*latent=*/false)),
                         [](const auto& param) { return param.param; });

TEST(FamilyCases, CoverEveryFamily) {
  for (const std::string& family : model_families()) {
    bool covered = false;
    for (const FamilyCase& setup : family_cases()) covered = covered || setup.family == family;
    EXPECT_TRUE(covered) << family;
  }
}

}  // namespace
}  // namespace ladon::test
