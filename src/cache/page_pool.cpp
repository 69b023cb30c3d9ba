#include "cache/page_pool.h"

#include <string>

#include "core/fail.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "PagePool";

std::int64_t check_count(std::string_view name, std::int64_t value, std::int64_t least) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;  // page tables hold 32 bits
  if (value < least || value > kMost) {
    fail(kOperation, name,
         "got " + std::to_string(value) + ", expected " + std::to_string(least) + " to " +
             std::to_string(kMost));
  }
  return value;
}

}  // namespace

PagePool::Impl::Impl(const Context& context, const KvCacheOptions& options, std::int64_t page_size,
                     std::int64_t num_pages)
    : options_(checked_options(kOperation, options)),
      page_size_(check_count("page_size", page_size, 1)),
      storage_(
          KvStorage::make(context, options_, check_count("num_pages", num_pages, 0), page_size)),
      pages_(static_cast<std::size_t>(num_pages)),
      index_(num_pages, page_size) {
  free_.reserve(pages_.size());
  for (std::int64_t i = num_pages; i-- > 0;) free_.push_back(static_cast<std::int32_t>(i));
}

std::int64_t PagePool::Impl::page_bytes() const noexcept {
  return page_size_ * bytes_per_token(options_);
}

std::int32_t PagePool::Impl::take(std::int64_t filled) noexcept {
  if (free_.empty()) {
    ++evictions_;
    forget(first_kept_);
  }
  const std::int32_t number = free_.back();
  free_.pop_back();
  page(number).slots = {.owners = 1, .filled = filled};
  return number;
}

void PagePool::Impl::add_owner(std::int32_t number, std::int64_t used) noexcept {
  if (page(number).slots.owners == 0) unlink_kept(number);
  drop_behind(number, used);
  ++page(number).slots.owners;
}

void PagePool::Impl::release(std::int32_t number) noexcept {
  if (--page(number).slots.owners > 0) return;
  if (index_.has(number)) {
    push_kept(number);
  } else {
    free_.push_back(number);
  }
}

bool PagePool::Impl::claim(std::int32_t number, std::int64_t begin, std::int64_t end) noexcept {
  return !index_.has(number) && page(number).slots.claim(begin, end);
}

void PagePool::Impl::give_back(std::int32_t number, std::int64_t begin, std::int64_t end) noexcept {
  page(number).slots.give_back(begin, end);
}

void PagePool::Impl::drop_behind(std::int32_t number, std::int64_t end) noexcept {
  if (!index_.has(number)) page(number).slots.drop_behind(end);
}

void PagePool::Impl::push_kept(std::int32_t number) noexcept {
  page(number).previous_kept = last_kept_;
  page(number).next_kept = kNone;
  (last_kept_ == kNone ? first_kept_ : page(last_kept_).next_kept) = number;
  last_kept_ = number;
  ++num_kept_;
}

void PagePool::Impl::unlink_kept(std::int32_t number) noexcept {
  const Page& gone = page(number);
  (gone.previous_kept == kNone ? first_kept_ : page(gone.previous_kept).next_kept) = gone.next_kept;
  (gone.next_kept == kNone ? last_kept_ : page(gone.next_kept).previous_kept) = gone.previous_kept;
  --num_kept_;
}

void PagePool::Impl::forget(std::int32_t number) noexcept {
  index_.remove(number, [&](std::int32_t removed) {
    if (page(removed).slots.owners > 0) return;
    unlink_kept(removed);
    free_.push_back(removed);
  });
}

void PagePool::Impl::forget_kept() noexcept {
  while (first_kept_ != kNone) forget(first_kept_);
}

void PagePool::Impl::publish(std::span<const std::int32_t> table,
                             std::span<const std::int64_t> tokens) noexcept {
  const auto size = static_cast<std::size_t>(page_size_);
  std::int32_t parent = kNone;
  for (std::size_t i = 0; (i + 1) * size <= tokens.size(); ++i) {
    const std::span<const std::int64_t> own = tokens.subspan(i * size, size);
    const std::int32_t known = index_.find(parent, own);
    if (known == kNone) {
      if (index_.has(table[i])) return;  // already known, as something else
      index_.insert(table[i], parent, own);
    }
    parent = known == kNone ? table[i] : known;
  }
}

void PagePool::Impl::adopt(std::span<const std::int64_t> tokens,
                           std::vector<std::int32_t>& table) noexcept {
  const auto size = static_cast<std::size_t>(page_size_);
  ++lookups_;
  std::int32_t parent = kNone;
  for (std::size_t i = 0; (i + 1) * size <= tokens.size(); ++i) {
    parent = index_.find(parent, tokens.subspan(i * size, size));
    if (parent == kNone) return;
    add_owner(parent, page_size_);
    table.push_back(parent);
    tokens_found_ += page_size_;
  }
}

PagePool::Statistics PagePool::Impl::statistics() const {
  const auto held = lock();
  Statistics statistics;
  statistics.num_pages = num_pages();
  statistics.free_pages = static_cast<std::int64_t>(free_.size());
  statistics.kept_pages = num_kept_;
  for (const Page& one : pages_) {
    if (one.slots.owners > 0) ++statistics.used_pages;
    if (one.slots.owners > 1) ++statistics.shared_pages;
  }
  statistics.published_pages = index_.size();
  statistics.page_bytes = page_bytes();
  statistics.bytes = storage_.bytes();
  statistics.prefix_lookups = lookups_;
  statistics.prefix_tokens_found = tokens_found_;
  statistics.evictions = evictions_;
  return statistics;
}

PagePool::PagePool(const Context& context, const KvCacheOptions& options, std::int64_t page_size,
                   std::int64_t num_pages)
    : impl_(std::make_unique<Impl>(context, options, page_size, num_pages)) {}
PagePool::~PagePool() = default;
const KvCacheOptions& PagePool::options() const noexcept { return impl_->options(); }
std::int64_t PagePool::page_size() const noexcept { return impl_->page_size(); }
std::int64_t PagePool::num_pages() const noexcept { return impl_->num_pages(); }
DeviceId PagePool::device() const noexcept { return impl_->device(); }
PagePool::Statistics PagePool::statistics() const { return impl_->statistics(); }
void PagePool::forget_prefixes() noexcept {
  const auto held = impl_->lock();
  impl_->forget_kept();
}

}  // namespace ladon
