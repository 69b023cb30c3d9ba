// A page table for each sequence, over the pages of a shared pool.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cache/kinds.h"
#include "cache/kv_cache_impl.h"
#include "cache/page_pool.h"
#include "core/fail.h"
#include "core/integer.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "KvCache::paged";
constexpr std::int32_t kNone = -1;

using Table = std::vector<std::int32_t>;

class Paged final : public KvCache::Impl {
 public:
  Paged(std::shared_ptr<PagePool> pool, const KvCacheOptions& options)
      : Impl(options),
        pool_(std::move(pool)),
        tables_(static_cast<std::size_t>(options.batch)),
        tails_(tables_.size()) {
    refresh();
  }

  ~Paged() override {
    const auto held = pages().lock();
    for (Table& table : tables_) shorten(table, 0);
  }

  std::string_view kind() const noexcept override { return "paged"; }

  std::unique_ptr<Impl> fork(const Context&) const override {
    auto other = std::make_unique<Paged>(pool_, options_);
    std::vector<Table> tables = tables_;
    other->own(std::move(tables), lengths_);
    return other;
  }

  std::unique_ptr<Impl> reordered(const Context&,
                                  std::span<const std::int64_t> from) const override {
    KvCacheOptions options = options_;
    options.batch = static_cast<std::int64_t>(from.size());
    auto other = std::make_unique<Paged>(pool_, options);
    std::vector<Table> tables;
    std::vector<std::int64_t> lengths;
    tables.reserve(from.size());
    lengths.reserve(from.size());
    for (const std::int64_t b : from) {
      tables.push_back(tables_[index(b)]);
      lengths.push_back(lengths_[index(b)]);
    }
    other->own(std::move(tables), lengths);
    return other;
  }

  std::unique_ptr<Impl> empty_at(const Context&, std::span<const std::int64_t> first,
                                 std::span<const std::int64_t>) const override {
    if (std::any_of(first.begin(), first.end(), [](std::int64_t f) { return f != 0; })) {
      return nullptr;
    }
    return std::make_unique<Paged>(pool_, options_);
  }

  void reserve(const Context&, std::int64_t length) override {
    try {
      for (Table& table : tables_) table.reserve(useful(pages_for(length)));
    } catch (...) {
      refresh();  // some tables have moved
      throw;
    }
    refresh();
  }

  KvStorage& storage() noexcept override { return pages().storage(); }
  std::int64_t slot_of(std::int64_t sequence, std::int64_t token) const noexcept override {
    const std::int64_t size = pool_->page_size();
    return tables_[index(sequence)][index(token / size)] * size + token % size;
  }

  std::int64_t bytes_reserved() const noexcept override {
    std::int64_t count = 0;
    for (const Table& table : tables_) count += static_cast<std::int64_t>(table.size());
    return count * pages().page_bytes();
  }

