// The rope pairs of all KV heads as components that all query heads share, and which of them stay
// roped.
#pragma once

#include <cstdint>
#include <vector>

#include "convert/grouping.h"
#include "ladon/convert.h"

namespace ladon::convert {

/// Component j of pair l: z = sum over KV heads k of conj(U_kj) w_k z_k, where U are the principal
/// components of the weighted keys. A query of KV head k meets it as conj(U_kj) / w_k times its own
/// pair. Exact, and it commutes with rope.
struct PairComponent {
  std::int64_t pair = 0;
  std::int64_t component = 0;
  double energy = 0;                     // of the scores that it gives
  std::vector<Complex> key_factors{};    // of each KV head's pair in z
  std::vector<Complex> query_factors{};  // by which each KV head's queries are multiplied
};

struct PairChoice {
  std::vector<PairComponent> roped{};
  std::vector<PairComponent> unroped{};  // the mean phase of their distances is in query_factors
  double discarded = 0;  // share of the scores' energy whose dependence on position is lost
};

/// Keeps `count` components roped. `positions` is the context of kScoreError, 0 where there is
/// none.
PairChoice choose_pairs(const HeadLayout& layout, const GroupCost& cost, std::int64_t num_kv_heads,
                        std::int64_t count, RopeChoice choice, std::int64_t positions, bool causal);

/// The two rows of a component, [W | b].
RealMatrix component_rows(const PairComponent& component, const RealMatrix& key,
                          const HeadLayout& layout);

}  // namespace ladon::convert
