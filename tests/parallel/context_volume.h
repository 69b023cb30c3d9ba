// The bytes that a rank sends in context-parallel attention, counted apart from the library.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ladon/context_parallel.h"
#include "parallel/message_layout.h"
#include "support/case_data.h"

namespace ladon::test {

/// The bytes that a rank sends, from the formulas of docs/parallel.md.
struct Volume {
  std::int64_t ranks, own_queries, own_keys;
  const CaseData& data;

  std::int64_t batch() const { return data.q().size(0); }
  std::int64_t queries() const { return data.q().size(1); }
  std::int64_t keys() const { return data.k().size(1); }
  std::int64_t q_bytes() const { return static_cast<std::int64_t>(size_of(data.q().dtype())); }
  std::int64_t k_bytes() const { return static_cast<std::int64_t>(size_of(data.k().dtype())); }
  std::int64_t lse_bytes() const { return static_cast<std::int64_t>(size_of(data.lse_dtype())); }
  std::int64_t sum_bytes() const { return data.k().dtype() == DType::kF64 ? 8 : 4; }

  /// All-gather: ranks get the keys that they need, and return terms of their gradients.
  std::int64_t gather(const ContextPlan& plan, int rank) const {
    const Case& c = data.problem();
    std::int64_t tokens = 0;
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) tokens += needed(plan, rank, other);
    }
    return batch() * tokens * c.num_kv_heads * (c.head_dim + c.value_dim) * k_bytes();
  }
  std::int64_t gather_backward(const ContextPlan& plan, int rank) const {
    const Case& c = data.problem();
    std::int64_t tokens = 0;
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) tokens += needed(plan, other, rank);
    }
    return gather(plan, rank) +
           batch() * tokens * c.num_kv_heads * (c.head_dim + c.value_dim) * sum_bytes();
  }
  /// How many keys of one rank some query of another may see, by causal, window and lengths.
  std::int64_t needed(const ContextPlan& plan, int owner, int reader) const {
    std::int64_t count = 0;
    for (const TokenRange& keys_of : plan.keys[static_cast<std::size_t>(owner)]) {
      for (std::int64_t key = keys_of.begin; key < keys_of.end; ++key) {
        bool is_needed = false;
        for (const TokenRange& queries_of : plan.queries[static_cast<std::size_t>(reader)]) {
          for (std::int64_t i = queries_of.begin; i < queries_of.end && !is_needed; ++i) {
            is_needed = sees(i, key);
          }
        }
        count += is_needed ? 1 : 0;
      }
    }
    return count;
  }
  /// Does query `query` of the whole see key `key` of the whole, in any sequence?
  bool sees(std::int64_t query, std::int64_t key) const {
    const Case& c = data.problem();
    for (const SequencePart& part : data.sequences()) {
      const std::int64_t i = query - part.query_begin;
      const std::int64_t j = key - part.kv_begin;
      if (i < 0 || i >= part.query_len || j < 0 || j >= part.kv_len) continue;
      const std::int64_t corner =
          c.alignment == Alignment::kBottomRight ? part.kv_len - part.query_len : 0;
      const std::int64_t distance = j - i - c.position_offset.value_or(corner);
      if (c.causal && distance > 0) continue;
      if (c.window_left.has_value() && -distance > *c.window_left) continue;
      if (c.window_right.has_value() && distance > *c.window_right) continue;
      return true;
    }
    return false;
  }
  /// Every block but that of the next rank is passed on.
  std::int64_t ring(const ContextPlan& plan, std::int64_t rank) const {
    const Case& c = data.problem();
    const auto next = static_cast<std::size_t>((rank + 1) % ranks);
    return batch() * (keys() - total_length(plan.keys[next])) * c.num_kv_heads *
           (c.head_dim + c.value_dim) * k_bytes();
  }
  /// And the sums of every block.
  std::int64_t ring_backward(const ContextPlan& plan, std::int64_t rank) const {
    const Case& c = data.problem();
    if (ranks == 1) return 0;
    return ring(plan, rank) +
           batch() * keys() * c.num_kv_heads * (c.head_dim + c.value_dim) * sum_bytes();
  }
  std::int64_t kv_heads() const {  // of each rank
    return std::max<std::int64_t>(1, data.problem().num_kv_heads / ranks);
  }
  std::int64_t ulysses() const {
    const Case& c = data.problem();
    const std::int64_t heads = c.num_heads / ranks;
    const std::int64_t there = own_queries * heads * c.head_dim * q_bytes() +
                               own_keys * kv_heads() * (c.head_dim + c.value_dim) * k_bytes();
    const std::int64_t back =
        (queries() - own_queries) * heads * (c.value_dim * q_bytes() + lse_bytes());
    return batch() * ((ranks - 1) * there + back);
  }
  std::int64_t ulysses_backward() const {
    const Case& c = data.problem();
    const std::int64_t heads = c.num_heads / ranks;
    const std::int64_t per_query =
        (c.head_dim + 2 * c.value_dim) * q_bytes() + lse_bytes() * (c.dlse ? 2 : 1);
    const std::int64_t there = own_queries * heads * per_query +
                               own_keys * kv_heads() * (c.head_dim + c.value_dim) * k_bytes();
    const std::int64_t gradient = c.num_kv_heads < ranks ? sum_bytes() : k_bytes();
    const std::int64_t back =
        (queries() - own_queries) * heads * c.head_dim * q_bytes() +
        (keys() - own_keys) * kv_heads() * (c.head_dim + c.value_dim) * gradient;
    return batch() * ((ranks - 1) * there + back);
  }
  /// Of dbias and dsinks.
  std::int64_t side_gradients(std::int64_t rank) const {
    std::int64_t bytes = 0;
    const std::int64_t size = data.q().dtype() == DType::kF64 ? 8 : 4;
    const auto add = [&](std::int64_t count) {
      const std::int64_t share = count * (rank + 1) / ranks - count * rank / ranks;
      bytes += size * (count - share + (ranks - 1) * share);
    };
    if (data.problem().bias.present) add(data.bias().num_elements());
    if (data.problem().sinks) add(data.problem().num_heads);
    return bytes;
  }
};

}  // namespace ladon::test
