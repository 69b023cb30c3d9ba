#include <algorithm>
#include <array>
#include <cstdio>

#include "rank_bench.h"

namespace ladon::bench {

bool all_right(const std::vector<RankRow>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const RankRow& row) {
    return row.fault.empty() && row.sent == row.expected;
  });
}

std::string rank_table(const std::vector<RankRow>& rows) {
  std::string text =
      "scheme      pass      ranks  tokens         sent   formula  time (ms)  predicted  ratio"
      "  overlap  imbalance  efficiency\n";
  for (const RankRow& row : rows) {
    std::array<char, 256> line{};
    std::snprintf(
        line.data(), line.size(),
        "%-11s %-8s %6d %7lld %12lld %9s %10.2f %10.2f %6.2f %7.1f%% %10.3f %10.1f%%%s%s\n",
        row.scheme.c_str(), row.backward ? "backward" : "forward", row.ranks,
        static_cast<long long>(row.tokens), static_cast<long long>(row.sent),
        row.sent == row.expected ? "equal" : "UNEQUAL", 1e3 * row.seconds, 1e3 * row.predicted,
        row.seconds / row.predicted, 100 * row.overlap, row.imbalance, 100 * row.efficiency,
        row.fault.empty() ? "" : "  WRONG: ", row.fault.c_str());
    text += line.data();
  }
  return text;
}

}  // namespace ladon::bench
