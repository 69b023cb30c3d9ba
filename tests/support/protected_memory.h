// Memory that can be touched only while an Access to it lives.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "core/device_memory.h"

namespace ladon::test {

/// The memory of the pretended device.
class ProtectedMemory final : public DeviceMemory {
 public:
  ProtectedMemory();
  ~ProtectedMemory() override;

  DeviceId device() const noexcept override;
  void* allocate(std::size_t bytes) noexcept override;
  void free(void* data, std::size_t bytes) noexcept override;
  void copy(void* to, const void* from, std::size_t bytes) noexcept override;
  void zero(void* data, std::size_t bytes) noexcept override;
  void upload(void* to, const void* from, std::size_t bytes) override;
  void download(void* to, const void* from, std::size_t bytes) override;

  /// True for addresses that allocate() gave and free() has not taken back, with this many bytes
  /// behind them.
  bool owns(const void* data, std::size_t bytes = 1) const noexcept;
  std::size_t bytes_in_use() const noexcept;

  /// While one lives, the memory can be read and written.
  class Access {
   public:
    explicit Access(ProtectedMemory& memory) noexcept;
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

   private:
    ProtectedMemory& memory_;
  };

 private:
  void set_open(bool open) noexcept;

  std::byte* base_ = nullptr;
  mutable std::mutex mutex_;
  int accesses_ = 0;
  std::map<std::size_t, std::size_t> used_;  // offset -> bytes, rounded up
};

/// The one that pretended contexts share.
const std::shared_ptr<ProtectedMemory>& protected_memory();

}  // namespace ladon::test
