// Conversion of trained attention between MHA, GQA, MQA and MLA.
//
// Conversions that algebra allows are exact: repeating KV heads, merging heads that are copies of
// one another, MHA or GQA as MLA with everything kept, MLA without a norm as MHA or MQA. The others
// are approximations in closed form, by principal components of the keys and values that the layer
// produces, and say so: ConversionSummary::exact. compare_layers() measures what was lost.
// balance_channels() keeps the kind and changes the weights, so that int8 caches lose less.
//
// Everything runs on the host in f64 and gives the same bytes for any number of threads. Layers
// must be on the Context's device; results are there too, in the source layer's dtype. A build
// without Eigen (LADON_CONVERT=OFF) has these functions too; they throw Error (kUnsupported).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ladon/attention_layer.h"
#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// Second moments of a layer's inputs: all that a conversion needs to know of them. Inputs are
/// streamed and not kept; 8 * width^2 bytes. Ten tokens for each element of the width are a good
/// amount; fewer work, and fit what they have seen.
class LADON_API Calibration {
 public:
  explicit Calibration(std::int64_t width);
  ~Calibration();
  Calibration(Calibration&&) noexcept;
  Calibration& operator=(Calibration&&) noexcept;

  /// Inputs of a layer, [seq, width] or [batch, seq, width], in any float dtype. Throws Error where
  /// they are empty, of another width, or not finite, and has then added nothing.
  void add(const Context& context, const ConstTensorView& x);
  /// Adds what another one has seen.
  void merge(const Calibration& other);
  /// Safetensors files. What cannot be trusted is an Error (kIo).
  void save(const std::filesystem::path& path) const;
  static Calibration load(const std::filesystem::path& path);

  std::int64_t width() const noexcept;
  std::int64_t tokens() const noexcept;
  /// Of the longest sequence: the distances over which rope was seen.
  std::int64_t longest() const noexcept;

