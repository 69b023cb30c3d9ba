// What all kinds of caches share: lengths, checks, the two steps of an append, the accounts. A kind
// says where tokens lie and finds room for them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cache/kv_storage.h"
#include "ladon/kv_cache.h"

namespace ladon {

class KvCache::Impl {
 public:
  virtual ~Impl() = default;
  Impl& operator=(const Impl&) = delete;

  virtual std::string_view kind() const noexcept = 0;
  const KvCacheOptions& options() const noexcept { return options_; }
  std::int64_t length(std::int64_t sequence) const noexcept { return lengths_[index(sequence)]; }
  /// The oldest token that is held.
  virtual std::int64_t first_held(std::int64_t) const noexcept { return 0; }
  virtual std::int64_t window_left() const noexcept;
  KvCacheView view() const noexcept;

  /// Writes new tokens behind the last. On success commit() or abandon() must follow.
  void begin(std::string_view operation, const ConstTensorView& k, const ConstTensorView& v,
             std::span<const std::int64_t> new_lengths);
  void commit() noexcept;
  void abandon() noexcept;

  /// Throws where an append has begun and not ended.
  void check_idle(std::string_view operation) const;
  void check_sequence(std::string_view operation, std::int64_t sequence) const;
  void truncate(std::int64_t sequence, std::int64_t length);
  void reset(std::int64_t sequence) noexcept;
  virtual void reserve(std::int64_t) {}
  /// An independent cache with the same content.
  virtual std::unique_ptr<Impl> fork() const = 0;
  /// A cache of the same kind whose sequence b is this one's from[b].
  virtual std::unique_ptr<Impl> reordered(std::span<const std::int64_t> from) const = 0;

  /// For a file: a cache of this kind with empty sequences that stand at positions first[b], or
  /// null where the kind cannot do without the tokens before them.
  virtual std::unique_ptr<Impl> empty_at(std::span<const std::int64_t> first,
                                         std::span<const std::int64_t> lengths) const = 0;
  /// Room for tokens that someone else writes into storage(); commit() or abandon() must follow.
  void begin_raw(std::string_view operation, std::span<const std::int64_t> counts);
  virtual KvStorage& storage() noexcept = 0;
  const KvStorage& storage() const noexcept { return const_cast<Impl*>(this)->storage(); }
  /// Where token number `token` of a sequence lies: one that is held, or that there is room for.
  virtual std::int64_t slot_of(std::int64_t sequence, std::int64_t token) const noexcept = 0;

  /// visit(token, count, slot) for tokens [begin, end), as many at a time as have slots side by
  /// side.
  template <class Visit>
  void for_each_run(std::int64_t sequence, std::int64_t begin, std::int64_t end,
                    const Visit& visit) const {
    for (std::int64_t token = begin; token < end;) {
      const std::int64_t slot = slot_of(sequence, token);
      std::int64_t run = 1;
      while (token + run < end && slot_of(sequence, token + run) == slot + run) ++run;
      visit(token, run, slot);
      token += run;
    }
  }

  virtual void publish_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids);
  virtual std::int64_t adopt_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids);

  /// Of all sequences: those that are held, and those that were seen.
  std::int64_t tokens_held() const noexcept;
  std::int64_t tokens_seen() const noexcept;
  virtual std::int64_t bytes_reserved() const noexcept { return storage().bytes(); }

 protected:
  explicit Impl(const KvCacheOptions& options);
  Impl(const Impl&) = default;

  /// Finds room for counts[b] more tokens of each sequence, or throws and has changed nothing.
  virtual void make_room(std::string_view operation, std::span<const std::int64_t> counts) = 0;
  /// The room is taken for good: lengths_ count the new tokens.
  virtual void keep_room() noexcept {}
  /// The room is not wanted.
  virtual void give_back_room() noexcept {}
  /// Tokens from the sequence's length on are gone.
  virtual void drop_tail(std::int64_t) noexcept {}
  /// The shortest length that truncate() can go back to.
  virtual std::int64_t shortest(std::int64_t) const noexcept { return 0; }
  /// Where tokens [first_held(sequence), length) lie; those past its length are new.
  virtual KvSequenceView describe(std::int64_t sequence, std::int64_t length) const noexcept = 0;
  virtual void set_layout(KvCacheView&) const noexcept {}

  /// Brings the sequences' views, or one of them, up to date.
  void refresh() noexcept;
  void refresh(std::int64_t sequence) noexcept;
  static std::size_t index(std::int64_t sequence) noexcept {
    return static_cast<std::size_t>(sequence);
  }

  KvCacheOptions options_;
  std::vector<std::int64_t> lengths_;
  // New tokens of an append that has not ended. Kept between appends: decoding allocates nothing.
  std::vector<std::int64_t> counts_;
  bool busy_ = false;

 private:
  void set_counts(std::string_view operation, const ConstTensorView& k, const ConstTensorView& v,
                  std::span<const std::int64_t> new_lengths);
  void write_tokens(const ConstTensorView& k, const ConstTensorView& v);

  std::vector<KvSequenceView> views_;
};

}  // namespace ladon
