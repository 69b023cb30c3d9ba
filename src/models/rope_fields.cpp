#include "models/rope_fields.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "core/checks.h"
#include "io/file.h"

namespace ladon::models {
namespace {

/// What is next to rope_scaling and rope_parameters, and counts where they say nothing.
struct Outside {
  std::optional<double> base;
  std::optional<double> original_context;
  std::optional<double> context;
};

/// The context before stretching: published files name it inside, outside, or not at all, and then
/// mean the model's own.
double original_context(ConfigFields& fields, const Outside& outside) {
  constexpr std::string_view kName = "original_max_position_embeddings";
  const auto inside = fields.optional_number(kName);
  if (inside) return *inside;
  if (outside.original_context) return *outside.original_context;
  if (outside.context) return *outside.context;
  fields.refuse(kName, "got none, expected a number here or as max_position_embeddings");
}

/// A number where 0 too means the default.
double number_or(ConfigFields& fields, std::string_view name, double otherwise) {
  const double value = fields.number(name, otherwise);
  return value == 0 ? otherwise : value;
}

RopeScalingOptions read_scaling(ConfigFields& fields, const Outside& outside,
                                const std::string& kind) {
  if (kind == "default") return {};
  RopeScalingOptions scaling;
  if (kind == "linear") {
    scaling.kind = RopeScaling::kLinear;
    scaling.factor = fields.number("factor");
  } else if (kind == "llama3") {
    scaling.kind = RopeScaling::kLlama3;
    scaling.factor = fields.number("factor");
    scaling.low_frequency_factor = fields.number("low_freq_factor");
    scaling.high_frequency_factor = fields.number("high_freq_factor");
    scaling.original_context = original_context(fields, outside);
  } else if (kind == "yarn") {
    scaling.kind = RopeScaling::kYarn;
    scaling.factor = fields.number("factor");
    scaling.original_context = original_context(fields, outside);
    scaling.beta_fast = number_or(fields, "beta_fast", 32);
    scaling.beta_slow = number_or(fields, "beta_slow", 1);
    scaling.truncate = fields.flag("truncate", true);
    scaling.attention_factor = fields.optional_number("attention_factor");
    scaling.mscale = fields.number("mscale", 0);
    scaling.mscale_all_dim = fields.number("mscale_all_dim", 0);
  } else {
    fields.refuse(fields.name_in_file("rope_type type"),
                  "got " + io::in_quotes(kind) + ", expected default, linear, llama3 or yarn",
                  ErrorCode::kUnsupported);
  }
  return scaling;
}

/// Turning a part of each head is for families that Ladon does not read yet.
void require_whole_heads(ConfigFields& fields) {
  const double factor = fields.number("partial_rotary_factor", 1);
  if (factor != 1) {
    fields.refuse("partial_rotary_factor",
                  "got " + text_of(factor) + ", expected 1: Ladon does not honour it here",
                  ErrorCode::kUnsupported);
  }
}

RopeOptions read_parameters(ConfigFields& fields, const Outside& outside, double default_base,
                            std::span<const std::string> ignored) {
  RopeOptions rope;
  const auto base = fields.optional_number("rope_theta");
  if (base && outside.base && *base != *outside.base) {
    fields.refuse("rope_theta", "got " + text_of(*base) + ", expected " + text_of(*outside.base) +
                                    " as in the rope_theta beside it");
  }
  rope.base = base.value_or(outside.base.value_or(default_base));
  require_whole_heads(fields);
  rope.scaling =
      read_scaling(fields, outside, fields.optional_text("rope_type type").value_or("default"));
  fields.finish(ignored, /*only_attention=*/false);
  return rope;
}

bool is_layer_type(std::string_view name) {
  constexpr std::array<std::string_view, 2> kTypes = {"full_attention", "sliding_attention"};
  return std::find(kTypes.begin(), kTypes.end(), name) != kTypes.end();
}

}  // namespace

RopeOfType read_rope(ConfigFields& fields, const std::string& path, double default_base,
                     std::span<const std::string> ignored) {
  const Outside outside{
      .base = fields.optional_number("rope_theta"),
      .original_context = fields.optional_number("original_max_position_embeddings"),
      .context = fields.optional_number("max_position_embeddings")};
  require_whole_heads(fields);
  const ConfigValue* const before = fields.optional_value("rope_scaling");
  const ConfigValue* const now = fields.optional_value("rope_parameters");
  if (before != nullptr && now != nullptr) {
    fields.refuse("rope_parameters", "got it beside rope_scaling, expected one of them");
  }
  const ConfigValue* const given = now != nullptr ? now : before;
  if (given == nullptr) {
    return {{"", RopeOptions{.base = outside.base.value_or(default_base)}}};
  }
  const std::string name = now != nullptr ? "rope_parameters" : "rope_scaling";
  if (given->kind != ConfigValue::Kind::kObject) fields.refuse_kind(name, *given, "an object");

  const bool by_type = !given->fields.empty() &&
                       std::all_of(given->fields.begin(), given->fields.end(),
                                   [](const auto& field) { return is_layer_type(field.first); });
  RopeOfType result;
  if (!by_type) {
    ConfigFields inner(path, *given, name);
    result.emplace("", read_parameters(inner, outside, default_base, ignored));
    return result;
  }
  for (const auto& [type, parameters] : given->fields) {
    std::string inside = name;
    inside.append(".").append(type);
    if (parameters.kind != ConfigValue::Kind::kObject) {
      fields.refuse_kind(inside, parameters, "an object");
    }
    ConfigFields inner(path, parameters, std::move(inside));
    result.emplace(type, read_parameters(inner, outside, default_base, ignored));
  }
  return result;
}

}  // namespace ladon::models
