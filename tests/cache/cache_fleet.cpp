#include "cache/cache_fleet.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>

namespace ladon::test {
namespace {

bool is_copied(const Table& old, const Table& now) {
  return !old.empty() && old.back() != now[old.size() - 1];
}

std::int64_t longest_of(const std::vector<Tokens>& sequences) {
  std::size_t longest = 0;
  for (const Tokens& tokens : sequences) longest = std::max(longest, tokens.size());
  return static_cast<std::int64_t>(longest);
}

}  // namespace

Fleet::Fleet(const Context& context, const FleetOptions& options)
    : context_(context), options_(options) {
  if (options.kind != "paged") return;
  pool_ =
      std::make_shared<PagePool>(context_, cache_options(0), options.page_size, options.num_pages);
  model_.emplace(options.num_pages, options.page_size);
}

KvCacheOptions Fleet::cache_options(std::int64_t batch) const {
  return {.batch = batch,
          .num_kv_heads = 2,
          .head_dim = 3,
          .value_dim = 2,
          .num_heads = 4,
          .format = options_.dtype};
}

std::size_t Fleet::pages_for(std::int64_t tokens) const {
  return static_cast<std::size_t>((tokens + options_.page_size - 1) / options_.page_size);
}

std::vector<Table> Fleet::tables_in(const KvCacheView& view) const {
  std::vector<Table> tables(view.sequences.size());
  for (std::size_t b = 0; paged() && b < tables.size(); ++b) {
    const KvSequenceView& sequence = view.sequences[b];
    tables[b].assign(sequence.pages, sequence.pages + pages_for(sequence.length));
  }
  return tables;
}

void Fleet::own_all(const std::vector<Table>& tables) {
  for (const Table& table : tables) {
    for (const std::int32_t page : table) model_->add_owner(page);
  }
}

void Fleet::release_all(const std::vector<Table>& tables) {
  for (const Table& table : tables) {
    if (paged()) model_->release_from(table, 0);
  }
}

// ---- operations ---------------------------------------------------------------------------------

void Fleet::add(std::int64_t batch) {
  const KvCacheOptions wanted = cache_options(batch);
  KvCache cache = paged() ? KvCache::paged(pool_, batch)
                  : options_.kind == "window"
                      ? KvCache::window(context_, wanted, options_.window_left, options_.spare)
                      : KvCache::contiguous(context_, wanted, options_.capacity);
  const auto count = static_cast<std::size_t>(batch);
  members_.push_back({std::move(cache), std::vector<Tokens>(count),
                      std::vector<std::int64_t>(count, 0), options_.capacity,
                      std::vector<Table>(count)});
}

void Fleet::remove(std::size_t at) {
  release_all(members_[at].tables);
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(at));
}

void Fleet::fork(std::size_t at) {
  const Member& old = members_[at];
  Member made{old.cache.fork(context_), old.tokens, old.first, old.capacity, old.tables};
  own_all(made.tables);
  members_.push_back(std::move(made));
}

void Fleet::reorder(Member& member, const std::vector<std::int64_t>& from) {
  member.cache.reorder(context_, from);
  const auto picked = [&](const auto& of_each) {
    std::decay_t<decltype(of_each)> result;
    for (const std::int64_t b : from) result.push_back(of_each[static_cast<std::size_t>(b)]);
    return result;
  };
  member.tokens = picked(member.tokens);
  member.first = picked(member.first);
  const std::vector<Table> old = std::exchange(member.tables, picked(member.tables));
  own_all(member.tables);
  release_all(old);
}

bool Fleet::append(Member& member, const Chunk& chunk) {
  const bool ran = expect_room(member, chunk, [&] {
    member.cache.append(context_, chunk.k_view, chunk.v_view, chunk.lengths());
  });
  if (!ran) return false;
  const std::vector<Table> old = std::exchange(member.tables, tables_in(member.cache.view()));
  take_all(old, member.tables, chunk);
  for (std::size_t b = 0; b < old.size(); ++b) {
    if (is_copied(old[b], member.tables[b])) model_->release(old[b].back());
  }
  member.tokens = chunk.after;
  for (std::size_t b = 0; options_.kind == "window" && b < member.first.size(); ++b) {
    const std::int64_t past = options_.window_left + options_.spare;
    member.first[b] = std::max(member.first[b], member.length(b) - past);
  }
  grow(member);
  return true;
}

