// What the functions that attend share: their options, and outputs that are made or given.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

#include "arrays.h"
#include "keywords.h"
#include "ladon/attention.h"
#include "ladon/tensor.h"
#include "options.h"

namespace ladon::python {

/// The keywords of AttentionArguments, as they stand in a signature.
inline constexpr const char* kAttentionOptions =
    "causal: bool = False, scale: float | None = None, alignment: Alignment = 'bottom_right', "
    "position_offset: int | None = None, window_left: int | None = None, window_right: int | None "
    "= None, mask: Array | None = None, bias: Array | None = None, kv_lengths: IntegersLike | None "
    "= None, query_offsets: IntegersLike | None = None, kv_offsets: IntegersLike | None = None, "
    "softcap: float = 0.0, "
    "alibi_slopes: Array | Sequence[float] | None = None, sinks: Array | Sequence[float] | None = "
    "None, dropout: float = 0.0, dropout_seed: int = 0, dropout_first_sequence: int = 0, "
    "dropout_first_head: int = 0, dropout_first_query: int = 0, dropout_first_key: int = 0";

/// An array that may not be None.
inline Array required(nb::handle object, const Where& where) {
  if (object.is_none()) throw_type_error(where, object, "an array");
  return Array::input(object, where);
}

inline DType float_or_f32(DType dtype) { return is_float(dtype) ? dtype : DType::kF32; }

/// The keywords `out` and `return_lse`.
class AttentionOutputs {
 public:
  explicit AttentionOutputs(Keywords& keywords);
  /// For queries [batch, query_len, num_heads, ...].
  void allocate(const Context& context, const ConstTensorView& q, std::int64_t value_dim);
  TensorView out();
  TensorView lse();
  /// out, or (out, lse).
  nb::object give(Framework framework, const BoundContext& context);

 private:
  Array given_;
  bool wants_lse_ = false;
  Tensor out_memory_;
  Tensor lse_memory_;
};

/// The keywords `wanted`, `dq`, `dk`, `dv`, `dbias` and `dsinks` of a backward call. Refers to the
/// inputs whose gradients they are.
class GradientOutputs {
 public:
  GradientOutputs(Keywords& keywords, const Array& q, const Array& k, const Array& v,
                  const AttentionArguments& arguments);
  GradientOutputs(const GradientOutputs&) = delete;
  GradientOutputs& operator=(const GradientOutputs&) = delete;

  void allocate(const Context& context);
  const AttentionGradients& views() const noexcept { return gradients_; }
  /// AttentionGradients of ladon/_types.py.
  nb::object give(Framework framework, const BoundContext& context);

 private:
  /// A gradient's name, the tensor that takes it, and the shape in which the library sees it.
  struct Gradient {
    const char* name;
    const Array& of;
    TensorView& target;
    bool as_rank_4;
    bool wanted = false;
    Array given{};    // the caller's own memory for it
    Tensor memory{};  // or new memory
  };

  AttentionGradients gradients_;
  std::array<Gradient, 5> table_;
};

}  // namespace ladon::python
