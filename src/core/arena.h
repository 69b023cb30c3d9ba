// Arena: one block of memory, handed out in aligned parts.
//
// A struct whose constructor takes its arrays from an Arena is a layout. InWorkspace makes it
// twice: once over an Arena that only counts, then over a workspace of exactly that size. So the
// size cannot be miscounted; an Arena throws where more is taken than it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/workspace_pool.h"
#include "ladon/tensor_view.h"

namespace ladon {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;

  /// Counts, and hands out null pointers.
  explicit Arena(DeviceId device) noexcept : device_(device) {}
  Arena(std::byte* data, std::size_t size, DeviceId device) noexcept
      : data_(data), size_(size), device_(device), counts_only_(false) {}

  /// `count` elements, content unspecified.
  template <class Element>
  Element* take(std::int64_t count) {
    return static_cast<Element*>(take_bytes(count, sizeof(Element)));
  }
  /// [rows, width], content unspecified.
  TensorView take_rows(std::int64_t rows, std::int64_t width, DType dtype);

  /// What was handed out so far, each part rounded up.
  std::size_t used() const noexcept { return used_; }

 private:
  void* take_bytes(std::int64_t count, std::size_t element_bytes);

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  DeviceId device_;
  bool counts_only_ = true;
  std::size_t used_ = 0;
};

/// What a layout takes.
template <class Layout, class... Args>
std::size_t layout_bytes(DeviceId device, const Args&... args) {
  Arena counter(device);
  const Layout layout(counter, args...);
  static_cast<void>(layout);
  return counter.used();
}

/// A layout and the workspace that it is in. Layout is constructible from (Arena&, args...), twice
/// with the same result.
template <class Layout>
class InWorkspace {
 public:
  template <class... Args>
  explicit InWorkspace(WorkspacePool& pool, const Args&... args)
      : bytes_(layout_bytes<Layout>(pool.device(), args...)),
        workspace_(pool, bytes_),
        // Not the workspace's own size, which may be larger: what was counted is the limit.
        arena_(workspace_.data(), bytes_, pool.device()),
        layout_(arena_, args...) {}
  InWorkspace(const InWorkspace&) = delete;
  InWorkspace& operator=(const InWorkspace&) = delete;

  Layout* operator->() noexcept { return &layout_; }
  const Layout* operator->() const noexcept { return &layout_; }
  Layout& operator*() noexcept { return layout_; }
  const Layout& operator*() const noexcept { return layout_; }

 private:
  std::size_t bytes_;
  Workspace workspace_;
  Arena arena_;
  Layout layout_;
};

}  // namespace ladon
