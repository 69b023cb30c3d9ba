// A list of the host's as a kernel sees it. A short one travels in the kernel's params, so that
// decoding a token uploads nothing; a longer one is uploaded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cuda/queue.h"

namespace ladon::cuda {

template <class Element, int kMost>
struct KernelList {
  const Element* uploaded = nullptr;  // null where the list is in `values`
  Element values[kMost];

  __device__ Element operator[](std::int64_t i) const {
    return uploaded != nullptr ? uploaded[i] : values[i];
  }
};

/// Holds the memory of a KernelList until the kernels that read it are enqueued.
template <class Element, int kMost>
class ListForKernel {
 public:
  ListForKernel(Queue& queue, std::span<const Element> list) {
    if (list.size() <= kMost) {
      std::copy(list.begin(), list.end(), list_.values);
    } else {
      upload(queue, list);
    }
  }

  /// A list of so many elements that fill(elements) writes.
  template <class Fill>
  ListForKernel(Queue& queue, std::int64_t count, const Fill& fill) {
    if (count <= kMost) {
      fill(list_.values);
    } else {
      std::vector<Element> list(static_cast<std::size_t>(count));
      fill(list.data());
      upload(queue, list);
    }
  }

  const KernelList<Element, kMost>& list() const noexcept { return list_; }

 private:
  void upload(Queue& queue, std::span<const Element> list) {
    list_.uploaded = memory_.emplace(queue, list).data();
  }

  KernelList<Element, kMost> list_{};
  std::optional<HostList<Element>> memory_;
};

}  // namespace ladon::cuda
