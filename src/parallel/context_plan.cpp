// plan_context(): which tokens each rank owns.

#include <algorithm>
#include <numeric>
#include <string>

#include "core/fail.h"
#include "ladon/context_parallel.h"
#include "parallel/share.h"

namespace ladon {
namespace {

/// Calls add(work) for each query of one sequence, in order: 1 for itself and 1 for each key that
/// causal and window let it see.
template <class Add>
void for_each_query(const AttentionOptions& options, std::int64_t query_len, std::int64_t kv_len,
                    const Add& add) {
  const std::int64_t corner = options.alignment == Alignment::kBottomRight ? kv_len - query_len : 0;
  const std::int64_t offset = options.position_offset.value_or(corner);
  for (std::int64_t i = 0; i < query_len; ++i) {
    const std::int64_t position = i + offset;
    std::int64_t first = 0;
    std::int64_t end = kv_len;
    if (options.window_left.has_value() && *options.window_left < position) {
      first = position - *options.window_left;
    }
    if (options.causal) {
      end = std::min(end, position + 1);
    } else if (options.window_right.has_value() && *options.window_right < end) {
      end = std::min(end, position + *options.window_right + 1);
    }
    add(1 + std::max<std::int64_t>(0, end - first));
  }
}

/// Calls add(work) for each token of the query dimension. In a padded batch all sequences are cut
/// alike, as if all of their keys existed.
template <class Add>
void for_each_token(const AttentionOptions& options, std::int64_t query_len, std::int64_t kv_len,
                    const Add& add) {
  if (options.query_offsets.empty()) return for_each_query(options, query_len, kv_len, add);
  for (std::size_t s = 0; s + 1 < options.query_offsets.size(); ++s) {
    for_each_query(options, options.query_offsets[s + 1] - options.query_offsets[s],
                   options.kv_offsets[s + 1] - options.kv_offsets[s], add);
  }
}

/// Borders of `parts` runs of tokens with about the same work.
std::vector<std::int64_t> cut_by_work(const AttentionOptions& options, std::int64_t query_len,
                                      std::int64_t kv_len, std::int64_t parts) {
  double total = 0;
  for_each_token(options, query_len, kv_len,
                 [&](std::int64_t work) { total += static_cast<double>(work); });
  std::vector<std::int64_t> borders{0};
  double sum = 0;
  std::int64_t token = 0;
  for_each_token(options, query_len, kv_len, [&](std::int64_t work) {
    // A border goes before the token whose middle is past it.
    const double middle = sum + static_cast<double>(work) / 2;
    while (static_cast<std::int64_t>(borders.size()) < parts &&
           middle > total * static_cast<double>(borders.size()) / static_cast<double>(parts)) {
      borders.push_back(token);
    }
    sum += static_cast<double>(work);
    ++token;
  });
  borders.resize(static_cast<std::size_t>(parts) + 1, query_len);
  return borders;
}

/// The most work of a rank over the mean, where it owns the parts rank and 2 * ranks - 1 - rank.
double imbalance_of(const AttentionOptions& options, std::int64_t query_len, std::int64_t kv_len,
                    std::span<const std::int64_t> borders) {
  const std::size_t parts = borders.size() - 1;
  std::vector<double> work(parts / 2);
  std::size_t part = 0;
  std::int64_t token = 0;
  for_each_token(options, query_len, kv_len, [&](std::int64_t of_token) {
    while (token >= borders[part + 1]) ++part;
    ++token;
    work[std::min(part, parts - 1 - part)] += static_cast<double>(of_token);
  });
  const double total = std::accumulate(work.begin(), work.end(), 0.0);
  return total == 0 ? 1
                    : *std::max_element(work.begin(), work.end()) *
                          static_cast<double>(work.size()) / total;
}

/// Borders of parts that are equally long where that balances the work, as it does in one causal
/// sequence: then ranks also hold as many tokens, and every step of a ring takes them as long. Else
/// of parts with equal work.
std::vector<std::int64_t> cut(const AttentionOptions& options, std::int64_t query_len,
                              std::int64_t kv_len, std::int64_t parts) {
  constexpr double kBalanced = 1.05;
  std::vector<std::int64_t> borders;
  for (std::int64_t i = 0; i <= parts; ++i) borders.push_back(query_len * i / parts);
  if (imbalance_of(options, query_len, kv_len, borders) <= kBalanced) return borders;
  return cut_by_work(options, query_len, kv_len, parts);
}

void check_plan_lengths(std::int64_t query_len, std::int64_t kv_len,
                        const AttentionOptions& options) {
  constexpr std::string_view kOperation = "plan_context";
  if (query_len < 0) {
    fail(kOperation, "query_len", "got " + std::to_string(query_len) + ", expected 0 or more");
  }
  if (kv_len < 0) {
    fail(kOperation, "kv_len", "got " + std::to_string(kv_len) + ", expected 0 or more");
  }
  if (options.query_offsets.size() != options.kv_offsets.size()) {
    fail(kOperation, "kv_offsets",
         "got " + std::to_string(options.kv_offsets.size()) + " offsets, expected " +
             std::to_string(options.query_offsets.size()) + " as in query_offsets");
  }
  const auto check_total = [&](std::string_view name, std::span<const std::int64_t> offsets,
                               std::int64_t length) {
    if (offsets.empty()) return;
    if (offsets.front() == 0 && offsets.back() == length &&
        std::is_sorted(offsets.begin(), offsets.end())) {
      return;
    }
    fail(kOperation, name,
         "got offsets that do not rise from 0 to the " + std::to_string(length) + " tokens");
  };
  check_total("query_offsets", options.query_offsets, query_len);
  check_total("kv_offsets", options.kv_offsets, kv_len);
}

}  // namespace

ContextPlan plan_context(int ranks, std::int64_t query_len, std::int64_t kv_len,
                         const AttentionOptions& options) {
  if (ranks < 1) {
    fail("plan_context", "ranks", "got " + std::to_string(ranks) + ", expected 1 or more");
  }
  check_plan_lengths(query_len, kv_len, options);
  const std::int64_t parts = 2 * std::int64_t{ranks};
  const std::vector<std::int64_t> borders = cut(options, query_len, kv_len, parts);
  const auto part = [&](std::int64_t i) {
    const auto index = static_cast<std::size_t>(i);
    return TokenRange{borders[index], borders[index + 1]};
  };
  ContextPlan plan;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const TokenRange early = part(rank);
    const TokenRange late = part(parts - 1 - rank);
    std::vector<TokenRange>& own = plan.queries.emplace_back();
    if (early.end == late.begin) {
      own.push_back({early.begin, late.end});
    } else {
      own = {early, late};
    }
  }
  if (kv_len == query_len) {
    plan.keys = plan.queries;
    return plan;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const Range keys = share_of(kv_len, rank, ranks);
    plan.keys.push_back({{keys.begin, keys.end}});
  }
  return plan;
}

}  // namespace ladon