bool Fleet::abandon(Member& member, const Chunk& chunk, const std::function<void()>& during) {
  std::vector<Table> tables;
  const bool ran = expect_room(member, chunk, [&] {
    const KvAppend append(context_, member.cache, chunk.k_view, chunk.v_view, chunk.lengths());
    const HostView host = host_view(context_, append.view());
    tables = tables_in(host.view);
    for (std::size_t b = 0; b < chunk.after.size(); ++b) {
      EXPECT_EQ(difference(host.view, b, chunk.after[b], member.first[b]), "");
    }
    during();
  });
  if (!ran) return false;
  take_all(member.tables, tables, chunk);
  for (std::size_t b = 0; paged() && b < tables.size(); ++b) {
    const Table& old = member.tables[b];
    model_->release_from(tables[b], old.size());
    if (is_copied(old, tables[b])) model_->release(tables[b][old.size() - 1]);
  }
  return true;
}

void Fleet::truncate(Member& member, std::size_t b, std::int64_t length) {
  member.cache.truncate(static_cast<std::int64_t>(b), length);
  forget_from(member, b, length);
}

std::int64_t Fleet::shortest(const Member& member, std::size_t b) const {
  return member.first[b] == 0 ? 0 : member.first[b] + options_.window_left;
}

void Fleet::reset(Member& member, std::size_t b) {
  member.cache.reset(static_cast<std::int64_t>(b));
  forget_from(member, b, 0);
}

void Fleet::reset(Member& member) {
  member.cache.reset();
  for (std::size_t b = 0; b < member.tokens.size(); ++b) forget_from(member, b, 0);
}

void Fleet::reserve(Member& member, std::int64_t length) {
  if (options_.capacity != 0 && length > options_.capacity) {
    expect_refused([&] { member.cache.reserve(context_, length); });
    return;
  }
  member.cache.reserve(context_, length);
  if (options_.kind == "contiguous") member.capacity = std::max(member.capacity, length);
}

bool Fleet::copy_by_file(Member& from, Member& to, const std::filesystem::path& path) {
  from.cache.save(context_, path);
  std::size_t wanted = 0;
  for (const Table& table : from.tables) wanted += table.size();
  if (paged() && static_cast<std::int64_t>(wanted) > model_->available()) {
    expect_refused([&] { to.cache.load(context_, path); }, ErrorCode::kOutOfMemory);
    return false;
  }
  to.cache.load(context_, path);
  const std::vector<Table> old = std::exchange(to.tables, tables_in(to.cache.view()));
  for (const Table& table : to.tables) {
    for (const std::int32_t page : table) model_->take(page);
  }
  release_all(old);
  to.tokens = from.tokens;
  to.first = from.first;
  grow(to);
  return true;
}

void Fleet::publish(Member& member, std::size_t b, std::size_t count) {
  const std::vector<std::int64_t> ids = ids_of(member.tokens[b], count);
  member.cache.publish_prefix(static_cast<std::int64_t>(b), ids);
  model_->publish(member.tables[b], ids);
}

void Fleet::adopt(Member& member, std::size_t b, const Tokens& wanted) {
  const std::vector<std::int64_t> ids = ids_of(wanted, wanted.size());
  const std::int64_t found = member.cache.adopt_prefix(static_cast<std::int64_t>(b), ids);
  member.tables[b] = model_->adopt(ids);
  EXPECT_EQ(found, static_cast<std::int64_t>(member.tables[b].size()) * options_.page_size);
  member.tokens[b] = Tokens(wanted.begin(), wanted.begin() + found);
}

void Fleet::forget_prefixes() {
  pool_->forget_prefixes();
  model_->forget_kept();
}

// ---- what they do to the model ------------------------------------------------------------------

