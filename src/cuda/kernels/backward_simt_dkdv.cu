// dk and dv with plain FMA: a block for each 64 keys of a KV head and each 128 columns of dk or of
// dv. See backward_simt.cuh.

#include "cuda/kernels/backward_simt.cuh"

namespace ladon::cuda::backward {
namespace {

template <class Compute>
__global__ void __launch_bounds__(kSimtThreads, sizeof(Compute) == 4 ? 2 : 1)
    dkdv_tile(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) unsigned char simt_memory[];
  auto& shared = *reinterpret_cast<SimtShared<Compute>*>(simt_memory);
  const AttentionParams& call = params.call;
  const std::int64_t block = params.first_block + blockIdx.x;
  const std::int64_t num_tiles = params.num_key_tiles * call.num_kv_heads;
  const TileWalk<true> walk(params, block % num_tiles);
  if (params.keys_not_finite != nullptr && !meets_non_finite(params, walk)) return;
  const std::int64_t part = block / num_tiles;
  const std::int64_t dk_parts = column_parts<Compute>(call.dk, call.head_dim);
  constexpr int kColumns = SimtShape<Compute>::kColumns;
  if (part < dk_parts) {
    const ResultTile dk{call.dk,       walk.sequence.dk, walk.kv_head,
                        call.head_dim, part * kColumns,  GradientOf::kScaledScores};
    write_result_tile(params, walk, dk, shared, [](const PairSources& pair) { return pair.q; });
  } else {
    const ResultTile dv{call.dv,
                        walk.sequence.dv,
                        walk.kv_head,
                        call.value_dim,
                        (part - dk_parts) * kColumns,
                        GradientOf::kWeights};
    write_result_tile(params, walk, dv, shared, [](const PairSources& pair) { return pair.dout; });
  }
}

template <class Compute>
void launch(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  const std::int64_t parts = column_parts<Compute>(call.dk, call.head_dim) +
                             column_parts<Compute>(call.dv, call.value_dim);
  launch_blocks(queue, dkdv_tile<Compute>, params.num_key_tiles * call.num_kv_heads * parts,
                kSimtThreads, sizeof(SimtShared<Compute>), params);
}

}  // namespace

void simt_dkdv(Queue& queue, const BackwardParams& params) {
  params.call.q.dtype == DType::kF64 ? launch<double>(queue, params) : launch<float>(queue, params);
}

}  // namespace ladon::cuda::backward
