// Gradients of the score rules' parameters: bias and sinks.
//
// dbias: a bias may be shared by batch, heads, queries or keys, and its gradient sums over all that
// share it. A block owns 64 tokens by 64 keys of the bias (one where they are shared) and
// recomputes dS, by the SIMT products, of all that share them, in one fixed order. The sums are
// doubles, because they can be long. Flops: 2 * (head_dim + value_dim) for each score. Limit: FMA,
// and the number of blocks where most dimensions are shared.
//
// dsinks: -sum of exp(sink - lse) * delta over all rows of a head, a block for each head. Reads 8
// bytes for each row; the limit is latency.

#include "cuda/kernels/backward_simt_scores.cuh"

namespace ladon::cuda::backward {
namespace {

/// Items [begin, end).
struct Range {
  std::int64_t begin;
  std::int64_t end;

  __device__ bool has(std::int64_t item) const { return item >= begin && item < end; }
};

/// What one block of bias_tile owns, and what shares it.
struct BiasTile {
  std::int64_t offset;  // of its first element in dbias
  std::int64_t token_begin;
  std::int64_t key_begin;
  Range sequences;
  Range heads;
  Range row_tiles;
  Range key_tiles;

  static __host__ __device__ std::int64_t tiles_of(std::int64_t size) {
    return (size + kTile - 1) / kTile;
  }
  static __host__ __device__ std::int64_t count(const BiasGradient& dbias) {
    return dbias.sizes[0] * dbias.sizes[1] * tiles_of(dbias.sizes[2]) * tiles_of(dbias.sizes[3]);
  }

