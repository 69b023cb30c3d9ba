#include "core/fork_safe_mutex.h"

#include <pthread.h>

#include "core/fail.h"

namespace ladon {

/// All mutexes, in a list that fork()'s handlers walk. Never destroyed: a child may be forked while
/// the program ends.
struct ForkRegistry {
  ForkRegistry() : registered(pthread_atfork(lock_all, unlock_all, unlock_all) == 0) {}

  static ForkRegistry& get() {
    static auto* const registry = new ForkRegistry;
    return *registry;
  }

  static void lock_all() {
    ForkRegistry& registry = get();
    registry.mutex.lock();
    for (ForkSafeMutex* each = registry.first; each != nullptr; each = each->next_) each->lock();
  }
  static void unlock_all() {
    ForkRegistry& registry = get();
    for (ForkSafeMutex* each = registry.first; each != nullptr; each = each->next_) each->unlock();
    registry.mutex.unlock();
  }

  std::mutex mutex;
  ForkSafeMutex* first = nullptr;
  const bool registered;
};

ForkSafeMutex::ForkSafeMutex() {
  ForkRegistry& registry = ForkRegistry::get();
  if (!registry.registered) {
    fail(ErrorCode::kOutOfMemory, "pthread_atfork", "handlers",
         "got no memory for them, expected some");
  }
  const std::lock_guard lock(registry.mutex);
  next_ = registry.first;
  if (next_ != nullptr) next_->previous_ = this;
  registry.first = this;
}

ForkSafeMutex::~ForkSafeMutex() {
  ForkRegistry& registry = ForkRegistry::get();
  const std::lock_guard lock(registry.mutex);
  if (next_ != nullptr) next_->previous_ = previous_;
  (previous_ != nullptr ? previous_->next_ : registry.first) = next_;
}

}  // namespace ladon
