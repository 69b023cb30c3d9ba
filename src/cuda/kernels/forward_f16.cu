#include "cuda/kernels/forward_mma_launch.cuh"

namespace ladon::cuda {

void launch_forward_f16(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  launch_forward_mma<__half>(queue, kind, tasks, params);
}

}  // namespace ladon::cuda
