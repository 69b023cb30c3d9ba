#include "cuda/hopper/latent.cuh"
#include "cuda/hopper/latent_launch.h"

namespace ladon::cuda::hopper {

void launch_latent_bf16(Queue& queue, int blocks, const LatentParams& params) {
  launch_latent<__nv_bfloat16>(queue, blocks, params);
}

}  // namespace ladon::cuda::hopper