  void publish_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids) override {
    constexpr std::string_view kPublish = "KvCache::publish_prefix";
    check_idle(kPublish);
    check_sequence(kPublish, sequence);
    if (static_cast<std::int64_t>(token_ids.size()) > length(sequence)) {
      fail(kPublish, "token_ids",
           "got " + std::to_string(token_ids.size()) + " of them, expected at most the " +
               std::to_string(length(sequence)) + " tokens that the sequence holds");
    }
    const auto held = pages().lock();
    pages().publish(tables_[index(sequence)], token_ids);
  }

  std::int64_t adopt_prefix(std::int64_t sequence,
                            std::span<const std::int64_t> token_ids) override {
    constexpr std::string_view kAdopt = "KvCache::adopt_prefix";
    check_idle(kAdopt);
    check_sequence(kAdopt, sequence);
    if (length(sequence) != 0) {
      fail(kAdopt, "sequence",
           "got one of " + std::to_string(length(sequence)) + " tokens, expected an empty one");
    }
    Table& table = tables_[index(sequence)];
    table.reserve(useful(token_ids.size() / static_cast<std::size_t>(pool_->page_size())));
    {
      const auto held = pages().lock();
      pages().adopt(token_ids, table);
    }
    lengths_[index(sequence)] = static_cast<std::int64_t>(table.size()) * pool_->page_size();
    refresh();
    return length(sequence);
  }

 private:
  /// What an append does to the last page of a sequence, where that is not full.
  struct Tail {
    std::int64_t claimed_end = 0;   // slots of it up to here are claimed; 0: none
    std::int32_t replaced = kNone;  // the shared page whose copy took its place
  };

  PagePool::Impl& pages() const noexcept { return pool_->impl(); }
  std::size_t pages_for(std::int64_t tokens) const noexcept {
    return index(ceil_div(tokens, pool_->page_size()));
  }
  /// A sequence never has more pages than there are: its table is no larger, or a
  /// length that no pool can hold would end as a lack of memory.
  std::size_t useful(std::size_t pages) const noexcept {
    return std::min(pages, index(pool_->num_pages()));
  }

  /// Takes over tables whose pages others hold.
  void own(std::vector<Table>&& tables, std::span<const std::int64_t> lengths) noexcept {
    {
      const auto held = pages().lock();
      for (std::size_t b = 0; b < tables.size(); ++b) {
        std::int64_t left = lengths[b];
        for (const std::int32_t page : tables[b]) {
          pages().add_owner(page, std::min(left, pool_->page_size()));
          left -= pool_->page_size();
        }
      }
    }
    tables_ = std::move(tables);
    std::copy(lengths.begin(), lengths.end(), lengths_.begin());
    refresh();
  }

  /// The last page goes first: of those that are kept, it is the first to be evicted.
  void shorten(Table& table, std::size_t count) noexcept {
    while (table.size() > count) {
      pages().release(table.back());
      table.pop_back();
    }
  }

  /// Claims the rest of each last page, or marks it for copying. Returns the pages that all wants
  /// together take.
  std::int64_t claim_tails(std::span<const std::int64_t> counts) noexcept {
    const std::int64_t size = pool_->page_size();
    std::int64_t wanted = 0;
    for (std::size_t b = 0; b < counts.size(); ++b) {
      if (counts[b] == 0) continue;
      const std::int64_t used = lengths_[b] % size;
      const std::int64_t end = std::min(size, used + counts[b]);
      if (used != 0 && pages().claim(tables_[b].back(), used, end)) {
        tails_[b].claimed_end = end;
      } else if (used != 0) {
        tails_[b].replaced = tables_[b].back();
        ++wanted;
      }
      wanted += static_cast<std::int64_t>(pages_for(lengths_[b] + counts[b]) - tables_[b].size());
    }
    return wanted;
  }

  void allocate_slots(const Context& context, std::string_view operation,
                      std::span<const std::int64_t> counts) override {
    for (std::size_t b = 0; b < counts.size(); ++b) {
      const std::size_t wanted = pages_for(lengths_[b] + counts[b]);
      if (wanted > tables_[b].capacity()) tables_[b].reserve(useful(2 * wanted));
    }
    const std::int64_t size = pool_->page_size();
    auto held = pages().lock();
    const std::int64_t wanted = claim_tails(counts);
    const std::int64_t available = pages().available();
    if (wanted > available) {
      for (Tail& tail : tails_) tail.replaced = kNone;  // nothing was replaced yet
      give_back_locked();
      held.unlock();
      fail(ErrorCode::kOutOfMemory, operation, "pool",
           "got " + std::to_string(available) + " free pages of " +
               std::to_string(pool_->num_pages()) + ", expected " + std::to_string(wanted));
    }
    for (std::size_t b = 0; b < counts.size(); ++b) {
      const std::int64_t end = lengths_[b] + counts[b];
      Table& table = tables_[b];
      const auto filled = [&](std::size_t page) {
        return std::min(size, end - static_cast<std::int64_t>(page) * size);
      };
      if (tails_[b].replaced != kNone) table.back() = pages().take(filled(table.size() - 1));
      while (counts[b] > 0 && table.size() < pages_for(end)) {
        table.push_back(pages().take(filled(table.size())));
      }
    }
    held.unlock();
    // What others hold too is read only: no lock is needed to copy it.
    for (std::size_t b = 0; b < counts.size(); ++b) {
      if (tails_[b].replaced == kNone) continue;
      const std::int32_t copy = tables_[b][index(lengths_[b] / size)];
      storage().copy_slots(context, storage(), tails_[b].replaced * size, copy * size,
                           lengths_[b] % size);
    }
  }

  void keep_slots(const Context&) noexcept override {
    const auto held = pages().lock();
    for (Tail& tail : tails_) {
      if (tail.replaced != kNone) pages().release(tail.replaced);
      tail = {};
    }
  }

  void release_slots() noexcept override {
    const auto held = pages().lock();
    give_back_locked();
  }

  void give_back_locked() noexcept {
    const std::int64_t size = pool_->page_size();
    for (std::size_t b = 0; b < tables_.size(); ++b) {
      Table& table = tables_[b];
      shorten(table, pages_for(lengths_[b]));
      if (tails_[b].replaced != kNone) {
        pages().release(table.back());
        table.back() = tails_[b].replaced;
      } else if (tails_[b].claimed_end != 0) {
        pages().give_back(table.back(), lengths_[b] % size, tails_[b].claimed_end);
      }
      tails_[b] = {};
    }
  }

  void drop_tail(std::int64_t sequence) noexcept override {
    const std::int64_t length = lengths_[index(sequence)];
    const std::int64_t used = length % pool_->page_size();
    Table& table = tables_[index(sequence)];
    const auto held = pages().lock();
    shorten(table, pages_for(length));
    if (used != 0) pages().drop_behind(table.back(), used);
  }

  KvSequenceView describe(std::int64_t sequence, std::int64_t length) const noexcept override {
    return {.length = length, .pages = tables_[index(sequence)].data()};
  }
  void set_layout(KvCacheView& view) const noexcept override {
    view.page_size = pool_->page_size();
  }

  std::shared_ptr<PagePool> pool_;
  std::vector<Table> tables_;  // of each sequence
  std::vector<Tail> tails_;    // during an append
};

}  // namespace

std::unique_ptr<KvCache::Impl> make_paged(const std::shared_ptr<PagePool>& pool,
                                          std::int64_t batch) {
  if (pool == nullptr) fail(kOperation, "pool", "got none, expected a PagePool");
  KvCacheOptions options = pool->options();
  options.batch = batch;
  return std::make_unique<Paged>(pool, checked_options(kOperation, options));
}

}  // namespace ladon
