// attention() over the ranks of a communicator, each of which holds some of the tokens.
//
// q, k and v of a rank are its own tokens, in the order of its ranges in the plan: [batch, own
// queries, num_heads, head_dim] and [batch, own keys, num_kv_heads, ...]; out, lse and gradients
// likewise. AttentionOptions are those of the whole problem, and mask and bias have the whole's
// shape: every rank passes the same, and every option works.
//
// The result has the same bits as attention() over all tokens in one process with the same
// instruction set, for any number of ranks and any plan (kRing excepted). So has dq; dk, dv, dbias
// and dsinks are sums over ranks: the same bits in every run for the same ranks, and within the
// bounds of docs/numerics.md for any number.
#pragma once

#include <cstdint>
#include <vector>

#include "ladon/attention.h"
#include "ladon/communicator.h"
#include "ladon/export.h"

namespace ladon {

/// Tokens [begin, end) of the whole.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t length() const noexcept { return end - begin; }
  bool operator==(const TokenRange&) const = default;
};

enum class ContextScheme : std::uint8_t {
  kAuto,       // kAllGather or kUlysses, whichever would send fewer bytes without a mask
  kAllGather,  // ranks receive the keys that their queries may see, some KV heads at a time
  kRing,       // keys and values go round, one rank's at a time: least memory; not the bits of one
               // process, but the same in every run
  kUlysses,    // ranks exchange tokens for heads: num_heads must be a multiple of the ranks, and
               // num_kv_heads a multiple or a divisor of them
};

/// Who owns which tokens: plain data, the same on every rank.
struct ContextPlan {
  /// One list for each rank, ascending: of the query dimension (of a packed batch, of its stream of
  /// queries) and of the key dimension. Every token has exactly one owner.
  std::vector<std::vector<TokenRange>> queries{};
  std::vector<std::vector<TokenRange>> keys{};
  ContextScheme scheme = ContextScheme::kAuto;
  /// KV heads of one stage: kAllGather gathers them, and kUlysses exchanges so many of each rank's,
  /// while it computes with those of the stage before. 0: about an eighth of them, more where
  /// messages would be shorter than 256 KiB, and fewer where they do not fit 64 MiB.
  std::int64_t kv_heads_at_once = 0;
};

/// Balances the work of the ranks ("zigzag"): the queries are cut into 2 * ranks parts, and rank r
/// owns parts r and 2 * ranks - 1 - r. The parts are equally long where ranks then have the same
/// work within 5 %, as in one causal sequence; else they have about the same number of visible keys
/// by causal, window and lengths. Where there are as many keys as queries, a token's key has the
/// same owner as its query; otherwise keys are cut evenly.
LADON_API ContextPlan plan_context(int ranks, std::int64_t query_len, std::int64_t kv_len,
                                   const AttentionOptions& options = {});

/// Writes this rank's part of out, and of lse where it is given.
LADON_API void context_parallel_attention(const Context& context, Communicator& communicator,
                                          const ConstTensorView& q, const ConstTensorView& k,
                                          const ConstTensorView& v, const AttentionOptions& options,
                                          const ContextPlan& plan, const TensorView& out,
                                          const TensorView& lse = {});

/// Overwrites this rank's part of dq, dk and dv, and all of dbias and dsinks, which every rank
/// gets. A gradient is wanted on all ranks or on none.
LADON_API void context_parallel_attention_backward(
    const Context& context, Communicator& communicator, const ConstTensorView& q,
    const ConstTensorView& k, const ConstTensorView& v, const AttentionOptions& options,
    const ContextPlan& plan, const AttentionSaved& saved, const AttentionGradients& gradients);

}  // namespace ladon
