#include "cuda/gpu.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <new>

#include "cuda/error.h"

namespace ladon::cuda {

namespace {

// Those of which a Context was made; bit 63 stands for all beyond.
std::atomic<std::uint64_t> used_gpus = 0;

std::uint64_t bit_of(int index) { return std::uint64_t{1} << std::min(index, 63); }

}  // namespace

std::optional<int> Gpu::first_used() noexcept {
  const std::uint64_t used = used_gpus.load(std::memory_order_relaxed);
  if (used == 0) return std::nullopt;
  return std::countr_zero(used);
}

bool Gpu::is_used(int index) noexcept {
  return (used_gpus.load(std::memory_order_relaxed) & bit_of(index)) != 0;
}

std::shared_ptr<Gpu> Gpu::of(int index) {
  // A GPU is one for the whole process, and so is what is known of it.
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Gpu>> gpus;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Gpu>& known = gpus[index];
  std::shared_ptr<Gpu> gpu = known.lock();
  if (gpu == nullptr) {
    gpu = std::make_shared<Gpu>(index);
    known = gpu;
  }
  return gpu;
}

Gpu::Gpu(int index) : index_(index) {
  const DeviceScope scope(index);
  check(scope.status(), "Context");
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = index;
  check(cudaMemPoolCreate(&pool_, &properties), "Context");
  // Unused memory stays in the pool: returning it to the system at every synchronisation, as pools
  // do by default, costs more than a kernel.
  std::uint64_t keep = UINT64_MAX;
  check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep), "Context");
  check(cudaStreamCreateWithFlags(&reclaim_, cudaStreamNonBlocking), "Context");
  check(cudaEventCreateWithFlags(&enqueued_, cudaEventDisableTiming), "Context");
  // CUDA does not work in a forked child: pointers must not be looked up there.
  static const int kForks = pthread_atfork(nullptr, nullptr, [] { used_gpus = 0; });
  static_cast<void>(kForks);
  used_gpus |= bit_of(index);
}

Gpu::~Gpu() {
  const DeviceScope scope(index_);
  static_cast<void>(cudaStreamSynchronize(reclaim_));
  static_cast<void>(cudaEventDestroy(enqueued_));
  static_cast<void>(cudaStreamDestroy(reclaim_));
  static_cast<void>(cudaMemPoolDestroy(pool_));
}

void Gpu::allow_shared_memory(const void* kernel, std::size_t bytes) {
  constexpr std::size_t kAlways = std::size_t{48} << 10;
  if (bytes <= kAlways) return;
  const std::lock_guard lock(mutex_);
  std::size_t& allowed = shared_bytes_[kernel];
  if (bytes <= allowed) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "launch");
  allowed = bytes;
}

bool Gpu::waits_by_itself(const void* kernel) {
  constexpr int kHopper = 90;
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = waits_.try_emplace(kernel, false);
  if (is_new) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "launch");
    found->second = attributes.ptxVersion >= kHopper;
  }
  return found->second;
}

void Gpu::add(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  streams_.push_back(stream);
}

void Gpu::remove(cudaStream_t stream) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found != streams_.end()) streams_.erase(found);
}

void* Gpu::allocate(std::size_t bytes, cudaStream_t stream) noexcept {
  const DeviceScope scope(index_);
  void* data = nullptr;
  if (cudaMallocFromPoolAsync(&data, bytes, pool_, stream) == cudaSuccess) return data;
  static_cast<void>(cudaGetLastError());
  return nullptr;
}

void Gpu::hold_frees() {
  const std::lock_guard lock(mutex_);
  ++holds_;
}

void Gpu::release_frees() noexcept {
  const DeviceScope scope(index_);
  const std::lock_guard lock(mutex_);
  if (--holds_ != 0) return;
  for (void* const data : held_) free_now(data);
  held_.clear();
}

void Gpu::free(void* data) noexcept {
  const DeviceScope scope(index_);
  const std::lock_guard lock(mutex_);
  if (holds_ == 0) return free_now(data);
  try {
    held_.push_back(data);
  } catch (const std::bad_alloc&) {
    // Lost until the process ends: it must not be freed while work is to come that uses it.
  }
}

void Gpu::free_now(void* data) noexcept {
  if (streams_.size() == 1) {
    static_cast<void>(cudaFreeAsync(data, streams_.front()));
    return;
  }
  for (const cudaStream_t stream : streams_) {
    static_cast<void>(cudaEventRecord(enqueued_, stream));
    static_cast<void>(cudaStreamWaitEvent(reclaim_, enqueued_, 0));
  }
  static_cast<void>(cudaFreeAsync(data, reclaim_));
}

std::size_t Gpu::free_bytes() const {
  const DeviceScope scope(index_);
  std::size_t free = 0;
  std::size_t all = 0;
  std::uint64_t reserved = 0;
  std::uint64_t used = 0;
  check(cudaMemGetInfo(&free, &all), "allocation");
  static_cast<void>(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved));
  static_cast<void>(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used));
  return free + static_cast<std::size_t>(reserved - used);
}

void Gpu::trim() noexcept {
  const DeviceScope scope(index_);
  static_cast<void>(cudaStreamSynchronize(reclaim_));
  static_cast<void>(cudaMemPoolTrimTo(pool_, 0));
}

}  // namespace ladon::cuda
