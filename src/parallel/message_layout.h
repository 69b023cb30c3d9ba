// Several arrays in one message, and tokens between a whole array and the parts of ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "ladon/context_parallel.h"
#include "ladon/tensor.h"

namespace ladon {

/// Arrays one after the other, without gaps: the widest elements first, so that all are aligned.
class MessageLayout {
 public:
  struct Array {
    DType dtype = DType::kF32;
    Dims shape;
  };

  explicit MessageLayout(std::vector<Array> arrays)
      : arrays_(std::move(arrays)), offsets_(arrays_.size()) {
    std::vector<std::size_t> order(arrays_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return size_of(arrays_[a].dtype) > size_of(arrays_[b].dtype);
    });
    for (const std::size_t i : order) {
      offsets_[i] = bytes_;
      std::size_t count = size_of(arrays_[i].dtype);
      for (const std::int64_t size : arrays_[i].shape) count *= static_cast<std::size_t>(size);
      bytes_ += count;
    }
  }

  std::size_t bytes() const noexcept { return bytes_; }
  Tensor allocate() const {
    return Tensor::uninitialized(DType::kU8, {static_cast<std::int64_t>(bytes_)});
  }
  TensorView array(Tensor& message, std::size_t i) const {
    return {static_cast<std::byte*>(message.data()) + offsets_[i], arrays_[i].dtype,
            arrays_[i].shape, message.device()};
  }

 private:
  std::vector<Array> arrays_;
  std::vector<std::size_t> offsets_;
  std::size_t bytes_ = 0;
};

inline std::int64_t total_length(std::span<const TokenRange> ranges) {
  std::int64_t total = 0;
  for (const TokenRange& range : ranges) total += range.length();
  return total;
}

/// Calls body(range, first token of the part).
template <class Body>
void for_each_range(std::span<const TokenRange> ranges, const Body& body) {
  std::int64_t first = 0;
  for (const TokenRange& range : ranges) {
    if (range.length() > 0) body(range, first);
    first += range.length();
  }
}

/// Copies a rank's tokens, which are dimension `dim`, out of the whole or into it.
inline void take_tokens(const Context& context, const ConstTensorView& whole,
                        std::span<const TokenRange> ranges, int dim, const TensorView& part) {
  for_each_range(ranges, [&](const TokenRange& range, std::int64_t first) {
    copy(context, whole.slice(dim, range.begin, range.end),
         part.slice(dim, first, first + range.length()));
  });
}
inline void put_tokens(const Context& context, const ConstTensorView& part,
                       std::span<const TokenRange> ranges, int dim, const TensorView& whole) {
  for_each_range(ranges, [&](const TokenRange& range, std::int64_t first) {
    copy(context, part.slice(dim, first, first + range.length()),
         whole.slice(dim, range.begin, range.end));
  });
}

/// Calls body(first token among the rank's own, first token of the part, count) for each of some
/// `ranges` of the tokens that a rank has.
template <class Body>
void for_each_own(std::span<const TokenRange> own, std::span<const TokenRange> ranges,
                  const Body& body) {
  for_each_range(ranges, [&](const TokenRange& range, std::int64_t first) {
    for_each_range(own, [&](const TokenRange& owned, std::int64_t local) {
      if (range.begin < owned.begin || range.end > owned.end) return;
      body(local + range.begin - owned.begin, first, range.length());
    });
  });
}

}  // namespace ladon
