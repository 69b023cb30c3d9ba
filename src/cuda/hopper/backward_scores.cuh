// Scores in Hopper's backward kernel: S and dP of a step's rows with own keys, to P and dS.
#pragma once

#include <cstdint>

#include "cuda/hopper/backward_tile.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

using backward::Band;
using backward::FragmentPlace;

/// Rows in shared memory that own keys meet: a tile, or a part of one.
struct Step {
  int stage;
  std::int32_t tile;
  int part = 0;  // which of the tile's steps
};

template <class Memory>
class StepScores {
 public:
  static constexpr int kScoreGroups = Memory::kStepRows / 8;
  using Scores = float[kScoreGroups][4];

  __device__ __forceinline__ StepScores(const float& scale, Memory& memory)
      : scale_(scale), memory_(memory) {}

  /// S to P.
  __device__ __forceinline__ void weigh(const Step& step, Scores& scores) {
#pragma unroll
    for (int n = 0; n < kScoreGroups; ++n) {
      load_stats(step, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = backward::plain_weight(scores[n][i], scale_, stats_[i % 2].lse);
      }
    }
  }
  /// dP to dS.
  __device__ __forceinline__ void differentiate(const Step& step, const Scores& weights,
                                                Scores& dscores) {
#pragma unroll
    for (int n = 0; n < kScoreGroups; ++n) differentiate(step, n, weights[n], dscores[n]);
  }
  /// Those of group n.
  __device__ __forceinline__ void differentiate(const Step& step, int n, const float (&weights)[4],
                                                float (&dscores)[4]) {
    load_stats(step, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) dscores[i] = weights[i] * (dscores[i] - stats_[i % 2].delta);
  }
  /// Sets what the window hides to 0; `first` is that of the own keys and the first tile of rows.
  __device__ __forceinline__ void mask(const Band& first, const Step& step, Scores& weights,
                                       Scores& gradients) {
    const int moved = step.tile * kTile + step.part * Memory::kStepRows;
    Band band = first;
    band.low += moved;
    band.high += moved;
    if (!band.sees_all(Memory::kStepRows, kTile))
      backward::apply_window<true>(band, weights, gradients);
  }

 private:
  /// Of the two rows whose scores with the own keys are in group n.
  __device__ __forceinline__ void load_stats(const Step& step, int n) {
    const FragmentPlace place;
    const auto pair =
        *reinterpret_cast<const float4*>(&memory_.infos[step.stage].stats[place.other(n, 0)]);
    stats_[0] = {pair.x, pair.y};
    stats_[1] = {pair.z, pair.w};
  }

  const float& scale_;  // in constant memory
  Memory& memory_;
  RowStats<float> stats_[2];
};

/// Rounds P or dS to the operand A of products over a step's rows.
template <class Half, int kGroups, int kSteps>
__device__ __forceinline__ void pack_operand(const float (&values)[kGroups][4],
                                             std::uint32_t (&a)[kSteps][4]) {
  static_assert(kGroups == 2 * kSteps);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&from)[4] = values[2 * step + i / 2];
      a[step][i] = pack<Half>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
    }
  }
}

}  // namespace ladon::cuda::hopper
