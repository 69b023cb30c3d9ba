// Copy-on-write bookkeeping of slots that several sequences share.
#pragma once

#include <cstdint>

namespace ladon {

/// A run of slots that fills from its start: a block of a contiguous cache, or a page. Owners read
/// no further than their own length, so an owner may append to shared slots that have not been
/// written yet. That is what lets a fork append without a copy. Guarded by its holder's lock.
struct SharedSlots {
  std::int32_t owners = 0;
  std::int64_t filled = 0;  // slots that some owner has claimed

  /// One more owner, of the first `length` tokens. Where there was only one, slots past them that
  /// former forks wrote are free again: otherwise each later fork would copy.
  void add_owner(std::int64_t length) noexcept {
    drop_behind(length);
    ++owners;
  }
  /// Claims slots [begin, end) for an owner whose tokens end at `begin`. False: copy first.
  bool claim(std::int64_t begin, std::int64_t end) noexcept {
    if (owners > 1 && filled != begin) return false;
    filled = end;
    return true;
  }
  /// Takes a claim back, unless another owner has appended after it.
  void give_back(std::int64_t begin, std::int64_t end) noexcept {
    if (filled == end) filled = begin;
  }
  /// The only owner has dropped its tokens from `end` on; forks to come may write there.
  void drop_behind(std::int64_t end) noexcept {
    if (owners == 1) filled = end;
  }
};

}  // namespace ladon
