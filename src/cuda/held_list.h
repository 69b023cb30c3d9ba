// A list of the host's in the device's memory, for the kernels of one call.
#pragma once

#include <cstddef>

namespace ladon::cuda {

class Metadata;

/// Keeps a list of a Metadata where it is, until the kernels that read it are enqueued.
class HeldList {
 public:
  HeldList(const HeldList&) = delete;
  HeldList& operator=(const HeldList&) = delete;
  ~HeldList();

  const std::byte* data() const noexcept { return data_; }

 private:
  friend class Metadata;
  /// `block` is the Metadata's own.
  HeldList(Metadata& metadata, void* block, const std::byte* data) noexcept
      : metadata_(metadata), block_(block), data_(data) {}

  Metadata& metadata_;
  void* const block_;
  const std::byte* const data_;
};

}  // namespace ladon::cuda
