// The simple model that the random test of caches compares with: a sequence is a list of tokens,
// and a pool is a few sets of page numbers.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <list>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_support.h"

namespace ladon::test {

/// A token, and a digest of it and all before it. As in a real model, keys and values depend on the
/// whole prefix: pages that are found by the wrong prefix hold other numbers.
struct Token {
  std::int64_t id = 0;
  std::uint64_t digest = 0;
  bool operator==(const Token&) const = default;
};
using Tokens = std::vector<Token>;

inline void push_token(Tokens& tokens, std::int64_t id) {
  const std::uint64_t before = tokens.empty() ? 1 : tokens.back().digest;
  std::uint64_t digest = (before ^ static_cast<std::uint64_t>(id)) * 0x9e3779b97f4a7c15U;
  digest ^= digest >> 29U;
  tokens.push_back({id, digest * 0xbf58476d1ce4e5b9U});
}

inline std::vector<std::int64_t> ids_of(const Tokens& tokens, std::size_t count) {
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(tokens[i].id);
  return ids;
}

/// Number `i` of a token's key or value in one head. Seven bits and a power of two, and the first
/// is the largest: every storage holds it exactly, i8 too, so that the model knows each bit.
inline double number_of(const Token& token, bool value, std::int64_t head, std::int64_t i) {
  const auto shift = static_cast<unsigned>((value ? 31 : 0) + 13 * head + 7 * i) % 50U;
  const auto bits = static_cast<std::int64_t>((token.digest >> shift) & 0xffU);
  const double scale = std::ldexp(1, -static_cast<int>(token.digest & 3U));
  return (i == 0 ? 127.0 : static_cast<double>(std::min<std::int64_t>(bits, 254) - 127)) * scale;
}

/// Where a sequence of a view on the host does not hold these tokens from `first` on; empty where
/// it does.
inline std::string difference(const KvCacheView& view, std::size_t b, const Tokens& tokens,
                              std::int64_t first) {
  const KvSequenceView& sequence = view.sequences[b];
  if (sequence.length != static_cast<std::int64_t>(tokens.size()) - first) {
    return "sequence " + std::to_string(b) + " holds " + std::to_string(sequence.length) +
           " tokens";
  }
  for (std::int64_t j = 0; j < sequence.length; ++j) {
    const std::int64_t slot = slot_in(view, sequence, j);
    const Token& token = tokens[static_cast<std::size_t>(first + j)];
    for (std::int64_t head = 0; head < view.num_kv_heads; ++head) {
      for (const bool value : {false, true}) {
        const std::int64_t start = value ? slot * view.v_slot_stride + head * view.v_head_stride
                                         : slot * view.k_slot_stride + head * view.k_head_stride;
        const float* const scales = value ? view.v_scales : view.k_scales;
        const double scale =
            scales == nullptr
                ? 1
                : static_cast<double>(
                      scales[slot * view.scale_slot_stride + head * view.scale_head_stride]);
        for (std::int64_t i = 0; i < (value ? view.value_dim : view.head_dim); ++i) {
          const double got =
              load_element(value ? view.v : view.k, view.format.dtype, start + i) * scale;
          const double number = number_of(token, value, head, i);
          // The numbers are exact in every storage but fp8, which has four bits of them.
          const bool is_fp8 = view.format.dtype == DType::kF8E4M3;
          if (std::fabs(got - number) <= (is_fp8 ? std::fabs(number) / 16 + 0.001 : 0)) continue;
          return "sequence " + std::to_string(b) + ", token " + std::to_string(first + j) +
                 ", slot " + std::to_string(slot) + ": got " + std::to_string(got);
        }
      }
    }
  }
  return {};
}

using Table = std::vector<std::int32_t>;

/// Who owns which page, which are published under which whole prefix, and which of those are held
/// unowned, in the order in which they were left. It does not guess which page is taken next or
/// whether a shared page is copied: it is told, and says whether that could be.
class PoolModel {
 public:
  PoolModel(std::int64_t num_pages, std::int64_t page_size)
      : page_size_(static_cast<std::size_t>(page_size)) {
    for (std::int32_t page = 0; page < num_pages; ++page) free_.insert(page);
  }

  std::int64_t available() const { return static_cast<std::int64_t>(free_.size() + kept_.size()); }
  int owners(std::int32_t page) const { return owners_.contains(page) ? owners_.at(page) : 0; }
  bool is_published(std::int32_t page) const { return prefix_of_.contains(page); }

