// Fleet: several caches, forks of each other or not, and the model of what they must hold. Each
// operation is done to both; check() compares everything that can be seen of them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_model.h"
#include "ladon/error.h"

namespace ladon::test {

/// One cache and its model.
struct Member {
  KvCache cache;
  std::vector<Tokens> tokens;       // all that each sequence has seen
  std::vector<std::int64_t> first;  // the oldest that it holds
  std::int64_t capacity = 0;        // contiguous: slots of each sequence
  std::vector<Table> tables;        // paged

  std::int64_t length(std::size_t b) const { return static_cast<std::int64_t>(tokens[b].size()); }
};

/// New tokens of each sequence, and the views to append them by.
struct Chunk {
  std::vector<Tokens> after;  // the sequences with them
  std::vector<std::int64_t> counts;
  bool with_lengths = true;
  Tensor k{}, v{};  // wider than what is appended: rows are not contiguous
  ConstTensorView k_view{}, v_view{};

  std::span<const std::int64_t> lengths() const {
    return with_lengths ? std::span<const std::int64_t>(counts) : std::span<const std::int64_t>();
  }
};

struct FleetOptions {
  std::string kind;
  DType dtype = DType::kF32;
  std::int64_t page_size = 0, num_pages = 0;
  std::int64_t window_left = 0, spare = 0;
  std::int64_t capacity = 0;  // contiguous; 0: grows
};

class Fleet {
 public:
  /// On the Context's device; the Context must outlive it.
  Fleet(const Context& context, const FleetOptions& options);

  const FleetOptions& options() const { return options_; }
  bool paged() const { return pool_ != nullptr; }
  std::vector<Member>& members() { return members_; }
  /// What the model says of pages; paged fleets alone.
  PagePool& pool() { return *pool_; }
  KvCacheOptions cache_options(std::int64_t batch) const;

  void add(std::int64_t batch);
  void remove(std::size_t at);
  void fork(std::size_t at);
  void reorder(Member& member, const std::vector<std::int64_t>& from);
  /// Where there is no space, sees the append refused. Returns whether it ran.
  bool append(Member& member, const Chunk& chunk);
  /// An append that is never committed; `during` runs before its end.
  bool abandon(Member& member, const Chunk& chunk, const std::function<void()>& during);
  void truncate(Member& member, std::size_t b, std::int64_t length);
  /// The shortest length that a sequence can be cut to.
  std::int64_t shortest(const Member& member, std::size_t b) const;
  void reset(Member& member, std::size_t b);
  void reset(Member& member);
  void reserve(Member& member, std::int64_t length);
  /// Saves one and loads the file into another of as many sequences; may be the same.
  bool copy_by_file(Member& from, Member& to, const std::filesystem::path& path);
  void publish(Member& member, std::size_t b, std::size_t count);
  void adopt(Member& member, std::size_t b, const Tokens& wanted);
  void forget_prefixes();

  /// Poisons what is unowned, then compares everything.
  void check();

 private:
  bool expect_room(const Member& member, const Chunk& chunk, const std::function<void()>& call);
  std::pair<std::int64_t, std::int64_t> wanted_pages(const Member& member,
                                                     const Chunk& chunk) const;
  bool is_ahead(std::int32_t page, std::size_t index, std::int64_t length) const;
  void take_all(const std::vector<Table>& old, const std::vector<Table>& now, const Chunk& chunk);
  void own_all(const std::vector<Table>& tables);
  void release_all(const std::vector<Table>& tables);
  void grow(Member& member) const;
  void forget_from(Member& member, std::size_t b, std::int64_t length);
  std::size_t pages_for(std::int64_t tokens) const;
  std::vector<Table> tables_in(const KvCacheView& view) const;

  void poison();
  void check_member(const Member& member) const;
  void check_pages() const;

  const Context& context_;
  FleetOptions options_;
  std::shared_ptr<PagePool> pool_;
  std::optional<PoolModel> model_;
  std::vector<Member> members_;
};

/// Fails the test unless the call throws Error with this code.
template <class Call>
void expect_refused(const Call& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
    ADD_FAILURE() << "was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
  }
}

}  // namespace ladon::test
