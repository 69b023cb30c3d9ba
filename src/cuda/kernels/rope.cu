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
// operations, which all heads share. The limit is memory, but within a block all wait for the
// sines: where there are many tokens, a separate kernel computes them first, once for all
// sequences (H200, 8192 tokens of 40 heads: 135 us with sines in each block, 99 with a look-up
// instead).

#include <algorithm>
#include <cstdint>
#include <span>

#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/kernel_list.cuh"
#include "cuda/kernels/rope.cuh"
#include "cuda/operations.h"
#include "ladon/tensor_view.h"

namespace ladon::cuda {
namespace {

// Lists up to this length need no upload: heads of up to 384 elements, 192 sequences of a token.
constexpr int kShortList = 192;

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
    rotation = rotation_at(rope, token.position, params.frequencies[pair]);
  } else {
    rotation = {look_up(rope, rope.cos, token, pair), look_up(rope, rope.sin, token, pair)};
  }
  if (rope.backward) rotation.sin = -rotation.sin;
  return rotation;
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
  const RopeParams& rope = params.rope;
  const std::int64_t first_heads = params.tensors[0].heads;
  rotate_heads<Compute>(
      rope, first_heads + params.tensors[1].heads,
      [&](std::int64_t pair) { return rotation_of(params, token, pair); },
      [&](std::int64_t head, std::int64_t pair, int count, const Compute* cos, const Compute* sin) {
        const bool is_first = head < first_heads;
        const RotateParams::Tensor& tensor = params.tensors[is_first ? 0 : 1];
        const std::int64_t own = is_first ? head : head - first_heads;
        Pairs<Compute> rotated =
            load_pairs<Compute>(rope, tensor.x.data, start_of(tensor.x, token, own), pair, count);
        rotate_pairs(rotated, cos, sin);
        store_pairs(rope, tensor.out.data, start_of(tensor.out, token, own), pair, count, rotated);
      },
      [] {});
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

std::span<const std::int64_t> positions_of(const RopeParams& params) {
  if (params.positions == nullptr) return {};
  const std::int64_t count = params.positions_per_sequence ? params.batch * params.seq : params.seq;
  return {params.positions, static_cast<std::size_t>(count)};
}

}  // namespace

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

namespace {

/// The angles of all tokens, [row, pair], where a row is a token of every sequence or of one.
struct AngleParams {
  RotateParams rotate;
  std::int64_t rows;
  void* cos;
  void* sin;
};

template <class Compute>
__global__ void __launch_bounds__(kThreads)
    compute_angles(const __grid_constant__ AngleParams params) {
  const RopeParams& rope = params.rotate.rope;
  const std::int64_t pairs = pairs_of(rope);
  for_each_index(params.rows * pairs, [&](std::int64_t index) {
    const Token token = token_of(params.rotate, index / pairs);
    const Rotation rotation =
        rotation_at(rope, token.position, params.rotate.frequencies[index % pairs]);
    static_cast<Compute*>(params.cos)[index] = static_cast<Compute>(rotation.cos);
    static_cast<Compute*>(params.sin)[index] =
        static_cast<Compute>(rope.backward ? -rotation.sin : rotation.sin);
  });
}

/// A thread has 8 pairs of a head of a token.
template <class Compute>
__global__ void __launch_bounds__(kThreads)
    rotate_by_angles(const __grid_constant__ AngleParams params) {
  const RopeParams& rope = params.rotate.rope;
  const auto first_heads = static_cast<unsigned>(params.rotate.tensors[0].heads);
  const unsigned heads = first_heads + static_cast<unsigned>(params.rotate.tensors[1].heads);
  const auto pairs = static_cast<unsigned>(pairs_of(rope));
  const unsigned chunks = (pairs + kChunk - 1) / kChunk;
  const auto rows = static_cast<unsigned>(params.rows);
  const auto seq = static_cast<unsigned>(rope.seq);
  const unsigned items = static_cast<unsigned>(rope.batch) * seq * heads * chunks;
  for (unsigned item = blockIdx.x * kThreads + threadIdx.x; item < items;
       item += gridDim.x * kThreads) {
    const unsigned pair = item % chunks * kChunk;
    const unsigned head = item / chunks % heads;
    const unsigned number = item / (chunks * heads);
    const auto count = static_cast<int>(min(pairs - pair, static_cast<unsigned>(kChunk)));
    const std::int64_t angle = static_cast<std::int64_t>(number % rows) * pairs + pair;
    const bool is_first = head < first_heads;
    const RotateParams::Tensor& tensor = params.rotate.tensors[is_first ? 0 : 1];
    const Token token{number / seq, number % seq, 0};
    const unsigned own = is_first ? head : head - first_heads;
    Pairs<Compute> rotated =
        load_pairs<Compute>(rope, tensor.x.data, start_of(tensor.x, token, own), pair, count);
    const auto cos = load_chunk_of<Compute>(static_cast<const Compute*>(params.cos) + angle, count);
    const auto sin = load_chunk_of<Compute>(static_cast<const Compute*>(params.sin) + angle, count);
    rotate_pairs(rotated, cos.values, sin.values);
    store_pairs(rope, tensor.out.data, start_of(tensor.out, token, own), pair, count, rotated);
  }
}

/// Enqueues the rotation and returns true where there are so many tokens that a table of their
/// angles pays; else does nothing.
bool rotate_many(Queue& queue, const RotateParams& params, std::int64_t heads) {
  constexpr std::int64_t kManyTokens = 512;
  constexpr std::int64_t kMostItems = std::int64_t{1} << 31;
  const RopeParams& rope = params.rope;
  const std::int64_t tokens = rope.batch * rope.seq;
  const std::int64_t items = tokens * heads * ceil_div(rope.pairs(), kChunk);
  const bool in_place = std::ranges::all_of(params.tensors, [](const RotateParams::Tensor& tensor) {
    return tensor.x.data == tensor.out.data;
  });
  const bool passes = rope.rotary_dim != rope.head_dim && !in_place;
  if (!params.has_frequencies || passes || tokens < kManyTokens || items >= kMostItems) {
    return false;
  }
  const bool is_f64 = rope.dtype == DType::kF64;
  const std::int64_t rows = rope.positions_per_sequence ? tokens : rope.seq;
  const std::int64_t elements = rows * rope.pairs();
  const std::size_t bytes = static_cast<std::size_t>(elements) * (is_f64 ? 8 : 4);
  const Workspace memory(queue.scratch(), 2 * bytes);
  const AngleParams angles{params, rows, memory.data(), memory.data() + bytes};
  queue.launch(is_f64 ? compute_angles<double> : compute_angles<float>,
               Grid{blocks_for(elements, kThreads), kThreads}, angles);
  queue.launch(is_f64 ? rotate_by_angles<double> : rotate_by_angles<float>,
               Grid{blocks_for(items, kThreads), kThreads}, angles);
  return true;
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
  if (rotate_many(queue, kernel_params, heads)) return;
  queue.launch(first.dtype == DType::kF64 ? rotate_tokens<double> : rotate_tokens<float>,
               Grid{.blocks = {blocks_for(tokens, 1), blocks_for_token(first, heads, tokens)},
                    .threads = threads_for_token(first, heads, kThreads),
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
