// Arrays by key tokens between the ranks of a plan: gathered for the queries that may see them, and
// sums for each token back to its owner.
#pragma once

#include <utility>
#include <vector>

#include "parallel/array_exchange.h"
#include "parallel/whole_attention.h"

namespace ladon {

/// Arrays of own key tokens, [batch, tokens, ...], become arrays of all of them: a rank is sent
/// those that its queries may see, and the others are 0.
class GatheredTokens final : public ExchangePart {
 public:
  GatheredTokens(const Context& context, const WholeAttention& whole, int rank,
                 std::vector<ConstTensorView> own);

  const Tensor& all(std::size_t i) const { return all_[i]; }
  Tensor take(std::size_t i) { return std::move(all_[i]); }

  Arrays outgoing(int other) const override { return arrays_of(rank_, other); }
  Arrays incoming(int other) const override { return arrays_of(other, rank_); }
  void pack(int other, std::span<const TensorView> arrays) override;
  void unpack(int other, std::span<const TensorView> arrays) override;
  void complete() override { context_.synchronize(); }  // before the messages are freed

 private:
  Arrays arrays_of(int owner, int reader) const;

  const Context& context_;
  const WholeAttention& whole_;
  const int rank_;
  std::vector<ConstTensorView> own_;
  std::vector<Tensor> all_;
};

/// And back: a rank's terms for all tokens, f32 or f64 [batch, tokens, ...], become sums over ranks
/// for its own, in the order of ranks. Ranks have terms for the tokens that their queries may see;
/// the others' are 0.
class ReturnedTerms final : public ExchangePart {
 public:
  ReturnedTerms(const Context& context, const WholeAttention& whole, int rank)
      : context_(context), whole_(whole), rank_(rank) {}

  /// `result` [batch, own tokens, ...] is where the sum is to be written.
  void add(Tensor terms, const TensorView& result);
  bool empty() const { return sums_.empty(); }
  Tensor& terms(std::size_t i) { return sums_[i].terms; }

  Arrays outgoing(int other) const override { return arrays_of(other, rank_); }
  Arrays incoming(int other) const override { return arrays_of(rank_, other); }
  void pack(int other, std::span<const TensorView> arrays) override;
  void unpack(int other, std::span<const TensorView> arrays) override;
  void complete() override;

 private:
  struct Sum {
    TensorView result;
    Tensor terms;
    Tensor sum;
  };

  Arrays arrays_of(int owner, int reader) const;

  const Context& context_;
  const WholeAttention& whole_;
  const int rank_;
  std::vector<Sum> sums_;
};

}  // namespace ladon
