// Replaces operator new of the whole program by one that counts. Include it in one source file of a
// test alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace ladon::test {

inline std::atomic<std::int64_t> allocations{0};
inline std::atomic<std::int64_t> allocated_bytes{0};

inline void* counted(std::size_t size, std::size_t alignment) {
  ++allocations;
  allocated_bytes += static_cast<std::int64_t>(size);
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
}
inline void* counted_or_throw(std::size_t size, std::size_t alignment) {
  void* const data = counted(size, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace ladon::test

// Every allocation of this program is counted.
void* operator new(std::size_t size) {
  return ladon::test::counted_or_throw(size, alignof(std::max_align_t));
}
void* operator new[](std::size_t size) {
  return ladon::test::counted_or_throw(size, alignof(std::max_align_t));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return ladon::test::counted(size, alignof(std::max_align_t));
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return ladon::test::counted(size, alignof(std::max_align_t));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return ladon::test::counted_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return ladon::test::counted_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return ladon::test::counted(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return ladon::test::counted(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(data);
}
void operator delete[](void* data, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(data);
}
