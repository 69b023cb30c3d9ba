#include "rank_problem.h"

#include <algorithm>

#include "compare_tensors.h"
#include "ladon/random.h"
#include "parallel/message_layout.h"

namespace ladon::bench {

RankProblem::RankProblem(const Context& context, const RankBenchOptions& wanted,
                         std::int64_t length)
    : tokens(length), sizes(wanted) {
  const auto make = [&](std::int64_t heads, std::uint64_t stream) {
    Tensor tensor = Tensor::uninitialized(DType::kF32, {1, length, heads, sizes.head_dim});
    if (stream != 0) fill_normal(context, tensor, 0, 1, 42, stream);
    return tensor;
  };
  q = make(sizes.num_heads, 1);
  k = make(sizes.num_kv_heads, 2);
  v = make(sizes.num_kv_heads, 3);
  dout = make(sizes.num_heads, 4);
  out = make(sizes.num_heads, 0);
  dq = make(sizes.num_heads, 0);
  dk = make(sizes.num_kv_heads, 0);
  dv = make(sizes.num_kv_heads, 0);
  lse = Tensor::uninitialized(DType::kF32, {1, sizes.num_heads, length});
}

RankPart::RankPart(const Context& context, Communicator& communicator, const RankProblem& whole,
                   ContextScheme scheme)
    : context_(context),
      communicator_(communicator),
      whole_(whole),
      plan_(plan_context(communicator.size(), whole.tokens, whole.tokens, whole.options)) {
  plan_.scheme = scheme;
  q_ = own(whole.q);
  k_ = own(whole.k);
  v_ = own(whole.v);
  dout_ = own(whole.dout);
  out_ = own(whole.out);
  lse_ = own(whole.lse, 2);
  dq_ = own(whole.dq);
  dk_ = own(whole.dk);
  dv_ = own(whole.dv);
}

void RankPart::run(bool backward) {
  if (!backward) {
    context_parallel_attention(context_, communicator_, q_, k_, v_, whole_.options, plan_, out_,
                               lse_);
    return;
  }
  context_parallel_attention_backward(context_, communicator_, q_, k_, v_, whole_.options, plan_,
                                      {.out = out_, .lse = lse_, .dout = dout_},
                                      {.dq = dq_, .dk = dk_, .dv = dv_});
}

double RankPart::error(bool backward) const {
  if (!backward) return largest_error(out_, own(whole_.out));
  return std::max({largest_error(dq_, own(whole_.dq)), largest_error(dk_, own(whole_.dk)),
                   largest_error(dv_, own(whole_.dv))});
}

Tensor RankPart::own(const Tensor& whole, int dim) const {
  const auto& ranges = plan_.queries[static_cast<std::size_t>(communicator_.rank())];
  Dims shape = whole.shape();
  shape[dim] = total_length(ranges);
  Tensor part = Tensor::uninitialized(whole.dtype(), shape);
  take_tokens(context_, whole, ranges, dim, part);
  return part;
}

RankVolume volume_of(const RankProblem& problem, ContextScheme scheme, bool backward, int ranks,
                     int rank) {
  const auto own = static_cast<double>(problem.tokens) / ranks;
  const auto heads = static_cast<double>(problem.sizes.num_heads) / ranks;
  const auto kv_heads = static_cast<double>(problem.sizes.num_kv_heads);
  const auto dim = static_cast<double>(problem.sizes.head_dim);
  const double others = ranks - 1;
  const double of_key = kv_heads * 2 * dim * 4;  // key and value of a token, or their sums
  switch (scheme) {
    case ContextScheme::kAllGather: {
      // The first part of a rank's keys is seen by all ranks, the second by those before it.
      const double sent = own / 2 * (others + rank) * of_key;
      return {sent, backward ? own / 2 * (others + others - rank) * of_key : 0};
    }
    case ContextScheme::kRing: return {others * own * of_key, backward ? ranks * own * of_key : 0};
    default: {
      const double of_own_keys = std::max(1.0, kv_heads / ranks) * 2 * dim * 4;
      const double of_query = heads * dim * 4;
      const double of_lse = heads * 4;
      return {
          others * own * (backward ? 3 * of_query + of_lse + of_own_keys : of_query + of_own_keys),
          others * own * (backward ? of_query + of_own_keys : of_query + of_lse)};
    }
  }
}

}  // namespace ladon::bench
