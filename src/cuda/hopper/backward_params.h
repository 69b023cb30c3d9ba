// What Hopper's backward kernel takes.
#pragma once

#include <cuda.h>

#include "cuda/kernels/backward.cuh"

namespace ladon::cuda::hopper {

using backward::BackwardParams;

struct HopperBackwardParams {
  // {dim, tokens, heads}, in boxes of 64 rows, or of as many as the kernel takes at a time.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  BackwardParams backward;
  float scale = 1;
  // One for each block of keys, or of rows in the wide dq kernel.
  int tickets = 0;
  int heads_at_once = 1;  // KV heads, there query heads, whose blocks take tickets in turns
  // Sums of dq, [head][row tile], each tile as BackwardMemory::dq has it.
  float* dq_sums = nullptr;
  unsigned* dq_turns = nullptr;  // [head][row tile] blocks of keys that have added; 0 before
};

}  // namespace ladon::cuda::hopper
