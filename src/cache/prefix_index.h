// Which pages hold which tokens: a lookup from (the page before, the tokens of this one) to a page.
//
// The page before stands for the whole prefix, so equal tokens after different prefixes are
// different entries, and an entry is found only by all tokens up to it: they are compared, not just
// their hash. All memory is taken at the start; nothing else can fail.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ladon {

class PrefixIndex {
 public:
  static constexpr std::int32_t kNone = -1;

  PrefixIndex(std::int64_t num_pages, std::int64_t page_size);

  /// The page with these tokens behind `parent` (kNone: at the start), or kNone.
  std::int32_t find(std::int32_t parent, std::span<const std::int64_t> tokens) const noexcept;
  /// `page` must not be in the index, `parent` must be (or be kNone).
  void insert(std::int32_t page, std::int32_t parent,
              std::span<const std::int64_t> tokens) noexcept;
  bool has(std::int32_t page) const noexcept { return node(page).present; }
  std::int64_t size() const noexcept { return size_; }

  /// Removes a page and all that follow it, which could no longer be found; calls
  /// removed(page) for each.
  template <class Removed>
  void remove(std::int32_t page, Removed&& removed) noexcept {
    std::int32_t at = page;
    for (;;) {
      while (node(at).first_child != kNone) at = node(at).first_child;
      const std::int32_t parent = node(at).parent;
      remove_leaf(at);
      removed(at);
      if (at == page) return;
      at = parent;
    }
  }

 private:
  struct Node {
    bool present = false;
    std::uint64_t hash = 0;
    std::int32_t next_in_bucket = kNone;
    std::int32_t parent = kNone;
    std::int32_t first_child = kNone;
    std::int32_t next_sibling = kNone;
    std::int32_t previous_sibling = kNone;
  };

  const Node& node(std::int32_t page) const noexcept {
    return nodes_[static_cast<std::size_t>(page)];
  }
  Node& node(std::int32_t page) noexcept { return nodes_[static_cast<std::size_t>(page)]; }
  std::int32_t& bucket(std::uint64_t hash) noexcept {
    return buckets_[hash & (buckets_.size() - 1)];
  }
  std::span<std::int64_t> tokens_of(std::int32_t page) noexcept;
  void remove_leaf(std::int32_t page) noexcept;

  std::size_t page_size_;
  std::int64_t size_ = 0;
  std::vector<Node> nodes_;            // by page
  std::vector<std::int64_t> tokens_;   // page_size of each page
  std::vector<std::int32_t> buckets_;  // a power of two of them
};

}  // namespace ladon
