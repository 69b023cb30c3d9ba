// A mutex that a forked child can use: fork() waits until no thread is inside, so that the child
// gets neither a lock that no thread will release nor a half-changed state behind it.
#pragma once

#include <mutex>

namespace ladon {

/// For std::lock_guard and std::unique_lock. A thread that holds one must neither make, destroy nor
/// lock another: fork() takes all of them, in any order.
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  friend struct ForkRegistry;

  std::mutex mutex_;
  // The list of all of them.
  ForkSafeMutex* previous_ = nullptr;
  ForkSafeMutex* next_ = nullptr;
};

}  // namespace ladon
