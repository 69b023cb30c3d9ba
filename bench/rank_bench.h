// Context-parallel attention over ranks: bytes compared with the formulas of docs/parallel.md, and
// time with the alpha-beta model. For processes of MPI, or for threads with an emulated network
// between them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ladon/communicator.h"
#include "ladon/context.h"
#include "rank_model.h"

namespace ladon::bench {

/// A causal sequence in f32, with the heads of Llama 3 8B.
struct RankBenchOptions {
  std::int64_t tokens = 4096;  // as usual_tokens(), or a multiple
  std::int64_t num_heads = 32;
  std::int64_t num_kv_heads = 8;
  std::int64_t head_dim = 64;
  int repetitions = 3;  // of which the fastest counts
};

struct RankRow {
  std::string scheme;
  bool backward = false;
  int ranks = 1;
  std::int64_t tokens = 0;
  std::int64_t sent = 0;      // bytes, by all ranks
  std::int64_t expected = 0;  // by the formula
  double seconds = 0;         // of the slowest rank
  double predicted = 0;
  double overlap = 0;     // 1 - waited for messages / time of the messages
  double imbalance = 0;   // most / mean time that ranks compute
  double efficiency = 0;  // of a perfect speedup over one process
  std::string fault{};    // where the result is wrong
};

/// About so many that 2, 4, ... ranks up to these have equally long parts.
std::int64_t usual_tokens(int ranks, std::int64_t about = 4096);

/// Every rank calls it, with a Context of one thread; all get the same rows. Strong scaling: 2, 4,
/// ... ranks up to all of them with `tokens`. Weak scaling: the same with as many tokens a rank as
/// all ranks have of `tokens`. A link without a bandwidth is measured first.
std::vector<RankRow> bench_ranks(const Context& context, Communicator& communicator,
                                 const RankBenchOptions& options, Link& link);

/// The same over threads of this process, with this link between them
/// (parallel/emulated_network.h).
std::vector<RankRow> bench_emulated_ranks(const ContextOptions& context, int ranks,
                                          const RankBenchOptions& options, const Link& link);

/// Are the results right, and the bytes those of the formulas?
bool all_right(const std::vector<RankRow>& rows);
/// Lines of text.
std::string rank_table(const std::vector<RankRow>& rows);

}  // namespace ladon::bench
