// Where the results of a layer's call go: memory that the caller gave, or tensors that the call
// makes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/checks.h"
#include "ladon/attention_layer.h"
#include "ladon/context.h"
#include "ladon/tensor.h"

namespace ladon {

class LayerOutput {
 public:
  /// The call makes a tensor.
  LayerOutput() = default;
  /// The caller's memory; check() refuses an absent view.
  explicit LayerOutput(const TensorView& given) : kind_(Kind::kGiven), view_(given) {}
  static LayerOutput unwanted();
  /// An absent view is not wanted.
  static LayerOutput if_given(const TensorView& given);

  bool wanted() const noexcept { return kind_ != Kind::kUnwanted; }
  bool given() const noexcept { return kind_ == Kind::kGiven; }
  /// Absent unless the caller gave memory.
  TensorView given_view() const { return given() ? view_ : TensorView(); }

  /// Refuses the caller's memory unless it has this dtype and shape, reaches no element twice, and
  /// is neither an input's nor the layer's own.
  void check(const Operation& operation, std::string_view name, const AttentionLayer& layer,
             DType dtype, const Dims& shape, std::span<const NamedView> inputs) const;

  /// What to write; makes the tensor where the caller gave no memory.
  TensorView open(const Context& context, DType dtype, const Dims& shape);
  /// Takes over what was computed elsewhere, or copies it to the caller's memory.
  void publish(const Context& context, Tensor&& result);
  /// The tensor that was made; empty where none was.
  Tensor take() { return std::move(made_); }

 private:
  enum class Kind : std::uint8_t { kMade, kGiven, kUnwanted };

  Kind kind_ = Kind::kMade;
  TensorView view_;
  Tensor made_;
};

struct InputGradientOutputs {
  LayerOutput query, key, value;

  InputGradientOutputs() = default;
  explicit InputGradientOutputs(const InputGradientViews& given);

  /// New tensors for those that are wanted: ranks write results when all of them have succeeded.
  InputGradientOutputs staged() const;
  void publish(const Context& context, InputGradients&& results);
  InputGradients take() { return {query.take(), key.take(), value.take()}; }
  /// Which are wanted, for what ranks must have in common.
  std::string wanted() const;
};

/// An output as [rows, width]: in place where its sequences follow each other, else a temporary
/// that finish() copies.
class OutputRows {
 public:
  OutputRows(const Context& context, const TensorView& out);
  const TensorView& view() const noexcept { return view_; }
  void finish(const Context& context) const;

 private:
  TensorView out_;
  Tensor temporary_;
  TensorView view_;
};

/// The output of a call whose other arguments have been checked.
void check_output(const Operation& operation, const AttentionLayer& layer,
                  const LayerInputs& inputs, const LayerCall& call, const LayerOutput& out);

}  // namespace ladon