  void take(std::int32_t page) {
    if (free_.empty() && !kept_.empty()) {
      ++evictions_;
      forget(kept_.front());
    }
    EXPECT_TRUE(free_.erase(page) == 1) << "page " << page << " was taken and was not free";
    owners_[page] = 1;
  }
  void add_owner(std::int32_t page) {
    if (owners_[page]++ == 0) kept_.remove(page);
  }
  void release(std::int32_t page) {
    if (--owners_[page] > 0) return;
    owners_.erase(page);
    if (is_published(page)) {
      kept_.push_back(page);
    } else {
      free_.insert(page);
    }
  }
  /// The last page is left first.
  void release_from(const Table& table, std::size_t count) {
    for (std::size_t i = table.size(); i-- > count;) release(table[i]);
  }

  void publish(const Table& table, const std::vector<std::int64_t>& ids) {
    for (std::size_t i = 0; (i + 1) * page_size_ <= ids.size(); ++i) {
      const std::vector<std::int64_t> prefix = prefix_up_to(ids, i);
      if (published_.contains(prefix)) continue;
      if (is_published(table[i])) return;
      published_[prefix] = table[i];
      prefix_of_[table[i]] = prefix;
    }
  }
  /// The pages that the lookup must find.
  Table adopt(const std::vector<std::int64_t>& ids) {
    Table table;
    ++lookups_;
    for (std::size_t i = 0; (i + 1) * page_size_ <= ids.size(); ++i) {
      const auto found = published_.find(prefix_up_to(ids, i));
      if (found == published_.end()) break;
      add_owner(found->second);
      table.push_back(found->second);
      tokens_found_ += static_cast<std::int64_t>(page_size_);
    }
    return table;
  }
  void forget_kept() {
    while (!kept_.empty()) forget(kept_.front());
  }

  /// What is published can be found again, whichever cache holds it now: it must not be poisoned.
  void mark_published(std::vector<bool>& live) const {
    for (const auto& [page, prefix] : prefix_of_) {
      for (std::size_t i = 0; i < page_size_; ++i) {
        live[static_cast<std::size_t>(page) * page_size_ + i] = true;
      }
    }
  }

  void expect_equal(const PagePool::Statistics& got) const {
    std::int64_t shared = 0;
    for (const auto& [page, count] : owners_) shared += count > 1 ? 1 : 0;
    EXPECT_EQ(got.free_pages, static_cast<std::int64_t>(free_.size()));
    EXPECT_EQ(got.kept_pages, static_cast<std::int64_t>(kept_.size()));
    EXPECT_EQ(got.used_pages, static_cast<std::int64_t>(owners_.size()));
    EXPECT_EQ(got.num_pages, got.free_pages + got.kept_pages + got.used_pages);
    EXPECT_EQ(got.shared_pages, shared);
    EXPECT_EQ(got.published_pages, static_cast<std::int64_t>(published_.size()));
    EXPECT_EQ(got.prefix_lookups, lookups_);
    EXPECT_EQ(got.prefix_tokens_found, tokens_found_);
    EXPECT_EQ(got.evictions, evictions_);
  }

 private:
  std::vector<std::int64_t> prefix_up_to(const std::vector<std::int64_t>& ids,
                                         std::size_t page) const {
    return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>((page + 1) * page_size_)};
  }

  /// Unpublishes a page and all whose prefix goes on from its own.
  void forget(std::int32_t page) {
    const std::vector<std::int64_t> prefix = prefix_of_.at(page);
    for (auto at = published_.begin(); at != published_.end();) {
      const bool follows = at->first.size() >= prefix.size() &&
                           std::equal(prefix.begin(), prefix.end(), at->first.begin());
      if (!follows) {
        ++at;
        continue;
      }
      prefix_of_.erase(at->second);
      if (owners(at->second) == 0) {
        kept_.remove(at->second);
        free_.insert(at->second);
      }
      at = published_.erase(at);
    }
  }

  std::size_t page_size_;
  std::set<std::int32_t> free_;
  std::map<std::int32_t, int> owners_;
  std::map<std::vector<std::int64_t>, std::int32_t> published_;
  std::map<std::int32_t, std::vector<std::int64_t>> prefix_of_;
  std::list<std::int32_t> kept_;  // the first was left the longest ago
  std::int64_t lookups_ = 0;
  std::int64_t tokens_found_ = 0;
  std::int64_t evictions_ = 0;
};

}  // namespace ladon::test
