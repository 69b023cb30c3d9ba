// dq with plain FMA: a block for each 64 rows of a head and each 128 columns. See
// backward_simt_scores.cuh.

#include "cuda/kernels/backward_simt.cuh"

namespace ladon::cuda::backward {
namespace {

template <class Compute>
__global__ void __launch_bounds__(SimtShape<Compute>::kThreads, SimtShape<Compute>::kBlocks)
    dq_tiles(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) unsigned char simt_memory[];
  auto& shared = *reinterpret_cast<SimtShared<Compute>*>(simt_memory);
  const std::int64_t num_tiles = params.num_row_tiles * params.call.num_heads;
  const std::int32_t parts = column_parts<Compute>(params.call.dq, params.call.head_dim);
  for_each_result_tile<false>(params, num_tiles * parts, num_tiles, shared,
                              [&](const TileWalk<false>& walk, std::int32_t part) {
                                write_result_tile(params, walk, GradientOf::kScaledScores, part,
                                                  shared);
                              });
}

template <class Compute>
void launch(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  launch_result_tiles<Compute>(queue, dq_tiles<Compute>, params.num_row_tiles * call.num_heads,
                               column_parts<Compute>(call.dq, call.head_dim), params);
}

}  // namespace

void simt_dq(Queue& queue, const BackwardParams& params) {
  params.call.q.dtype == DType::kF64 ? launch<double>(queue, params) : launch<float>(queue, params);
}

}  // namespace ladon::cuda::backward
