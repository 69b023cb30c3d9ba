// The model families that Ladon reads, as a table: what their tensors are called, how they are
// arranged, and what the fields of their configs mean. A new family is a row.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/checkpoint.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "models/config_fields.h"
#include "models/rope_fields.h"

namespace ladon::models {

/// How the rows of the three input projections are arranged in the file.
enum class QkvStorage : std::uint8_t {
  kSeparate,      // three tensors
  kConcatenated,  // one: all query heads, all key heads, all value heads
  kGrouped,       // one: for each KV head its query heads, its key, its value
};

enum class BiasRule : std::uint8_t { kNever, kAlways, kByConfig };

enum class KvHeadsRule : std::uint8_t {
  kAllHeads,       // as many as query heads
  kField,          // num_key_value_heads, which must be there
  kOptionalField,  // the same, or as many as query heads
  kMultiQuery,     // one, or as many as query heads where multi_query is false
  kFalcon,         // num_kv_heads with new_decoder_architecture, else as kMultiQuery
};

enum class WindowRule : std::uint8_t {
  kNone,
  kEveryLayer,  // sliding_window, or null for none
  kByType,      // sliding_window in layers that layer_types names; without it in every second layer
  kGemma3,      // the same; without layer_types all but every sixth (sliding_window_pattern)
  kQwen,        // with use_sliding_window, from max_window_layers on or by layer_types
  kQwenEvery,   // with use_sliding_window, every layer
};

/// What a config says of a model's attention, before it is spread over the layers.
struct FamilyOptions {
  MultiHeadAttentionOptions shared{};
  /// Of latent families, instead of `shared`: of all layers, or of each.
  std::vector<LatentAttentionOptions> latent{};
  std::int64_t num_layers = 0;
  std::int64_t window = 0;           // keys that a query sees in windowed layers; 0: no such layers
  std::vector<std::string> types{};  // of each layer; empty: all alike
  RopeOfType rope{};
  bool scale_by_layer = false;  // divided by the layer's number, from 1
};

// In the order in which a row is read; a dozen rows may have gaps.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
struct Family {
  std::string_view model_type;

  /// Layers are LatentAttention: tensors go by the names of its parameters, and of the columns
  /// below only those are read that are marked with *.
  bool latent = false;
  /// * Latent layers whose sizes, ropes and scales are in one object of the config, layer by layer:
  /// what conversions write. Without norms.
  bool converted = false;

  // Tensors: <outer><layer>q_proj.weight, with % in `layer` for the layer's number. Files of a bare
  // model leave `outer` out.
  std::string_view outer{};  // *
  std::string_view layer{};  // *
  QkvStorage qkv = QkvStorage::kSeparate;
  std::string_view query{}, key{}, value{};  // separate
  std::string_view fused{};                  // concatenated or grouped
  std::string_view out{};
  bool transposed = false;  // weights are [in, out]
  bool qk_norm = false;     // q_norm.weight, k_norm.weight
  QkNormSpan qk_norm_span = QkNormSpan::kHead;
  double qk_norm_offset = 0;  // Gemma's norms store their weight less 1
  bool qk_norm_centered = false;
  std::string_view qk_norm_switch{};  // the field, where a config says whether there are norms
  std::string_view norm_epsilon = "rms_norm_eps";
  double norm_epsilon_default = 1e-6;
  bool sinks = false;  // sinks
  /// * Tensors under the layer's name that are not weights of attention.
  std::string_view other_tensors{};

  // Fields. Names that mean the same are listed together.
  std::string_view hidden_size = "hidden_size";        // *
  std::string_view num_heads = "num_attention_heads";  // *
  std::string_view num_layers = "num_hidden_layers";   // *
  KvHeadsRule kv_heads = KvHeadsRule::kAllHeads;
  std::string_view head_dim{};  // empty: always hidden_size / num_heads
  bool head_dim_needed = false;
  std::string_view dropout = "attention_dropout";  // *
  BiasRule qkv_bias = BiasRule::kByConfig;
  BiasRule out_bias = BiasRule::kByConfig;
  std::string_view bias{};  // the field, where a rule needs one
  bool bias_default = false;
  bool causal = true;
  double rope_base = 0;  // * the default; 0: no rope
  RopeLayout rope_layout = RopeLayout::kHalfSplit;
  std::string_view rope_theta = "rope_theta";
  /// * Field of the fraction of a head that is rotated, with its default; empty: all of it.
  std::string_view rotary_fraction{};
  double rotary_fraction_default = 1;
  std::string_view rope_theta_of_windows{};  // field of windowed layers' own base
  bool rope_scaling_needed = false;
  WindowRule window = WindowRule::kNone;
  /// * What is particular to the family.
  void (*particular)(ConfigFields& fields, FamilyOptions& options) = nullptr;
  /// * Fields that change attention and are not honoured: refused unless they are off.
  std::string_view must_be_off{};
  /// * Fields that sound like attention and do not change it.
  std::string_view irrelevant{};
};

std::span<const Family> families() noexcept;
/// Null where there is none.
const Family* find_family(std::string_view model_type) noexcept;
/// "bert, bloom, ...".
std::string family_names();

// Far above any model's, and so low that no product of three of them overflows.
inline constexpr std::int64_t kMaxLayers = 4096;
inline constexpr std::int64_t kMaxHeads = 4096;
inline constexpr std::int64_t kMaxHeadDim = 65'536;
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 24;

/// The options of every layer of a family with `converted` set, from the object "ladon_latent".
void read_converted(const Family& family, const std::string& path, ConfigFields& fields,
                    std::span<const std::string> ignored, FamilyOptions& options);

/// Reads all of a config that the family knows; refuses what it does not and the caller has not
/// vouched for.
FamilyOptions read_family(const Family& family, const std::string& path, const ConfigValue& config,
                          const DescribeOptions& options);

}  // namespace ladon::models
