// The tensors of a Case, with poison wherever nothing may be read, and guards around outputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "support/case.h"

namespace ladon::test {

/// A view into a larger array. Everything outside the view is NaN (0xFF bytes), and stays so.
class PoisonedTensor {
 public:
  PoisonedTensor() = default;
  /// [batch, seq, heads, dim].
  PoisonedTensor(DType dtype, const Dims& shape, Memory memory);

  const TensorView& view() const { return view_; }
  /// Remembers what is around the view, to be compared after a call.
  void guard();
  /// True when nothing outside the view has changed since guard().
  bool guards_intact() const;

 private:
  Tensor storage_;
  TensorView view_;
  std::vector<unsigned char> saved_;
};

/// One sequence of a Case: where it is, and how long it is.
struct SequencePart {
  std::int64_t query_begin = 0;
  std::int64_t query_len = 0;
  std::int64_t kv_begin = 0;
  std::int64_t kv_len = 0;
};

/// Inputs of a Case. Not movable: options() points into it.
class CaseData {
 public:
  explicit CaseData(const Case& problem);
  CaseData(const CaseData&) = delete;
  CaseData& operator=(const CaseData&) = delete;

  const Case& problem() const { return problem_; }
  AttentionOptions options() const;
  const std::vector<SequencePart>& sequences() const { return sequences_; }
  /// Shapes as the library sees them.
  Dims out_shape() const;
  Dims lse_shape() const;
  DType lse_dtype() const { return problem_.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

  ConstTensorView q() const { return q_.view(); }
  ConstTensorView k() const { return k_.view(); }
  ConstTensorView v() const { return v_.view(); }
  ConstTensorView dout() const { return dout_.view(); }
  ConstTensorView dlse() const { return problem_.dlse ? dlse_.view() : ConstTensorView(); }
  ConstTensorView mask() const { return problem_.mask.present ? mask_.view() : ConstTensorView(); }
  ConstTensorView bias() const { return problem_.bias.present ? bias_.view() : ConstTensorView(); }

  /// Written from the contract, not from the library: may this query see this key?
  bool visible(std::int64_t sequence, std::int64_t head, std::int64_t query,
               std::int64_t key) const;

 private:
  void cut_sequences(Random& random);
  void poison_unseen_keys();

  Case problem_;
  std::vector<SequencePart> sequences_;
  std::vector<std::int64_t> kv_lengths_;
  std::vector<std::int64_t> query_offsets_;
  std::vector<std::int64_t> kv_offsets_;
  std::int64_t batch_ = 0;  // first dimension of the tensors
  std::int64_t query_len_ = 0;
  std::int64_t kv_len_ = 0;
  PoisonedTensor q_, k_, v_, dout_;
  Tensor dlse_, mask_, bias_, slopes_, sinks_;
};

}  // namespace ladon::test
