#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/backward_finish.cuh"
#include "cuda/hopper/backward_launch.h"

namespace ladon::cuda::hopper {
namespace {

template <int kColumns>
void launch(Queue& queue, int blocks, const HopperBackwardParams& params) {
  constexpr std::size_t kAlignment = 1024;
  using Memory = BackwardMemory<kColumns>;
  queue.launch(
      backward_wgmma<__nv_bfloat16, kColumns>,
      {dim3(static_cast<unsigned>(blocks)), dim3(Memory::kThreads), sizeof(Memory) + kAlignment},
      params);
}

template <int kColumns>
void launch_finish(Queue& queue, const HopperBackwardParams& params) {
  const BackwardParams& backward = params.backward;
  const std::int64_t tiles = backward.num_row_tiles * backward.call.num_heads;
  queue.launch(finish_dq<__nv_bfloat16, kColumns>,
               {dim3(static_cast<unsigned>(tiles)), dim3(kBlockTiles * kGroupThreads)}, params);
}

}  // namespace

void launch_backward_bf16(Queue& queue, int blocks, bool is_wide,
                          const HopperBackwardParams& params) {
  is_wide ? launch<128>(queue, blocks, params) : launch<64>(queue, blocks, params);
}

void launch_finish_dq_bf16(Queue& queue, bool is_wide, const HopperBackwardParams& params) {
  is_wide ? launch_finish<128>(queue, params) : launch_finish<64>(queue, params);
}

}  // namespace ladon::cuda::hopper
