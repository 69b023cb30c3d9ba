#include "cuda/kernels/decode_scaled_launch.cuh"

namespace ladon::cuda {

void launch_decode_scaled_f16(Queue& queue, std::int64_t tasks,
                              const ForwardParams<float>& params) {
  launch_decode_scaled<__half>(queue, tasks, params);
}

}  // namespace ladon::cuda
