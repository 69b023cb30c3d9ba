// Rotary position embedding: pairs (a, b) of a head, rotated by an angle t and stretched by m,
//
//   a' = m (a cos t - b sin t),    b' = m (a sin t + b cos t),
//
// backward by -t; and tables of cosines and sines.
//
// A block has one token, of queries and keys alike: its threads compute the token's cosines and
// sines in double, round them once into shared memory, and rotate 8 pairs of a head at a time. The
// arithmetic is that of CPUs, products rounded before they are added, so that results differ from
// theirs only where CUDA's sine does in its last bit.
//
// Per element: 3 operations, read and written once; per token and pair one sincos of about 100 f64
// operations, which all heads share. The limit is memory.

#include <algorithm>
#include <cstdint>
#include <span>

#include "cuda/kernels/chunk.cuh"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/kernel_list.cuh"
#include "cuda/operations.h"
#include "ladon/tensor_view.h"

namespace ladon::cuda {
namespace {

// Lists up to this length need no upload: heads of up to 384 elements, 192 sequences of a token.
constexpr int kShortList = 192;
// Pairs whose cosines and sines are in shared memory at a time.
constexpr int kTilePairs = 256;

// Tensors of the same tokens that one launch rotates: queries and keys.
constexpr std::size_t kMostTensors = 2;

struct RotateParams {
  RopeParams rope;  // of the first tensor; its lists are not the device's
  struct Tensor {
    RopeOperand x;
    RopeOperand out;
    std::int64_t heads = 0;
  } tensors[kMostTensors];
  bool has_positions;
  bool has_frequencies;
  KernelList<std::int64_t, kShortList> positions;
  KernelList<double, kShortList> frequencies;
};

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }

/// Both at once, of any double, with full range reduction.
struct Rotation {
  double cos;
  double sin;
};
__device__ inline Rotation rotation_by(double angle) {
  Rotation rotation;
  sincos(angle, &rotation.sin, &rotation.cos);
  return rotation;
}

__device__ inline std::int64_t pairs_of(const RopeParams& rope) { return rope.rotary_dim / 2; }

/// The token of a block.
struct Token {
  std::int64_t sequence;
  std::int64_t index;
  std::int64_t position;
};

__device__ inline Token token_of(const RotateParams& params, std::int64_t number) {
  const RopeParams& rope = params.rope;
  Token token{number / rope.seq, number % rope.seq, 0};
  if (params.has_positions) {
    token.position = params.positions[rope.positions_per_sequence ? number : token.index];
  } else {
    token.position = rope.first_position + token.index;
  }
  return token;
}

__device__ inline double look_up(const RopeParams& rope, const RopeTableOperand& table,
                                 const Token& token, std::int64_t pair) {
  const std::int64_t row = rope.table_by_position ? token.position : token.index;
  return load_element<double>(
      table.data, table.dtype,
      token.sequence * table.batch_stride + row * table.row_stride + pair * table.pair_stride);
}

__device__ inline Rotation rotation_of(const RotateParams& params, const Token& token,
                                       std::int64_t pair) {
  const RopeParams& rope = params.rope;
  Rotation rotation;
  if (params.has_frequencies) {
    rotation = rotation_by(product(static_cast<double>(token.position), params.frequencies[pair]));
    rotation.cos *= rope.magnitude;
    rotation.sin *= rope.magnitude;
  } else {
    rotation = {look_up(rope, rope.cos, token, pair), look_up(rope, rope.sin, token, pair)};
  }
  if (rope.backward) rotation.sin = -rotation.sin;
  return rotation;
}

/// The first and second elements of 8 pairs.
template <class Compute>
struct Pairs {
  Chunk<Compute> first;
  Chunk<Compute> second;
};

template <class Compute>
__device__ inline void rotate_pairs(Pairs<Compute>& pairs, const Compute* cos, const Compute* sin) {
#pragma unroll
  for (int n = 0; n < kChunk; ++n) {
    const Compute a = pairs.first.values[n];
    const Compute b = pairs.second.values[n];
    pairs.first.values[n] = product(a, cos[n]) - product(b, sin[n]);
    pairs.second.values[n] = product(a, sin[n]) + product(b, cos[n]);
  }
}

/// Pairs [n, n + count) of the head that starts at `start`. Interleaved ones are 16 consecutive
/// elements, of which even and odd ones change places in registers.
template <class Compute>
__device__ inline Pairs<Compute> load_pairs(const RopeParams& rope, const void* x,
                                            std::int64_t start, std::int64_t n, int count) {
  const auto load = [&](std::int64_t i, int elements) {
    return load_chunk<Compute>(x, rope.dtype, start + i, elements);
  };
  if (!rope.interleaved) return {load(n, count), load(n + pairs_of(rope), count)};
  const int elements = 2 * count;
  const Chunk<Compute> low = load(2 * n, min(elements, kChunk));
  const Chunk<Compute> high = load(2 * n + kChunk, max(elements - kChunk, 0));
  Pairs<Compute> pairs;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    pairs.first.values[i] = low.values[2 * i];
    pairs.second.values[i] = low.values[2 * i + 1];
    pairs.first.values[i + kChunk / 2] = high.values[2 * i];
    pairs.second.values[i + kChunk / 2] = high.values[2 * i + 1];
  }
  return pairs;
}

