// The memory of a device: where tensors, caches and workspaces get theirs.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "ladon/device.h"

namespace ladon {

/// Tensors keep it alive, so memory can be freed after the Context that made it has gone.
/// Thread-safe. Calls that cannot fail may still be under way on the device when they return; work
/// that a Context enqueues afterwards comes after them.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  virtual DeviceId device() const noexcept = 0;

  /// At least 64-byte aligned, content unspecified. Null where it cannot be had; bytes is not 0.
  virtual void* allocate(std::size_t bytes) noexcept = 0;
  virtual void free(void* data, std::size_t bytes) noexcept = 0;
  /// What can still be allocated, where the device tells. Throws Error where the device has failed,
  /// which is why it gives no memory then.
  virtual std::optional<std::size_t> free_bytes() const { return std::nullopt; }

  /// Within this memory; the two ranges do not overlap.
  virtual void copy(void* to, const void* from, std::size_t bytes) noexcept = 0;
  virtual void zero(void* data, std::size_t bytes) noexcept = 0;
  /// From and to the host's memory. Both wait until the host's side may be used again.
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;

 protected:
  DeviceMemory() = default;
};

/// "a size that fits the memory of cuda:0, of which 1024 bytes are free": for messages. Throws as
/// free_bytes() does.
std::string size_that_fits(const DeviceMemory& memory);

/// The device whose memory this is, where it can be told and is not the claimed one. Defined in
/// backends.cpp, the one file that knows all devices.
DeviceId owner_of(const void* data, DeviceId claimed) noexcept;

/// The host's memory, for all CPU Contexts and for tensors made without one.
const std::shared_ptr<DeviceMemory>& host_memory();

}  // namespace ladon
