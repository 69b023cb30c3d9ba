#include "parallel/token_exchange.h"

#include <algorithm>
#include <utility>

#include "core/context_impl.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"

namespace ladon {
namespace {

/// With another number of tokens.
Dims with_tokens(Dims shape, std::int64_t tokens) {
  shape[1] = tokens;
  return shape;
}

/// Keys that are neither a rank's own nor sent to it.
std::vector<TokenRange> unseen_by(const WholeAttention& whole, int rank) {
  std::vector<TokenRange> seen(whole.keys_of(rank).begin(), whole.keys_of(rank).end());
  for (int owner = 0; owner < static_cast<int>(whole.ranks()); ++owner) {
    const std::vector<TokenRange> sent = whole.keys_between(owner, rank);
    seen.insert(seen.end(), sent.begin(), sent.end());
  }
  std::sort(seen.begin(), seen.end(),
            [](const TokenRange& a, const TokenRange& b) { return a.begin < b.begin; });
  seen.push_back({whole.sizes().kv_len, whole.sizes().kv_len});
  std::vector<TokenRange> unseen;
  std::int64_t next = 0;
  for (const TokenRange& range : seen) {
    if (range.begin > next) unseen.push_back({next, range.begin});
    next = std::max(next, range.end);
  }
  return unseen;
}

}  // namespace

GatheredTokens::GatheredTokens(const Context& context, const WholeAttention& whole, int rank,
                               std::vector<ConstTensorView> own)
    : context_(context), whole_(whole), rank_(rank), own_(std::move(own)) {
  const std::vector<TokenRange> unseen = unseen_by(whole, rank);
  for (const ConstTensorView& array : own_) {
    Tensor& all = all_.emplace_back(Tensor::uninitialized(
        context, array.dtype(), with_tokens(array.shape(), whole.sizes().kv_len)));
    put_tokens(context, array, whole.keys_of(rank), 1, all);
    for (const TokenRange& range : unseen) {
      backend_of(context).zero(all.view().slice(1, range.begin, range.end));
    }
  }
}

ExchangePart::Arrays GatheredTokens::arrays_of(int owner, int reader) const {
  Arrays arrays;
  if (owner == reader) return arrays;
  const std::int64_t tokens = total_length(whole_.keys_between(owner, reader));
  for (const ConstTensorView& array : own_) {
    arrays.push_back({array.dtype(), with_tokens(array.shape(), tokens)});
  }
  return arrays;
}

void GatheredTokens::pack(int other, std::span<const TensorView> arrays) {
  const auto take = [&](std::int64_t local, std::int64_t first, std::int64_t count) {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      copy(context_, own_[i].slice(1, local, local + count),
           arrays[i].slice(1, first, first + count));
    }
  };
  for_each_own(whole_.keys_of(rank_), whole_.keys_between(rank_, other), take);
}

void GatheredTokens::unpack(int other, std::span<const TensorView> arrays) {
  const std::vector<TokenRange> tokens = whole_.keys_between(other, rank_);
  for (std::size_t i = 0; i < all_.size(); ++i) put_tokens(context_, arrays[i], tokens, 1, all_[i]);
}

void ReturnedTerms::add(Tensor terms, const TensorView& result) {
  sums_.push_back({result, std::move(terms), {}});
}

ExchangePart::Arrays ReturnedTerms::arrays_of(int owner, int reader) const {
  const std::int64_t tokens = total_length(whole_.keys_between(owner, reader));
  Arrays arrays;
  for (const Sum& sum : sums_) {
    arrays.push_back({sum.terms.dtype(), with_tokens(sum.terms.shape(), tokens)});
  }
  return arrays;
}

void ReturnedTerms::pack(int other, std::span<const TensorView> arrays) {
  const std::vector<TokenRange> tokens = whole_.keys_between(other, rank_);
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    take_tokens(context_, sums_[i].terms, tokens, 1, arrays[i]);
  }
}

void ReturnedTerms::unpack(int other, std::span<const TensorView> arrays) {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    Tensor& sum = sums_[i].sum;
    if (sum.rank() == 0) {
      sum = Tensor(context_, sums_[i].terms.dtype(), sums_[i].result.shape());
    }
    const auto add = [&](std::int64_t local, std::int64_t first, std::int64_t count) {
      const Tensor term = on_device(context_, arrays[i].slice(1, first, first + count));
      add_to(context_, term, sum.view().slice(1, local, local + count));
      context_.synchronize();  // before `term` is freed
    };
    for_each_own(whole_.keys_of(rank_), whole_.keys_between(rank_, other), add);
  }
}

void ReturnedTerms::complete() {
  for (const Sum& sum : sums_) copy(context_, sum.sum, sum.result);
  context_.synchronize();
}

}  // namespace ladon
