// Who may write where in memory that several sequences hold.
#pragma once

#include <cstdint>

namespace ladon {

/// A run of slots that fills from its start: a block of a contiguous cache, or a page. Owners read
/// no further than their own length, so one that shares the memory may still write behind it where
/// nobody has written before. That is what lets a fork go on without copying what both hold.
/// Guarded by the lock of whoever keeps it.
struct SharedRoom {
  std::int32_t owners = 0;
  std::int64_t filled = 0;  // slots that some owner has claimed

  /// One more owner, of the `length` tokens that one who is there holds. Where that is the only
  /// one, what forks that are gone have written behind is room again: or each later fork would
  /// copy.
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
  /// Takes a claim back, unless another owner has gone on behind it.
  void give_back(std::int64_t begin, std::int64_t end) noexcept {
    if (filled == end) filled = begin;
  }
  /// The only owner has dropped its tokens from `end` on; forks to come may write there.
  void drop_behind(std::int64_t end) noexcept {
    if (owners == 1) filled = end;
  }
};

}  // namespace ladon
