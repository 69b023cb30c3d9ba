#include "cuda/pointer_owner.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "cuda/error.h"
#include "cuda/gpu.h"

namespace ladon::cuda {
namespace {

/// Memory that was found to be where a view said. Addresses of the host and of devices do not mix
/// within 2 MiB. A wrong entry, of memory that was freed since, hides a mistake and makes none.
class KnownOwners {
 public:
  bool has(const void* data, DeviceId owner) const noexcept {
    return entry_of(data).load(std::memory_order_relaxed) == value_of(data, owner);
  }
  void add(const void* data, DeviceId owner) noexcept {
    entry_of(data).store(value_of(data, owner), std::memory_order_relaxed);
  }

 private:
  static std::uint64_t block_of(const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) >> 21;
  }
  /// Never 0, which is an entry of nothing.
  static std::uint64_t value_of(const void* data, DeviceId owner) {
    const std::uint64_t place = owner.is_cpu() ? 1 : static_cast<std::uint64_t>(owner.index) + 2;
    return block_of(data) << 16 | place;
  }
  const std::atomic<std::uint64_t>& entry_of(const void* data) const {
    return entries_[block_of(data) * 0x9e3779b97f4a7c15ULL >> 54];
  }
  std::atomic<std::uint64_t>& entry_of(const void* data) {
    return entries_[block_of(data) * 0x9e3779b97f4a7c15ULL >> 54];
  }

  std::array<std::atomic<std::uint64_t>, 1024> entries_{};
};

// What is known of addresses is known for the whole process.
KnownOwners known_owners;

/// Some machines' GPUs can use all of the host's memory.
bool can_use_pageable(DeviceId device) {
  int can = 0;
  if (device.is_cpu()) return false;
  static_cast<void>(cudaDeviceGetAttribute(&can, cudaDevAttrPageableMemoryAccess, device.index));
  return can != 0;
}

}  // namespace

DeviceId owner_of(const void* data, DeviceId claimed) noexcept {
  const std::optional<int> first = Gpu::first_used();
  if (data == nullptr || !first || (!claimed.is_cpu() && !Gpu::is_used(claimed.index))) {
    return claimed;
  }
  if (known_owners.has(data, claimed)) return claimed;
  // On a GPU that is in use: another one would get a context of CUDA's by being asked.
  const DeviceScope scope(claimed.is_cpu() ? *first : claimed.index);
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return claimed;
  }
  const bool is_device = attributes.type == cudaMemoryTypeDevice;
  DeviceId owner = claimed;  // pinned and managed memory: both sides can use it
  if (is_device) owner = {Device::kCuda, attributes.device};
  if (attributes.type == cudaMemoryTypeUnregistered && !can_use_pageable(claimed)) owner = {};
  if (owner == claimed) known_owners.add(data, claimed);
  return owner;
}

}  // namespace ladon::cuda
