// What all kinds of caches share: lengths, checks, the two steps of an append, the accounts. A kind
// says in which slots tokens are, and finds slots for new ones.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cache/kv_storage.h"
#include "core/checks.h"
#include "core/kv_params.h"
#include "ladon/kv_cache.h"

namespace ladon {

/// What is to be appended against what a cache holds.
void check_append(const Operation& operation, const KvCacheOptions& options,
                  const ConstTensorView& k, const ConstTensorView& v,
                  std::span<const std::int64_t> new_lengths);

class KvCache::Impl {
 public:
  virtual ~Impl() = default;
  Impl& operator=(const Impl&) = delete;

  virtual std::string_view kind() const noexcept = 0;
  const KvCacheOptions& options() const noexcept { return options_; }
  std::int64_t length(std::int64_t sequence) const noexcept { return lengths_[index(sequence)]; }
  std::span<const std::int64_t> lengths() const noexcept { return lengths_; }
  /// The oldest token that is held.
  virtual std::int64_t first_held(std::int64_t) const noexcept { return 0; }
  virtual std::int64_t window_left() const noexcept;
  KvCacheView view() const noexcept;

  /// Writes new tokens behind the last, after the rotations in `steps`. On success commit() or
  /// abandon() must follow.
  void begin(const Context& context, std::string_view operation, const ConstTensorView& k,
             const ConstTensorView& v, std::span<const std::int64_t> new_lengths,
             const AppendSteps& steps = {});
  void commit(const Context& context) noexcept;
  void abandon() noexcept;

  /// Throws where an append has begun and not ended.
  void check_idle(std::string_view operation) const;
  DeviceId device() const noexcept { return storage().k.device(); }
  /// The Context of an operation must be of the cache's device.
  void check_context(const Context& context, std::string_view operation) const;
  void check_sequence(std::string_view operation, std::int64_t sequence) const;
  void truncate(std::int64_t sequence, std::int64_t length);
  void reset(std::int64_t sequence) noexcept;
  virtual void reserve(const Context&, std::int64_t) {}
  /// An independent cache with the same content.
  virtual std::unique_ptr<Impl> fork(const Context& context) const = 0;
  /// A cache of the same kind whose sequence b is this one's from[b].
  virtual std::unique_ptr<Impl> reordered(const Context& context,
                                          std::span<const std::int64_t> from) const = 0;

  /// For a file: a cache of this kind with empty sequences that stand at positions first[b], or
  /// null where the kind cannot do without the tokens before them.
  virtual std::unique_ptr<Impl> empty_at(const Context& context,
                                         std::span<const std::int64_t> first,
                                         std::span<const std::int64_t> lengths) const = 0;
  /// Slots for tokens that the caller writes into storage(); commit() or abandon() must follow.
  void begin_raw(const Context& context, std::string_view operation,
                 std::span<const std::int64_t> counts);
  virtual KvStorage& storage() noexcept = 0;
  const KvStorage& storage() const noexcept { return const_cast<Impl*>(this)->storage(); }
  /// The slot of a sequence's token: one that is held, or whose slot has been allocated.
  virtual std::int64_t slot_of(std::int64_t sequence, std::int64_t token) const noexcept = 0;

  /// visit(token, count, slot) for tokens [begin, end), as many at a time as have consecutive
  /// slots.
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

  /// Finds slots for counts[b] more tokens of each sequence, or throws and has changed nothing.
  virtual void allocate_slots(const Context& context, std::string_view operation,
                              std::span<const std::int64_t> counts) = 0;
  /// The slots are taken for good: lengths_ count the new tokens.
  virtual void keep_slots(const Context&) noexcept {}
  /// The slots are not wanted.
  virtual void release_slots() noexcept {}
  /// Tokens from the sequence's length on are gone.
  virtual void drop_tail(std::int64_t) noexcept {}
  /// The shortest length that truncate() can go back to.
  virtual std::int64_t shortest(std::int64_t) const noexcept { return 0; }
  /// Where tokens [first_held(sequence), length) are; those past its length are new.
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
  void set_counts(const Operation& operation, const ConstTensorView& k, const ConstTensorView& v,
                  std::span<const std::int64_t> new_lengths);
  void write_tokens(const Context& context, std::string_view operation, const ConstTensorView& k,
                    const ConstTensorView& v, const AppendSteps& steps);

  std::vector<KvSequenceView> views_;
};

}  // namespace ladon
