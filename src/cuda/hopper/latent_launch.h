// Launches of Hopper's latent kernel; each is defined in the file that instantiates it.
#pragma once

#include "cuda/queue.h"

namespace ladon::cuda::hopper {

struct LatentParams;

void launch_latent_bf16(Queue& queue, int blocks, const LatentParams& params);
void launch_latent_f16(Queue& queue, int blocks, const LatentParams& params);

}  // namespace ladon::cuda::hopper