  class Impl;
  /// For the library's own use.
  const Impl& impl() const noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// What a conversion did, as far as weights and calibration tell.
struct ConversionSummary {
  /// The result computes the same function: what was left out of the weights is at rounding level
  /// (1e-12 of their norm in f64 layers, 1e-6 in others). Rounding to the layer's dtype aside.
  bool exact = false;
  /// Elements that a cache holds for a token.
  std::int64_t cache_before = 0;
  std::int64_t cache_after = 0;
  /// Share of the energy of keys and values that merging (by kPca) or low rank leaves out, in the
  /// metric of the conversion.
  double discarded = 0;
  /// to_mla(): share of the scores' energy that loses its dependence on position.
  double rope_discarded = 0;
  /// to_mla(), reduce_rank(): energies of the principal components of the latent, falling; their
  /// sum is 1. Those past the rank were left out.
  std::vector<double> spectrum{};
  /// Query head n of the result is this head of the source.
  std::vector<std::int64_t> head_order{};
};

struct ConvertedMultiHead {
  MultiHeadAttention layer;
  ConversionSummary summary{};
};

struct ConvertedLatent {
  LatentAttention layer;
  ConversionSummary summary{};
};

/// One KV head for each query head, by repetition: weights are copied, bit by bit.
LADON_API MultiHeadAttention to_mha(const Context& context, const MultiHeadAttention& layer);

/// Every head with its own keys and values; exact. Heads are as wide as the wider of nope_dim +
/// rope_dim and value_dim. Throws Error (kUnsupported) for a layer with kv_norm, or with query_norm
/// on queries of low rank: they are not linear in the input.
LADON_API MultiHeadAttention to_mha(const Context& context, const LatentAttention& layer);

/// The absorbed form as weights: one KV head [rope key | latent] whose latent is also the value;
/// exact. Throws as to_mha() does.
LADON_API MultiHeadAttention to_mqa(const Context& context, const LatentAttention& layer);

/// How the heads of a group become one.
enum class HeadMerge : std::uint8_t {
  kPca,   // principal components; of keys frequency by frequency, so that they commute with rope
  kMean,  // the mean of their weights
  kFirst  // the first of them
};
enum class HeadGrouping : std::uint8_t {
  kBest,        // groups that leave out least, as far as a local search finds them
  kConsecutive  // neighbours
};

struct GqaConversion {
  std::int64_t num_kv_heads = 0;
  HeadMerge merge = HeadMerge::kPca;
  HeadGrouping grouping = HeadGrouping::kBest;
};

/// Fewer KV heads, by merging groups of them; or more, by repetition. One of the two numbers of KV
/// heads must divide the other. Without a calibration, inputs count as white noise. Heads that are
/// copies of one another up to an invertible map of values, a phase for each rope pair and a scale
/// are found and merged exactly. Query heads may change their order (summary.head_order), and with
/// them sinks and ALiBi slopes. kPca throws Error (kUnsupported) for a layer with qk_norm.
LADON_API ConvertedMultiHead to_gqa(const Context& context, const MultiHeadAttention& layer,
                                    const GqaConversion& conversion,
                                    const Calibration* calibration = nullptr);

/// Which rope pairs stay roped in to_mla().
enum class RopeChoice : std::uint8_t {
  kScoreError,    // those whose loss would change scores most over `context` positions
  kEnergy,        // those with the largest scores, whatever the context
  kEachFrequency  // the first component of each frequency (or evenly spaced ones), then the second
};

struct MlaConversion {
  /// Empty: the smallest that leaves out nothing.
  std::optional<std::int64_t> kv_rank{};
  /// Even. Empty: every pair stays roped.
  std::optional<std::int64_t> rope_dim{};
  RopeChoice choice = RopeChoice::kScoreError;
  /// kScoreError: positions over which scores should hold. 0: the longest sequence of the
  /// calibration; without one, kEnergy's choice.
  std::int64_t context = 0;
};

/// As latent attention, without norms. With both sizes left out it is exact. Throws Error
/// (kUnsupported) for qk_norm, softcap, a window, ALiBi, sinks and inputs of keys of another width:
/// LatentAttention has none of them.
LADON_API ConvertedLatent to_mla(const Context& context, const MultiHeadAttention& layer,
                                 const MlaConversion& conversion = {},
                                 const Calibration* calibration = nullptr);

/// A smaller kv_rank; 0: the numerical rank, exact. Throws Error (kUnsupported) for kv_norm.
LADON_API ConvertedLatent reduce_rank(const Context& context, const LatentAttention& layer,
                                      std::int64_t kv_rank = 0,
                                      const Calibration* calibration = nullptr);

/// What balance_channels() did. A spread is the largest RMS of a channel (of keys: of a rope pair)
/// over the median of its head, in the worst head.
struct BalanceSummary {
  /// False where qk_norm_offset is not 0: the factors would be rounded in the weights of such a
  /// norm, so keys stay as they are, and their spreads are 1.
  bool keys_balanced = true;
  /// The largest factor, or the inverse of the smallest where that is larger.
  double largest_factor = 1;
  double key_spread_before = 1;
  double key_spread_after = 1;
  double value_spread_before = 1;
  double value_spread_after = 1;
  /// Channels and pairs whose factor is nearer to 1 than it should be: weights, or queries in f16,
  /// would have left the range of the layer's dtype, or the factor would have been above 2^16.
  std::int64_t limited = 0;
};

struct BalancedMultiHead {
  MultiHeadAttention layer;
  BalanceSummary summary{};
};

/// The same layer with channels of keys and of values about equally large, so that caches with one
/// scale for a token's head lose less in int8. (fp8 has floats' relative precision and gains
/// nothing.) Each rope pair of a KV head's keys, each channel that rope does not rotate, and each
/// channel of values is multiplied by the power of two that brings its RMS nearest to the median of
/// its head; query heads and the output projection are divided by it. Behind a q/k norm the factors
/// of keys are in the norms' weights, and heads that share these share the factors. Powers of two
/// are exact: without a cache or over one of floats the outputs keep their bits, unless elements
/// leave the range of normal numbers, which only f16 is narrow enough for. Weights never do.
/// Without a calibration, inputs count as white noise.
LADON_API BalancedMultiHead balance_channels(const Context& context,
                                             const MultiHeadAttention& layer,
                                             const Calibration* calibration = nullptr);

/// Ranks for the layers of a model, mean_rank on average: components go to the layers whose spectra
/// (ConversionSummary) have the most energy in them, so that the sum of what all layers discard is
/// the least. Every layer gets 1 at least, and no more than it has components.
LADON_API std::vector<std::int64_t> share_ranks(std::span<const std::vector<double>> spectra,
                                                std::int64_t mean_rank);

/// Ridge regression of a layer's output on what a converted layer attends to: the best output
/// projection for it on these inputs, near the one that it has. Without dropout. Memory: 2 *
/// (num_heads * value_dim) * (num_heads * value_dim + embed_dim) f64.
class LADON_API OutputFit {
 public:
  /// Both layers are borrowed, and must have the same embed_dim and be on the same device.
  OutputFit(const AttentionLayer& before, const AttentionLayer& after);
  ~OutputFit();
  OutputFit(OutputFit&&) noexcept;
  OutputFit& operator=(OutputFit&&) noexcept;

  /// Whole sequences, [seq, embed_dim] or [batch, seq, embed_dim].
  void add(const Context& context, const ConstTensorView& x);
  /// Replaces the output projection of `after`, which may be a copy of the layer that was given.
  /// `ridge` is a share of the mean energy of what is attended to: a large one changes little, a
  /// small one fits the noise of few tokens. Empty: chosen by every fourth sequence, which the
  /// others must predict; where no fit helps there, nothing is changed. The error over all that was
  /// added never rises.
  void apply(const Context& context, AttentionLayer& after, std::optional<double> ridge = {}) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct LayerComparison {
  /// |before - after| / |before| over all outputs (Frobenius norms).
  double output_error = 0;
  /// The same without the first position of each sequence, which many models treat specially.
  double output_error_after_first = 0;
  /// Mean Kullback-Leibler divergence of attention weights, in nats, over heads and rows of the
  /// first 256 positions.
  double weights_divergence = 0;
  std::int64_t cache_before = 0;
  std::int64_t cache_after = 0;
};

/// Runs both layers over x [seq, embed_dim] or [batch, seq, embed_dim], inputs that no calibration
/// has seen, without dropout. `head_order` is the summary's; empty: heads correspond.
LADON_API LayerComparison compare_layers(const Context& context, const AttentionLayer& before,
                                         const AttentionLayer& after, const ConstTensorView& x,
                                         std::span<const std::int64_t> head_order = {});

/// Elements that a cache of the layer holds for a token.
LADON_API std::int64_t cache_elements(const AttentionLayer& layer);

}  // namespace ladon