template <class Compute>
__device__ inline void store_pairs(const RopeParams& rope, void* out, std::int64_t start,
                                   std::int64_t n, int count, const Pairs<Compute>& pairs) {
  const auto store = [&](std::int64_t i, int elements, const Chunk<Compute>& chunk) {
    store_chunk(out, rope.dtype, start + i, elements, chunk);
  };
  if (!rope.interleaved) {
    store(n, count, pairs.first);
    store(n + pairs_of(rope), count, pairs.second);
    return;
  }
  Chunk<Compute> low;
  Chunk<Compute> high;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    low.values[2 * i] = pairs.first.values[i];
    low.values[2 * i + 1] = pairs.second.values[i];
    high.values[2 * i] = pairs.first.values[i + kChunk / 2];
    high.values[2 * i + 1] = pairs.second.values[i + kChunk / 2];
  }
  const int elements = 2 * count;
  store(2 * n, min(elements, kChunk), low);
  store(2 * n + kChunk, max(elements - kChunk, 0), high);
}

__device__ inline std::int64_t start_of(const RopeOperand& operand, const Token& token,
                                        std::int64_t head) {
  return token.sequence * operand.batch_stride + token.index * operand.token_stride +
         head * operand.head_stride;
}

/// Elements past rotary_dim pass as they are.
template <class Bits>
__device__ inline void pass_elements(const RopeParams& rope, const RotateParams::Tensor& tensor,
                                     const Token& token) {
  const auto* const x = static_cast<const Bits*>(tensor.x.data);
  auto* const out = static_cast<Bits*>(tensor.out.data);
  const std::int64_t passed = rope.head_dim - rope.rotary_dim;
  for (std::int64_t item = blockIdx.y * blockDim.x + threadIdx.x; item < tensor.heads * passed;
       item += gridDim.y * blockDim.x) {
    const std::int64_t head = item / passed;
    const std::int64_t i = rope.rotary_dim + item % passed;
    out[start_of(tensor.out, token, head) + i] = x[start_of(tensor.x, token, head) + i];
  }
}

template <class Compute>
__device__ inline void rotate_token(const RotateParams& params, const Token& token) {
  __shared__ Compute cos[kTilePairs];
  __shared__ Compute sin[kTilePairs];
  const RopeParams& rope = params.rope;
  for (std::int64_t tile = 0; tile < pairs_of(rope); tile += kTilePairs) {
    const int pairs = static_cast<int>(min(pairs_of(rope) - tile, std::int64_t{kTilePairs}));
    __syncthreads();  // the previous tile is done with
    for (int n = threadIdx.x; n < pairs; n += blockDim.x) {
      const Rotation rotation = rotation_of(params, token, tile + n);
      cos[n] = static_cast<Compute>(rotation.cos);
      sin[n] = static_cast<Compute>(rotation.sin);
    }
    __syncthreads();
    const int chunks = (pairs + kChunk - 1) / kChunk;
    const std::int64_t first_heads = params.tensors[0].heads;
    const std::int64_t heads = first_heads + params.tensors[1].heads;
    for (std::int64_t item = blockIdx.y * blockDim.x + threadIdx.x; item < heads * chunks;
         item += gridDim.y * blockDim.x) {
      const bool is_first = item < first_heads * chunks;
      const RotateParams::Tensor& tensor = params.tensors[is_first ? 0 : 1];
      const std::int64_t head = item / chunks - (is_first ? 0 : first_heads);
      const int n = static_cast<int>(item % chunks) * kChunk;
      const int count = min(pairs - n, kChunk);
      Pairs<Compute> rotated = load_pairs<Compute>(
          rope, tensor.x.data, start_of(tensor.x, token, head), tile + n, count);
      rotate_pairs(rotated, cos + n, sin + n);
      store_pairs(rope, tensor.out.data, start_of(tensor.out, token, head), tile + n, count,
                  rotated);
    }
  }
}

template <class Compute>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks, or pairs of doubles would be spilled
    rotate_tokens(const __grid_constant__ RotateParams params) {
  take_over();
  const RopeParams& rope = params.rope;
  for (std::int64_t number = blockIdx.x; number < rope.batch * rope.seq; number += gridDim.x) {
    const Token token = token_of(params, number);
    rotate_token<Compute>(params, token);
    if (rope.rotary_dim == rope.head_dim) continue;
    for (const RotateParams::Tensor& tensor : params.tensors) {
      if (tensor.x.data == tensor.out.data) continue;
      if constexpr (sizeof(Compute) == 8) {
        pass_elements<std::uint64_t>(rope, tensor, token);
      } else if (rope.dtype == DType::kF32) {
        pass_elements<std::uint32_t>(rope, tensor, token);
      } else {
        pass_elements<std::uint16_t>(rope, tensor, token);
      }
    }
  }
}

