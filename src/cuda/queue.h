// Queue: one stream of a GPU, and what operations need to enqueue their kernels on it.
//
// A kernel takes one params struct, by value, and is launched through Queue::launch(). Work that is
// enqueued runs in order, so scratch memory may be given back as soon as its last reader is
// enqueued: whoever takes it next writes it later. While a Graph records, everything is gathered
// instead, in the same order.
//
// The units of all kernels include this header, and nvcc reads it several times for each: what it
// does not need to know is in cuda/queue_resources.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/workspace.h"
#include "cuda/grid.h"
#include "cuda/held_list.h"
#include "cuda/kernel_set.h"

namespace ladon::cuda {

struct QueueResources;

class Queue {
 public:
  /// The resources must outlive it.
  explicit Queue(QueueResources& resources);

  int device_index() const noexcept { return device_index_; }
  int num_multiprocessors() const noexcept { return num_multiprocessors_; }
  /// The most that a block of any kernel may use, in bytes.
  std::size_t shared_memory() const noexcept { return static_cast<std::size_t>(shared_memory_); }
  /// Of the L2 cache, in bytes.
  std::int64_t l2_cache() const noexcept { return l2_cache_; }
  KernelSet kernels() const noexcept { return kernels_; }
  /// For temporaries of one call.
  WorkspacePool& scratch() noexcept;
  /// For lists that describe calls.
  Metadata& metadata() noexcept;
  /// Such a list, without pointers in it.
  HeldList hold(std::span<const std::byte> list);

  /// Throws Error where the program captures the stream: its graph would run kernels again over
  /// lists and scratch memory that other calls use by then.
  void refuse_capture() const;

  /// Throws Error where CUDA refuses the launch. A grid without blocks launches nothing.
  template <class Params>
  void launch(void (*kernel)(Params), const Grid& grid, Params params) {
    static_assert(sizeof(Params) <= 4096, "kernel parameters are limited to 4 KiB");
    launch_kernel(reinterpret_cast<const void*>(kernel), grid, &params, sizeof params);
  }

  /// Copies host memory to the device. The host's side may be used again when this returns.
  void upload(void* to, const void* from, std::size_t bytes);
  /// Within the device's memory.
  void copy(void* to, const void* from, std::size_t bytes);
  void zero(void* to, std::size_t bytes);
  /// Copies to the host, and waits. Throws Error while a Graph records.
  void download(void* to, const void* from, std::size_t bytes);
  /// Waits for all that was enqueued. Throws Error while a Graph records.
  void synchronize();

 private:
  void launch_kernel(const void* kernel, Grid grid, void* params, std::size_t bytes);

  QueueResources& resources_;
  const int device_index_;
  int num_multiprocessors_ = 1;
  int shared_memory_ = 0;
  int l2_cache_ = 0;
  const KernelSet kernels_;
};

/// A list of the host's, as kernels of one call see it.
template <class Element>
class HostList {
 public:
  HostList(Queue& queue, std::span<const Element> list) : held_(queue.hold(std::as_bytes(list))) {}

  const Element* data() const noexcept { return reinterpret_cast<const Element*>(held_.data()); }

 private:
  HeldList held_;
};

}  // namespace ladon::cuda
