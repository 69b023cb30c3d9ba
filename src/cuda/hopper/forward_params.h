// What Hopper's forward kernel takes.
#pragma once

#include <cuda.h>

#include "cuda/kernels/forward.cuh"

namespace ladon::cuda::hopper {

/// How tiles are numbered: columns are pairs of a sequence and some neighbouring query heads.
struct ForwardSchedule {
  int num_heads = 0;
  int packed_heads = 1;  // query heads of a column, which share a KV head; divides a tile's rows
  int columns = 0;
  int section_columns = 1;  // whose keys and values fit in the L2 cache
  int row_tiles = 0;        // of the longest sequence
};

struct HopperForwardParams {
  CUtensorMap q;  // {head_dim, num_heads, tokens}
  CUtensorMap k;  // {head_dim, tokens, num_kv_heads}
  CUtensorMap v;
  CUtensorMap out;  // as q, where stores_boxes says so
  bool stores_boxes = false;
  ForwardParams<float> forward;
  ForwardSchedule schedule;
  int* next_ticket = nullptr;  // 0 before the launch
  // Sums of earlier segments, where shared memory has no space for them: those of each block of
  // threads, by warp, group of 8 columns and lane.
  float4* earlier = nullptr;
};

}  // namespace ladon::cuda::hopper