  __device__ BiasTile(const AttentionParams& call, std::int64_t block) {
    const BiasGradient& dbias = call.dbias;
    const auto next = [&](std::int64_t count) {
      const std::int64_t index = block % count;
      block /= count;
      return index;
    };
    const std::int64_t key_tile = next(tiles_of(dbias.sizes[3]));
    const std::int64_t row_tile = next(tiles_of(dbias.sizes[2]));
    const std::int64_t head = next(dbias.sizes[1]);
    const std::int64_t sequence = block;
    token_begin = row_tile * kTile;
    key_begin = key_tile * kTile;
    offset = sequence * dbias.strides[0] + head * dbias.strides[1] +
             token_begin * dbias.strides[2] + key_begin * dbias.strides[3];
    const auto range = [](std::int64_t size, std::int64_t index, std::int64_t all) {
      return size == 1 ? Range{0, all} : Range{index, index + 1};
    };
    sequences = range(dbias.sizes[0], sequence, call.num_sequences);
    heads = range(dbias.sizes[1], head, call.num_heads);
    row_tiles = range(dbias.sizes[2], row_tile, tiles_of(call.max_query_len));
    key_tiles = range(dbias.sizes[3], key_tile, tiles_of(call.max_kv_len));
  }
};

/// Adds dS of all that a block's elements of the bias share to this thread's 16 elements.
template <class Compute>
__device__ void add_score_gradients(const BackwardParams& params, const BiasTile& tile,
                                    SimtShared<Compute>& shared,
                                    double (&sums)[SimtShape<Compute>::kElements]) {
  const AttentionParams& call = params.call;
  const ThreadPlace<Compute> place;
  for (std::int64_t s = tile.sequences.begin; s < tile.sequences.end; ++s) {
    const Sequence& sequence = call.sequences[s];
    const Range rows{0, BiasTile::tiles_of(sequence.query_len)};
    for (std::int64_t head = tile.heads.begin; head < tile.heads.end; ++head) {
      for (std::int64_t row = tile.row_tiles.begin; row < tile.row_tiles.end; ++row) {
        if (!rows.has(row)) continue;
        const TileRange seen = key_tiles_seen(call.rules, sequence, row);
        const std::int64_t end = tile.key_tiles.end < seen.end ? tile.key_tiles.end : seen.end;
        const std::int64_t first =
            tile.key_tiles.begin > seen.begin ? tile.key_tiles.begin : seen.begin;
        for (std::int64_t key = first; key < end; ++key) {
          const auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
          const TilePair pair{params, narrow(s), narrow(head), narrow(row), narrow(key)};
          fill_matrix<Compute, false>(pair, GradientOf::kBiasedScores, shared);
#pragma unroll
          for (int i = 0; i < SimtShape<Compute>::kElements; ++i) {
            sums[i] += static_cast<double>(shared.matrix[place.at(i / 4, i % 4)]);
          }
        }
      }
    }
  }
}

/// Sums over tokens and keys that are shared, and writes.
template <class Compute>
__device__ void write_bias(const BiasGradient& dbias, const BiasTile& tile,
                           const double (&sums)[SimtShape<Compute>::kElements], double* elements) {
  constexpr int kPitch = kTile + 1;
  constexpr int kThreads = SimtShape<Compute>::kThreads;
  const ThreadPlace<Compute> place;
#pragma unroll
  for (int i = 0; i < SimtShape<Compute>::kElements; ++i) {
    elements[place.own(i / 4) * kPitch + place.other(i % 4)] = sums[i];
  }
  __syncthreads();
  const bool tokens_shared = dbias.sizes[2] == 1;
  const bool keys_shared = dbias.sizes[3] == 1;
  const int num_tokens = tokens_shared ? 1 : kTile;
  const int num_keys = keys_shared ? 1 : kTile;
  for (int i = static_cast<int>(threadIdx.x); i < num_tokens * num_keys; i += kThreads) {
    const int token = i / num_keys;
    const int key = i % num_keys;
    if (tile.token_begin + token >= dbias.sizes[2] || tile.key_begin + key >= dbias.sizes[3]) {
      continue;
    }
    double sum = 0;
    for (int t = token; t < (tokens_shared ? kTile : token + 1); ++t) {
      for (int k = key; k < (keys_shared ? kTile : key + 1); ++k) sum += elements[t * kPitch + k];
    }
    store_element(dbias.data, dbias.dtype,
                  tile.offset + token * dbias.strides[2] + key * dbias.strides[3], sum);
  }
}

template <class Compute>
__global__ void __launch_bounds__(SimtShape<Compute>::kThreads, SimtShape<Compute>::kBlocks)
    bias_tile(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) unsigned char simt_memory[];
  auto& shared = *reinterpret_cast<SimtShared<Compute>*>(simt_memory);
  static_assert(sizeof shared >= kTile * (kTile + 1) * sizeof(double));
  const BiasTile tile(params.call, params.first_block + blockIdx.x);
  double sums[SimtShape<Compute>::kElements] = {};
  add_score_gradients<Compute>(params, tile, shared, sums);
  __syncthreads();  // all threads have read the matrix
  write_bias<Compute>(params.call.dbias, tile, sums, reinterpret_cast<double*>(simt_memory));
}

constexpr int kSinkThreads = 1024;

template <class Compute>
__global__ void __launch_bounds__(kSinkThreads)
    sink_of_head(const __grid_constant__ BackwardParams params) {
  __shared__ double partial[kSinkThreads];
  const AttentionParams& call = params.call;
  const std::int64_t head = params.first_block + blockIdx.x;
  const HeadOperand& sinks = call.rules.sinks;
  const auto sink = load_element<double>(sinks.data, sinks.dtype, head * sinks.stride);
  const RowStats<Compute>* stats = stats_of<Compute>(params, head, 0);
  double sum = 0;
  for (std::int64_t row = threadIdx.x; row < params.num_rows; row += kSinkThreads) {
    const RowStats<Compute> of_row = stats[row];
    if (of_row.lse == static_cast<Compute>(INFINITY) && of_row.delta == 0) continue;
    sum -= exp(held_exponent(sink - static_cast<double>(of_row.lse))) *
           static_cast<double>(of_row.delta);
  }
  partial[threadIdx.x] = sum;
  for (unsigned half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) {
    store_element(call.dsinks.data, call.dsinks.dtype, head * call.dsinks.stride, partial[0]);
  }
}

}  // namespace

void bias_gradient(Queue& queue, const BackwardParams& params) {
  const auto launch = [&](auto zero) {
    using Compute = decltype(zero);
    launch_blocks(queue, bias_tile<Compute>, BiasTile::count(params.call.dbias),
                  SimtShape<Compute>::kThreads, sizeof(SimtShared<Compute>), params);
  };
  params.call.q.dtype == DType::kF64 ? launch(double{}) : launch(float{});
}

void sink_gradient(Queue& queue, const BackwardParams& params) {
  launch_blocks(queue,
                params.call.q.dtype == DType::kF64 ? sink_of_head<double> : sink_of_head<float>,
                params.call.num_heads, kSinkThreads, 0, params);
}

}  // namespace ladon::cuda::backward
