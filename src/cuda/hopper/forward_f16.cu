#include "cuda/hopper/forward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_forward_f16(Queue& queue, int blocks, ForwardColumns columns,
                        const HopperForwardParams& params) {
  switch (columns) {
    case ForwardColumns::k64: return launch_forward<__half, 64, 64>(queue, blocks, params);
    case ForwardColumns::k128: return launch_forward<__half, 128, 128>(queue, blocks, params);
    case ForwardColumns::k192And128: return launch_forward<__half, 192, 128>(queue, blocks, params);
    case ForwardColumns::k256: return launch_forward<__half, 256, 256>(queue, blocks, params);
  }
}

}  // namespace ladon::cuda::hopper
