// Context: the device, the threads and the kernels that a call uses. There is no global state.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "ladon/device.h"
#include "ladon/export.h"
#include "ladon/isa.h"

namespace ladon {

/// A host program's own threads. Implement it to make Ladon run on them instead of on its own.
class LADON_API Executor {
 public:
  virtual ~Executor() = default;

  /// How many bodies can run at once; at least 1. Must not change.
  virtual int concurrency() const noexcept = 0;

  /// Calls body(state, i) once for each i in [0, count), in any order, on any threads, and returns
  /// when all have returned. Bodies never throw. Called from many threads at once.
  virtual void run(int count, void (*body)(void* state, int index), void* state) = 0;
};

/// Most threads of a Context: more than any machine of today has, so that a larger number is a
/// mistake.
inline constexpr int kMaxThreads = 1024;

struct ContextOptions {
  /// Where calls run and their tensors live.
  Device device = Device::kCpu;
  /// Which of several; 0 for the CPU.
  int device_index = 0;
  /// For GPUs: a stream of the program's (a cudaStream_t) on which to enqueue; it must outlive the
  /// Context. Empty: the Context makes its own.
  std::optional<void*> stream{};
  /// Threads that one call may use, the caller's included. 0: one per CPU that this process may
  /// use (its affinity mask and its container's CPU quota). Ignored when `executor` is given.
  int num_threads = 0;
  /// Kernels to use. Empty: LADON_ISA if set, else the fastest that this machine can run.
  std::optional<Isa> isa{};
  /// The host's threads; must outlive the Context. Null: the Context starts its own, on the first
  /// call that has work for them.
  Executor* executor = nullptr;
  /// Ends long calls early. Called between pieces of a call's work, which take milliseconds, on the
  /// thread that made the call; what it throws (anything derived from std::exception) leaves that
  /// call. Caches, layers and their gradients are then as they were; outputs that the caller gave
  /// hold anything. Called from many threads at once where calls are. Not called where pieces run
  /// on a GPU, on the `executor`'s threads alone, or in what is short, such as an optimiser's step.
  std::function<void()> check_interrupt{};
  /// For CPUs: gives a token's output the same bits in a whole-sequence or training forward, in
  /// chunks of any size and token by token, over tensors, contiguous and paged caches of one dtype
  /// (GPUs always do). Calls over window caches throw Error (kUnsupported). Few rows are then
  /// computed by the kernels for many: docs/numerics.md has the cost. Other bits than without it.
  bool chunk_invariant = false;
};

/// Cheap to make, safe to use from many threads at once. Any number of threads gives the same bits;
/// kernels of different instruction sets, and with `chunk_invariant`, round differently.
class LADON_API Context {
 public:
  Context();
  explicit Context(const ContextOptions& options);
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  DeviceId device() const noexcept;
  int num_threads() const noexcept;
  Isa isa() const noexcept;
  /// Waits until all calls that were made with this Context have run. On the CPU they have by the
  /// time they return.
  void synchronize() const;

  class Impl;
  explicit Context(std::unique_ptr<Impl> impl) noexcept;
  /// For the library's own use.
  Impl& impl() const noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace ladon
