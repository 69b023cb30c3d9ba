#include "cache/prefix_index.h"

#include <algorithm>
#include <bit>

namespace ladon {
namespace {

std::uint64_t hash_of(std::int32_t parent, std::span<const std::int64_t> tokens) noexcept {
  // Multiply, then fold the high half down: every bit of a token reaches the low bits.
  const auto mix = [](std::uint64_t value) {
    value *= 0x9e3779b97f4a7c15U;
    return value ^ (value >> 32);
  };
  std::uint64_t hash = mix(static_cast<std::uint64_t>(parent) + 1);
  for (const std::int64_t token : tokens) hash = mix(hash ^ static_cast<std::uint64_t>(token));
  return hash;
}

}  // namespace

PrefixIndex::PrefixIndex(std::int64_t num_pages, std::int64_t page_size)
    : page_size_(static_cast<std::size_t>(page_size)),
      nodes_(static_cast<std::size_t>(num_pages)),
      tokens_(nodes_.size() * page_size_),
      buckets_(std::bit_ceil(std::max<std::size_t>(nodes_.size(), 1)), kNone) {}

std::span<std::int64_t> PrefixIndex::tokens_of(std::int32_t page) noexcept {
  return std::span(tokens_).subspan(static_cast<std::size_t>(page) * page_size_, page_size_);
}

std::int32_t PrefixIndex::find(std::int32_t parent,
                               std::span<const std::int64_t> tokens) const noexcept {
  auto& self = const_cast<PrefixIndex&>(*this);
  const std::uint64_t hash = hash_of(parent, tokens);
  for (std::int32_t page = self.bucket(hash); page != kNone; page = node(page).next_in_bucket) {
    if (node(page).hash == hash && node(page).parent == parent &&
        std::ranges::equal(self.tokens_of(page), tokens)) {
      return page;
    }
  }
  return kNone;
}

void PrefixIndex::insert(std::int32_t page, std::int32_t parent,
                         std::span<const std::int64_t> tokens) noexcept {
  Node& entry = node(page);
  entry = {.present = true, .hash = hash_of(parent, tokens), .parent = parent};
  std::ranges::copy(tokens, tokens_of(page).begin());
  entry.next_in_bucket = bucket(entry.hash);
  bucket(entry.hash) = page;
  if (parent != kNone) {
    entry.next_sibling = node(parent).first_child;
    if (entry.next_sibling != kNone) node(entry.next_sibling).previous_sibling = page;
    node(parent).first_child = page;
  }
  ++size_;
}

void PrefixIndex::remove_leaf(std::int32_t page) noexcept {
  Node& entry = node(page);
  std::int32_t* link = &bucket(entry.hash);
  while (*link != page) link = &node(*link).next_in_bucket;
  *link = entry.next_in_bucket;
  if (entry.previous_sibling != kNone) {
    node(entry.previous_sibling).next_sibling = entry.next_sibling;
  } else if (entry.parent != kNone) {
    node(entry.parent).first_child = entry.next_sibling;
  }
  if (entry.next_sibling != kNone) {
    node(entry.next_sibling).previous_sibling = entry.previous_sibling;
  }
  entry = {};
  --size_;
}

}  // namespace ladon
