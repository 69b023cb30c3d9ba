// Recording: launches and copies in their order, gathered instead of enqueued, and then run as one
// CUDA graph.
//
// The list is written anew for every run. Where it has the same kernels as last time, the graph
// stays, and only those of its nodes change whose params do: a step of decoding has other lengths
// and positions, and everything else as before.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/step_recorder.h"
#include "cuda/grid.h"
#include "cuda/metadata.h"

namespace ladon::cuda {

class Recording {
 public:
  Recording(int device_index, std::shared_ptr<DeviceMemory> memory);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// Starts the list. Waits until the last run is over: it reads the lists that were uploaded.
  void begin();
  /// Enqueues what was gathered since.
  void run(cudaStream_t stream);

  // One step of the list each. They throw Error where another thread than the one that began calls.
  void add_kernel(const void* kernel, const Grid& grid, const void* params, std::size_t bytes);
  /// From the host's memory, which may be used again when this returns.
  void add_upload(void* to, const void* from, std::size_t bytes);
  void add_copy(void* to, const void* from, std::size_t bytes);
  void add_zero(void* to, std::size_t bytes);
  /// The same for callers that cannot fail: run() throws instead.
  void try_copy(void* to, const void* from, std::size_t bytes) noexcept;
  void try_zero(void* to, std::size_t bytes) noexcept;
  /// A step is missing: run() says so.
  void mark_incomplete() noexcept { is_incomplete_ = true; }

  /// Lists of this recording, at the same places in every run.
  Metadata& metadata() noexcept { return metadata_; }
  GraphStatistics statistics() const noexcept { return statistics_; }

 private:
  enum class Kind : std::uint8_t { kKernel, kUpload, kCopy, kZero };

  struct Step {
    Kind kind = Kind::kKernel;
    const void* kernel = nullptr;
    Grid grid;
    std::vector<std::byte> params;
    // Copies.
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t bytes = 0;
    // The host's side of an upload, pinned; `from` where it is one.
    std::byte* pinned = nullptr;
    std::size_t pinned_bytes = 0;

    cudaGraphNode_t node = nullptr;
    bool is_changed = false;
  };

  /// The next step as it was last time, or a new one. Throws as the others do.
  Step& upcoming();
  /// The next step, which was of this kind and kernel last time or makes the graph a new one.
  Step& next(Kind kind, const void* kernel);
  void add_transfer(Kind kind, void* to, const void* from, std::size_t bytes);
  void build();
  bool update();
  /// As the graph, or where CUDA cannot make one, step by step: caches count on the steps by now.
  void enqueue(cudaStream_t stream);
  static cudaError_t enqueue_step(const Step& step, cudaStream_t stream);
  static cudaError_t add_node(cudaGraph_t graph, Step& step);
  cudaError_t change_node(Step& step) const;
  void discard_graph() noexcept;

  const int device_index_;
  Metadata metadata_;
  cudaEvent_t finished_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  std::vector<Step> steps_;
  std::size_t num_steps_ = 0;  // of this run
  bool is_same_graph_ = false;
  std::thread::id recorder_;
  std::atomic<bool> is_incomplete_ = false;
  GraphStatistics statistics_;
};

}  // namespace ladon::cuda
