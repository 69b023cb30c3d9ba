#include <cstring>
#include <new>

#include "core/device_memory.h"
#include "core/huge_pages.h"

namespace ladon {
namespace {

constexpr std::align_val_t kAlignment{64};

class HostMemory final : public DeviceMemory {
 public:
  DeviceId device() const noexcept override { return {}; }

  void* allocate(std::size_t bytes) noexcept override {
    void* const data = ::operator new(bytes, kAlignment, std::nothrow);
    if (data != nullptr) prefer_huge_pages(data, bytes);
    return data;
  }
  void free(void* data, std::size_t) noexcept override { ::operator delete(data, kAlignment); }

  void copy(void* to, const void* from, std::size_t bytes) noexcept override {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  void zero(void* data, std::size_t bytes) noexcept override {
    if (bytes != 0) std::memset(data, 0, bytes);
  }
  void upload(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
};

}  // namespace

const std::shared_ptr<DeviceMemory>& host_memory() {
  static const std::shared_ptr<DeviceMemory> memory = std::make_shared<HostMemory>();
  return memory;
}

}  // namespace ladon
