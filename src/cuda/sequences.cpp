#include "cuda/sequences.h"

#include <cstddef>
#include <cstring>
#include <vector>

#include "cuda/metadata.h"

namespace ladon::cuda {
namespace {

std::size_t pages_of(const AttentionParams& params, const Sequence& sequence) {
  const std::int64_t size = params.kv_layout.page_size;
  return size == 0 ? 0 : static_cast<std::size_t>((sequence.kv_len + size - 1) / size);
}

/// The sequences, then their page tables one after the other.
HeldList hold(Queue& queue, const AttentionParams& params) {
  const auto count = static_cast<std::size_t>(params.num_sequences);
  std::vector<Metadata::Pointer> pointers;
  std::size_t bytes = count * sizeof(Sequence);
  for (std::size_t s = 0; s < count; ++s) {
    const std::size_t pages = pages_of(params, params.sequences[s]);
    if (pages == 0) continue;
    pointers.push_back({s * sizeof(Sequence) + offsetof(Sequence, pages), bytes});
    bytes += pages * sizeof(std::int32_t);
  }
  std::vector<std::byte> list(bytes);
  std::size_t used = count * sizeof(Sequence);
  for (std::size_t s = 0; s < count; ++s) {
    Sequence sequence = params.sequences[s];
    const std::size_t pages = pages_of(params, sequence) * sizeof(std::int32_t);
    if (pages != 0) std::memcpy(list.data() + used, sequence.pages, pages);
    used += pages;
    sequence.pages = nullptr;  // the list is found again by its bytes, wherever tables are
    std::memcpy(list.data() + s * sizeof(Sequence), &sequence, sizeof sequence);
  }
  return queue.metadata().hold(queue, list, pointers);
}

}  // namespace

DeviceSequences::DeviceSequences(Queue& queue, const AttentionParams& params)
    : held_(hold(queue, params)), params_(params) {
  params_.sequences = reinterpret_cast<const Sequence*>(held_.data());
}

}  // namespace ladon::cuda
