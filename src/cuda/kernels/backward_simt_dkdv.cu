// dk and dv with plain FMA: a block for each 64 keys of a KV head and each 128 columns of dk or of
// dv. See backward_simt_scores.cuh.

#include "cuda/kernels/backward_simt.cuh"

namespace ladon::cuda::backward {
namespace {

template <class Compute>
__global__ void __launch_bounds__(SimtShape<Compute>::kThreads, SimtShape<Compute>::kBlocks)
    dkdv_tiles(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) unsigned char simt_memory[];
  auto& shared = *reinterpret_cast<SimtShared<Compute>*>(simt_memory);
  const AttentionParams& call = params.call;
  const std::int64_t num_tiles = params.num_key_tiles * call.num_kv_heads;
  const std::int32_t dk_parts = column_parts<Compute>(call.dk, call.head_dim);
  const std::int32_t dv_parts = column_parts<Compute>(call.dv, call.value_dim);
  for_each_result_tile<true>(
      params, num_tiles * (dk_parts + dv_parts), num_tiles, shared,
      [&](const TileWalk<true>& walk, std::int32_t part) {
        const bool of_keys = part < dk_parts;
        write_result_tile(params, walk, of_keys ? GradientOf::kScaledScores : GradientOf::kWeights,
                          of_keys ? part : part - dk_parts, shared);
      });
}

template <class Compute>
void launch(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  launch_result_tiles<Compute>(queue, dkdv_tiles<Compute>, params.num_key_tiles * call.num_kv_heads,
                               column_parts<Compute>(call.dk, call.head_dim) +
                                   column_parts<Compute>(call.dv, call.value_dim),
                               params);
}

}  // namespace

void simt_dkdv(Queue& queue, const BackwardParams& params) {
  params.call.q.dtype == DType::kF64 ? launch<double>(queue, params) : launch<float>(queue, params);
}

}  // namespace ladon::cuda::backward
