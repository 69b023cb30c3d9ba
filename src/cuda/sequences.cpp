#include "cuda/sequences.h"

#include <cstring>
#include <vector>

namespace ladon::cuda {
namespace {

std::size_t pages_of(const AttentionParams& params, const Sequence& sequence) {
  const std::int64_t size = params.kv_layout.page_size;
  return size == 0 ? 0 : static_cast<std::size_t>((sequence.kv_len + size - 1) / size);
}

std::size_t bytes_of(const AttentionParams& params) {
  std::size_t bytes = static_cast<std::size_t>(params.num_sequences) * sizeof(Sequence);
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    bytes += pages_of(params, params.sequences[s]) * sizeof(std::int32_t);
  }
  return bytes;
}

}  // namespace

DeviceSequences::DeviceSequences(Queue& queue, const AttentionParams& params)
    : memory_(queue.scratch(), bytes_of(params)), params_(params) {
  std::vector<std::byte> block(bytes_of(params));
  auto* const sequences = reinterpret_cast<Sequence*>(block.data());
  std::size_t used = static_cast<std::size_t>(params.num_sequences) * sizeof(Sequence);
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    Sequence sequence = params.sequences[s];
    const std::size_t bytes = pages_of(params, sequence) * sizeof(std::int32_t);
    if (bytes != 0) {
      std::memcpy(block.data() + used, sequence.pages, bytes);
      sequence.pages = reinterpret_cast<const std::int32_t*>(memory_.data() + used);
      used += bytes;
    }
    std::memcpy(&sequences[s], &sequence, sizeof sequence);
  }
  queue.upload(memory_.data(), block.data(), block.size());
  params_.sequences = reinterpret_cast<const Sequence*>(memory_.data());
}

}  // namespace ladon::cuda