/// Enough for a token's heads or its angles, in whole warps.
unsigned threads_for(const RopeParams& params, std::int64_t heads) {
  const std::int64_t items = std::max(heads * ceil_div(params.pairs(), kChunk), params.pairs());
  return static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(items, 32) * 32, 32, kThreads));
}

/// Blocks that share the heads of a token where there are few tokens: each computes its angles
/// again.
unsigned parts_for(const RopeParams& params, std::int64_t heads, std::int64_t tokens) {
  constexpr std::int64_t kFewTokens = 16;
  if (tokens > kFewTokens) return 1;
  return static_cast<unsigned>(
      std::clamp<std::int64_t>(heads * ceil_div(params.pairs(), kChunk) / 64, 1, 8));
}

std::span<const std::int64_t> positions_of(const RopeParams& params) {
  if (params.positions == nullptr) return {};
  const std::int64_t count = params.positions_per_sequence ? params.batch * params.seq : params.seq;
  return {params.positions, static_cast<std::size_t>(count)};
}

std::span<const double> frequencies_of(const RopeParams& params) {
  if (params.cos.data != nullptr) return {};
  return {params.frequencies, static_cast<std::size_t>(params.pairs())};
}

/// Whether the same positions of tokens are rotated alike.
bool has_same_angles(const RopeParams& a, const RopeParams& b) {
  return a.cos.data == nullptr && b.cos.data == nullptr && a.batch == b.batch && a.seq == b.seq &&
         a.head_dim == b.head_dim && a.rotary_dim == b.rotary_dim &&
         a.interleaved == b.interleaved && a.backward == b.backward && a.dtype == b.dtype &&
         a.first_position == b.first_position && a.magnitude == b.magnitude &&
         a.positions_per_sequence == b.positions_per_sequence &&
         (a.positions == nullptr) == (b.positions == nullptr) &&
         std::ranges::equal(positions_of(a), positions_of(b)) &&
         std::ranges::equal(frequencies_of(a), frequencies_of(b));
}

/// One launch for tensors of the same angles.
void rotate_together(Queue& queue, std::span<const RopeParams> params) {
  const RopeParams& first = params.front();
  RotateParams kernel_params;
  kernel_params.rope = first;
  kernel_params.has_positions = first.positions != nullptr;
  kernel_params.has_frequencies = first.cos.data == nullptr;
  std::int64_t heads = 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    kernel_params.tensors[i] = {params[i].x, params[i].out, params[i].heads};
    heads += params[i].heads;
  }
  const std::int64_t tokens = first.batch * first.seq;
  if (tokens == 0 || heads == 0) return;
  const ListForKernel<std::int64_t, kShortList> positions(queue, positions_of(first));
  const ListForKernel<double, kShortList> frequencies(queue, frequencies_of(first));
  kernel_params.positions = positions.list();
  kernel_params.frequencies = frequencies.list();
  queue.launch(first.dtype == DType::kF64 ? rotate_tokens<double> : rotate_tokens<float>,
               Grid{.blocks = {blocks_for(tokens, 1), parts_for(first, heads, tokens)},
                    .threads = threads_for(first, heads),
                    .starts_early = true},
               kernel_params);
}

// ---- tables -------------------------------------------------------------------------------------

/// One of the two, [position, pair].
struct TableOutput {
  void* data;
  DType dtype;
  std::int64_t strides[2];

  explicit TableOutput(const TensorView& view)
      : data(view.data()), dtype(view.dtype()), strides{view.stride(0), view.stride(1)} {}
};

struct TableParams {
  const double* frequencies;
  double magnitude;
  std::int64_t positions;
  std::int64_t pairs;
  TableOutput cos;
  TableOutput sin;
};

__global__ void __launch_bounds__(kThreads) fill_table(const __grid_constant__ TableParams params) {
  for_each_index(params.positions * params.pairs, [&](std::int64_t index) {
    const std::int64_t position = index / params.pairs;
    const std::int64_t pair = index % params.pairs;
    const Rotation rotation =
        rotation_by(product(static_cast<double>(position), params.frequencies[pair]));
    const auto store = [&](const TableOutput& table, double value) {
      store_element(table.data, table.dtype, position * table.strides[0] + pair * table.strides[1],
                    params.magnitude * value);
    };
    store(params.cos, rotation.cos);
    store(params.sin, rotation.sin);
  });
}

}  // namespace

void rotate(Queue& queue, std::span<const RopeParams> params) {
  while (!params.empty()) {
    const std::size_t count = params.size() > 1 && has_same_angles(params[0], params[1]) ? 2 : 1;
    rotate_together(queue, params.first(count));
    params = params.subspan(count);
  }
}

void fill_rope_table(Queue& queue, std::span<const double> frequencies, double magnitude,
                     const TensorView& cos, const TensorView& sin) {
  if (cos.num_elements() == 0) return;
  const HostList<double> uploaded(queue, frequencies);
  queue.launch(fill_table, Grid{blocks_for(cos.num_elements(), kThreads), kThreads},
               TableParams{uploaded.data(), magnitude, cos.size(0), cos.size(1), TableOutput(cos),
                           TableOutput(sin)});
}

}  // namespace ladon::cuda
