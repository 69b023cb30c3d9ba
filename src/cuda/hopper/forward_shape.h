// Tiles of Hopper's forward kernel by the columns of K and V that it computes with.
#pragma once

#include <cstdint>

#include "cuda/hopper/forward_launch.h"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/softmax_state.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kMostConsumers = 3;
/// That a warp stores.
inline constexpr int kStoredRows = 16;

/// kHead and kValue: columns of K and of V, which may be more than the heads have.
template <int kHead, int kValue, ForwardRules kRules = ForwardRules::kWindow>
struct ForwardShape {
  // Warpgroups that compute, of 64 query rows each: three where 160 registers suffice.
  static constexpr int kMostColumns = kRules == ForwardRules::kWindow ? 192 : 64;
  static constexpr int kConsumers = kHead > kMostColumns ? 2 : 3;
  static constexpr int kTileRows = kConsumers * 64;
  // Whether what a thread's rows see stays in registers.
  static constexpr bool kKeepsRows = kConsumers == 2 || kHead == 64;
  static constexpr int kSegmentBlocks = segment_size_of(kHead, kValue).blocks();
  // Products read queries from registers, where there are some left for them.
  static constexpr bool kHoldsQueries = kHead == 64 && kRules == ForwardRules::kWindow;
  static constexpr int kQueryStages = kHead > 64 ? 1 : 2;
  // Sums of earlier segments are in shared memory, or where it is too small, in global memory.
  static constexpr bool kSumsInShared = kHead <= 128 || (kHead == 192 && kConsumers == 2);
  // As many blocks of keys and of values as fit.
  static constexpr int kKeyStages = kHead <= 64 || (kHead == 128 && kConsumers == 2) ? 4
                                    : kHead == 192 && kConsumers == 3                ? 3
                                                                                     : 2;
  static constexpr int kValueStages = kHead > 192 ? 2 : kHead > 64 && kConsumers == 3 ? 3 : 4;

  static constexpr int kThreads = (1 + kConsumers) * 128;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
};

/// The sizes of a shape that the host needs.
struct ForwardSizes {
  int tile_rows;
  std::int64_t earlier_bytes;  // of global memory, for each block of threads
};
template <int kHead, int kValue, ForwardRules kRules>
constexpr ForwardSizes forward_sizes() {
  using Shape = ForwardShape<kHead, kValue, kRules>;
  return {Shape::kTileRows, Shape::kSumsInShared ? 0 : std::int64_t{Shape::kTileRows} * kValue * 4};
}
template <ForwardRules kRules>
constexpr ForwardSizes forward_sizes(ForwardColumns columns) {
  switch (columns) {
    case ForwardColumns::k64: return forward_sizes<64, 64, kRules>();
    case ForwardColumns::k128: return forward_sizes<128, 128, kRules>();
    case ForwardColumns::k192And128: return forward_sizes<192, 128, kRules>();
    case ForwardColumns::k256: break;
  }
  return forward_sizes<256, 256, kRules>();
}
constexpr ForwardSizes forward_sizes(ForwardColumns columns, ForwardRules rules) {
  return rules == ForwardRules::kWindow ? forward_sizes<ForwardRules::kWindow>(columns)
                                        : forward_sizes<ForwardRules::kAll>(columns);
}

}  // namespace ladon::cuda::hopper
