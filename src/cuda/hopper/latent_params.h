// What Hopper's kernel of absorbed latent attention takes.
#pragma once

#include <cuda.h>

#include "cuda/hopper/l2_policy.h"
#include "cuda/kernels/forward.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kLatentRows = 64;         // query rows of a tile
inline constexpr int kLatentColumns = 512;     // of the latents that are values too
inline constexpr int kLatentKeyColumns = 576;  // of the latents with their rope keys
inline constexpr int kSumColumns = 256;        // of the values, by one warpgroup

inline constexpr int kSegmentBlocks = segment_size_of(kLatentKeyColumns, kLatentColumns).blocks();
inline constexpr int kSegmentKeys = kBlockKeys * kSegmentBlocks;

/// A task is one tile of rows over one part of the keys: so many segments. Pairs of tiles are
/// computed at the same time by neighbouring multiprocessors, which share what they copy.
struct LatentSchedule {
  int row_tiles = 0;  // of the longest sequence, of one KV head
  bool has_pairs = false;
  int parts = 1;
  int part_segments = 0;
  int tasks = 0;
};

struct LatentParams {
  // One copy of all columns of values instead of one for each 64: a copy takes 130 cycles to start.
  CUtensorMap wide_latents;      // {64, tokens, columns / 64}; of a pair of tiles, half the columns
  CUtensorMap latents;           // {head_dim, tokens, num_kv_heads}
  ForwardParams<float> forward;  // with Partials where there are several parts
  LatentSchedule schedule;
  L2Policy policy = L2Policy::kNormal;  // of the latents
  int box_rows = 0;                     // consecutive latents that one copy takes
  bool has_wide_boxes = false;
  bool has_rope = false;      // columns beyond those of the values
  float4* earlier = nullptr;  // for each thread of each block of threads: kSumColumns / 8
  int* unfinished = nullptr;  // for each task: whether it met infinities or NaN
};

}  // namespace ladon::cuda::hopper