/// Tells the pool's model which pages an append took.
void Fleet::take_all(const std::vector<Table>& old, const std::vector<Table>& now,
                     const Chunk& chunk) {
  for (std::size_t b = 0; paged() && b < now.size(); ++b) {
    if (is_copied(old[b], now[b])) {
      const std::int32_t page = old[b].back();
      EXPECT_TRUE(chunk.counts[b] > 0 && (model_->owners(page) > 1 || model_->is_published(page)))
          << "page " << page << " was copied for nothing";
      model_->take(now[b][old[b].size() - 1]);
    }
    for (std::size_t i = old[b].size(); i < now[b].size(); ++i) model_->take(now[b][i]);
  }
}

/// The least and the most pages that an append can take: a last page that others hold too is copied
/// where one of them has gone on, and may be where one ever had.
std::pair<std::int64_t, std::int64_t> Fleet::wanted_pages(const Member& member,
                                                          const Chunk& chunk) const {
  std::int64_t least = 0;
  std::int64_t may_be = 0;
  for (std::size_t b = 0; paged() && b < chunk.after.size(); ++b) {
    const std::int64_t length = member.length(b);
    const std::size_t pages = member.tables[b].size();
    least += static_cast<std::int64_t>(pages_for(length + chunk.counts[b]) - pages);
    if (chunk.counts[b] == 0 || length % options_.page_size == 0) continue;
    const std::int32_t page = member.tables[b].back();
    if (model_->is_published(page) || is_ahead(page, pages - 1, length)) {
      ++least;
    } else if (model_->owners(page) > 1) {
      ++may_be;
    }
  }
  return {least, least + may_be};
}

/// Whether some sequence that has this page is longer.
bool Fleet::is_ahead(std::int32_t page, std::size_t index, std::int64_t length) const {
  for (const Member& member : members_) {
    for (std::size_t b = 0; b < member.tables.size(); ++b) {
      const Table& table = member.tables[b];
      if (table.size() > index && table[index] == page && member.length(b) > length) return true;
    }
  }
  return false;
}

bool Fleet::expect_room(const Member& member, const Chunk& chunk,
                        const std::function<void()>& call) {
  if (options_.capacity != 0 && longest_of(chunk.after) > options_.capacity) {
    expect_refused(call);
    return false;
  }
  const auto [least, most] = wanted_pages(member, chunk);
  try {
    call();
    EXPECT_TRUE(!paged() || least <= model_->available()) << least << " pages appeared";
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory) << error.what();
    EXPECT_TRUE(paged() && most > model_->available()) << error.what();
    return false;
  }
}

void Fleet::grow(Member& member) const {
  const std::int64_t longest = longest_of(member.tokens);
  if (options_.kind != "contiguous" || longest <= member.capacity) return;
  const auto space = static_cast<std::uint64_t>(std::max<std::int64_t>(longest, 64));
  member.capacity = static_cast<std::int64_t>(std::bit_ceil(space));
}

void Fleet::forget_from(Member& member, std::size_t b, std::int64_t length) {
  member.tokens[b].resize(static_cast<std::size_t>(length));
  member.first[b] = std::min(member.first[b], length);
  if (!paged()) return;
  model_->release_from(member.tables[b], pages_for(length));
  member.tables[b].resize(pages_for(length));
}

// ---- checks -------------------------------------------------------------------------------------

void Fleet::check() {
  poison();
  for (const Member& member : members_) check_member(member);
  if (paged()) check_pages();
}

void Fleet::poison() {
  // Forks of contiguous caches share a block, which may be one's no longer: by address.
  std::map<const void*, std::pair<KvCacheView, std::vector<bool>>> memories;
  for (const Member& member : members_) {
    const KvCacheView view = member.cache.view();
    if (view.num_slots == 0) continue;
    auto& [memory, live] = memories[view.k];
    memory = view;
    live.resize(static_cast<std::size_t>(view.num_slots), false);
    for (const KvSequenceView& sequence : view.sequences) {
      for (std::int64_t j = 0; j < sequence.length; ++j) {
        live[static_cast<std::size_t>(slot_in(view, sequence, j))] = true;
      }
    }
  }
  for (auto& [address, memory] : memories) {
    if (paged()) model_->mark_published(memory.second);
    poison_slots(context_, memory.first, memory.second);
  }
}

