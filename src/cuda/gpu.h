// Gpu: what all Contexts of one GPU share: a memory pool, and the list of their streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace ladon::cuda {

/// Memory may be freed by one Context while kernels of another still read it. With one Context, its
/// stream's order makes that safe; with several, memory goes back to the pool by way of a stream
/// that first waits for all of them.
class Gpu {
 public:
  /// The GPU with this index; the same object while anything uses it. Throws Error.
  static std::shared_ptr<Gpu> of(int index);

  /// Whether this process has made a Context of it, and the first of which it has.
  static bool is_used(int index) noexcept;
  static std::optional<int> first_used() noexcept;

  explicit Gpu(int index);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  int index() const noexcept { return index_; }

  /// Lets a kernel use so much dynamic shared memory; never less than before, because launches of
  /// other sizes may be gathered. Throws Error.
  void allow_shared_memory(const void* kernel, std::size_t bytes);
  /// Whether the code of a kernel that may start early is Hopper's, in which it waits. Code from
  /// PTX of Ampere does not.
  bool waits_by_itself(const void* kernel);

  /// Streams of living Contexts.
  void add(cudaStream_t stream);
  void remove(cudaStream_t stream) noexcept;

  /// In the stream's order; null where there is not enough memory.
  void* allocate(std::size_t bytes, cudaStream_t stream) noexcept;
  /// After everything that any Context has enqueued.
  void free(void* data) noexcept;
  /// Between the two nothing is freed: work is gathered that no stream knows of yet.
  void hold_frees();
  void release_frees() noexcept;
  /// The system's, and the pool's unused memory.
  std::size_t free_bytes() const;
  /// Returns the pool's unused memory to the system.
  void trim() noexcept;

 private:
  void free_now(void* data) noexcept;

  const int index_;
  cudaMemPool_t pool_ = nullptr;
  cudaStream_t reclaim_ = nullptr;
  cudaEvent_t enqueued_ = nullptr;
  std::mutex mutex_;  // of what follows, and of recording and waiting for the event
  std::vector<cudaStream_t> streams_;
  int holds_ = 0;
  std::vector<void*> held_;                                    // freed when there is no hold
  std::unordered_map<const void*, std::size_t> shared_bytes_;  // that kernels may use
  std::unordered_map<const void*, bool> waits_;
};

}  // namespace ladon::cuda
