// What Hopper's backward kernels take.
#pragma once

#include <cuda.h>

#include "cuda/kernels/backward.cuh"

namespace ladon::cuda::hopper {

using backward::BackwardParams;

struct HopperBackwardParams {
  // {dim, tokens, heads}, in boxes of 64 rows.
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  BackwardParams backward;
  float scale = 1;
  int tickets = 0;  // for own tiles, a few at a time
};

}  // namespace ladon::cuda::hopper
