#include "support/protected_memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "support/pretended_device.h"

namespace ladon::test {
namespace {

constexpr std::size_t kReserved = std::size_t{1} << 32;  // addresses, not memory
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kGap = 64;  // between two allocations: a stray write hits nothing else

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "pretended device: %s\n", what);
  std::abort();
}

}  // namespace

ProtectedMemory::ProtectedMemory() {
  void* const base =
      mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) die("cannot reserve addresses");
  base_ = static_cast<std::byte*>(base);
}

ProtectedMemory::~ProtectedMemory() { munmap(base_, kReserved); }

DeviceId ProtectedMemory::device() const noexcept { return kPretendedDevice; }

void* ProtectedMemory::allocate(std::size_t bytes) noexcept {
  const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment + kGap;
  std::size_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [begin, used] : used_) {
      if (begin - offset >= size) break;
      offset = begin + used;
    }
    if (size > kReserved - offset) return nullptr;
    used_.emplace(offset, size);
  }
  const Access access(*this);
  std::memset(base_ + offset, 0xFF, size);  // NaN, whatever the dtype
  return base_ + offset;
}

void ProtectedMemory::free(void* data, std::size_t) noexcept {
  const std::lock_guard lock(mutex_);
  if (used_.erase(static_cast<std::size_t>(static_cast<std::byte*>(data) - base_)) != 1) {
    die("freed what was not allocated");
  }
}

void ProtectedMemory::copy(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  if (!owns(to, bytes) || !owns(from, bytes)) die("copy: got memory that is not the device's");
  const Access access(*this);
  std::memcpy(to, from, bytes);
}

void ProtectedMemory::zero(void* data, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  if (!owns(data, bytes)) die("zero: got memory that is not the device's");
  const Access access(*this);
  std::memset(data, 0, bytes);
}

void ProtectedMemory::upload(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (!owns(to, bytes) || owns(from)) die("upload: got memory of the wrong side");
  const Access access(*this);
  std::memcpy(to, from, bytes);
}

void ProtectedMemory::download(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (owns(to) || !owns(from, bytes)) die("download: got memory of the wrong side");
  const Access access(*this);
  std::memcpy(to, from, bytes);
}

bool ProtectedMemory::owns(const void* data, std::size_t bytes) const noexcept {
  const auto* const byte = static_cast<const std::byte*>(data);
  if (byte < base_ || byte >= base_ + kReserved) return false;
  const auto offset = static_cast<std::size_t>(byte - base_);
  const std::lock_guard lock(mutex_);
  auto after = used_.upper_bound(offset);
  if (after == used_.begin()) return false;
  const auto& [begin, size] = *--after;
  return offset + bytes <= begin + size - kGap;
}

std::size_t ProtectedMemory::bytes_in_use() const noexcept {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [offset, size] : used_) bytes += size;
  return bytes;
}

void ProtectedMemory::set_open(bool open) noexcept {
  const std::size_t end = used_.empty() ? 0 : used_.rbegin()->first + used_.rbegin()->second;
  if (end != 0 && mprotect(base_, end, open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) {
    die("cannot change the protection");
  }
}

ProtectedMemory::Access::Access(ProtectedMemory& memory) noexcept : memory_(memory) {
  const std::lock_guard lock(memory_.mutex_);
  ++memory_.accesses_;
  memory_.set_open(true);  // again, because the memory may have grown
}

ProtectedMemory::Access::~Access() {
  const std::lock_guard lock(memory_.mutex_);
  if (--memory_.accesses_ == 0) memory_.set_open(false);
}

const std::shared_ptr<ProtectedMemory>& protected_memory() {
  static const auto memory = std::make_shared<ProtectedMemory>();
  return memory;
}

}  // namespace ladon::test