void Fleet::check_member(const Member& member) const {
  const KvCache& cache = member.cache;
  const HostView host = host_view(context_, cache.view());
  const KvCacheView& view = host.view;
  const KvCacheOptions options = cache_options(cache.batch());
  ASSERT_EQ(view.sequences.size(), member.tokens.size());
  std::int64_t seen = 0;
  std::int64_t held = 0;
  for (std::size_t b = 0; b < member.tokens.size(); ++b) {
    const auto sequence = static_cast<std::int64_t>(b);
    EXPECT_EQ(cache.length(sequence), member.length(b));
    EXPECT_EQ(cache.held(sequence), member.length(b) - member.first[b]);
    EXPECT_EQ(difference(view, b, member.tokens[b], member.first[b]), "");
    seen += member.length(b);
    held += member.length(b) - member.first[b];
  }
  EXPECT_EQ(tables_in(view), member.tables);
  const bool scaled = options.format.scaled;
  const std::int64_t row =
      5 * static_cast<std::int64_t>(size_of(options.format.dtype)) + (scaled ? 8 : 0);
  EXPECT_EQ(cache.bytes_used(), held * 2 * row);
  EXPECT_EQ(cache.mha_bytes(), seen * 4 * row);
  EXPECT_DOUBLE_EQ(
      cache.reduction(),
      seen == 0 ? 0 : 1 - static_cast<double>(held * 2) / static_cast<double>(seen * 4));
  std::int64_t slots = member.capacity * cache.batch();
  if (options_.kind == "window")
    slots = (options_.window_left + options_.spare + 1) * cache.batch();
  for (const Table& table : member.tables) {
    slots += static_cast<std::int64_t>(table.size()) * options_.page_size;
  }
  EXPECT_EQ(cache.bytes_reserved(), slots * 2 * row);
}

/// Counts the pages in all tables anew, whatever the model thinks of owners.
void Fleet::check_pages() const {
  struct Use {
    std::size_t index;
    std::vector<Token> tokens;  // as many as the longest has
    int count;
  };
  std::map<std::int32_t, Use> uses;
  const auto size = static_cast<std::size_t>(options_.page_size);
  for (const Member& member : members_) {
    const std::vector<Table> tables = tables_in(member.cache.view());
    for (std::size_t b = 0; b < tables.size(); ++b) {
      for (std::size_t i = 0; i < tables[b].size(); ++i) {
        const auto begin = member.tokens[b].begin() + static_cast<std::ptrdiff_t>(i * size);
        const auto end =
            begin + static_cast<std::ptrdiff_t>(std::min(size, member.tokens[b].size() - i * size));
        Use mine{i, {begin, end}, 1};
        const auto [at, is_new] = uses.emplace(tables[b][i], mine);
        if (is_new) continue;
        Use& other = at->second;
        const std::size_t common = std::min(mine.tokens.size(), other.tokens.size());
        EXPECT_TRUE(
            other.index == i &&
            std::equal(begin, begin + static_cast<std::ptrdiff_t>(common), other.tokens.begin()))
            << "page " << tables[b][i] << " is held for different tokens";
        if (mine.tokens.size() > other.tokens.size()) other.tokens = mine.tokens;
        ++other.count;
      }
    }
  }
  const PagePool::Statistics statistics = pool_->statistics();
  std::int64_t shared = 0;
  for (const auto& [page, use] : uses) shared += use.count > 1 ? 1 : 0;
  EXPECT_EQ(statistics.used_pages, static_cast<std::int64_t>(uses.size()));
  EXPECT_EQ(statistics.shared_pages, shared);
  EXPECT_EQ(statistics.num_pages, options_.num_pages);
  model_->expect_equal(statistics);
}

}  // namespace ladon::test
