// The queries and keys of new tokens are rotated in place (rope.cu), and the keys go to a cache's
// slots in the same launch, with their values (kv_rows.cu): a step of decoding.
//
// A block has one token, as in rope.cu; threads that are done with rotating copy values. For cached
// floats of the keys' dtype; all else is two launches. Bits are those of the two.
//
// Meanwhile memory is idle, and attention over one sequence leaves most of its bandwidth unused
// too. So further blocks prefetch the weights of the projection that follows attention into L2: 34
// MB of a Llama-3-8B layer. Attention's own reads are evicted first (copy_async_16_once()).
//
// The limit is the time of a launch. H200, a step of a Llama-3-8B layer: 61.7 us instead of 63.6
// with one sequence over 8192 tokens, 80.9 instead of 82.2 over 32768, 610 instead of 624 with 256
// over 2048 (a list less to upload), no difference with 64 over 8192.
//
// The next kernel starts when this one has ended. Tried and lost: an early start, as in rope.cu.
// The blocks of attention then wait on all multiprocessors while this kernel runs, and are slower
// when they all begin at once (one sequence: 69.4 and 89.8 us).

#include <cstdint>
#include <span>

#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/kernel_list.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/rope.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

/// A new token.
struct Token {
  std::int64_t number;
  std::int64_t sequence;
  std::int64_t index;

  __device__ std::int64_t start_of(const RopeOperand& operand, std::int64_t head) const {
    return sequence * operand.batch_stride + index * operand.token_stride +
           head * operand.head_stride;
  }
};
/// Where it goes.
struct TokenPlace {
  std::int64_t position = 0;
  std::int64_t slot = 0;
};

// Lists up to this length need no upload: heads of up to 256 elements, 128 sequences of a token.
constexpr int kShortList = 128;

/// What is prefetched, by all blocks that have no tokens: `bytes` by each lane of a warp.
struct PrefetchParams {
  const char* data = nullptr;
  std::int64_t total = 0;  // bytes; a multiple of 16, as all of these
  std::int64_t bytes = 0;
};

struct RotateAppendParams {
  RopeParams rope;  // of the queries; its lists are not the device's
  RopeOperand keys;
  std::int64_t num_kv_heads = 0;
  Operand values{};
  std::int64_t value_dim = 0;
  KvSlots k_slots{};
  KvSlots v_slots{};
  KernelList<TokenPlace, kShortList> places;
  KernelList<double, kShortList> frequencies;
  unsigned token_blocks = 0;  // of grid.x; those after them prefetch
  PrefetchParams prefetch;
};

__device__ inline std::int64_t slot_start(const KvSlots& slots, std::int64_t slot,
                                          std::int64_t head) {
  return slot * slots.slot_stride + head * slots.head_stride;
}

/// Rotates a token's queries and keys, and stores the keys in their slot too.
template <class Compute>
__device__ inline void rotate_token(const RotateAppendParams& params, const Token& token,
                                    const TokenPlace& place) {
  const RopeParams& rope = params.rope;
  rotate_heads<Compute>(
      rope, rope.heads + params.num_kv_heads,
      [&](std::int64_t pair) {
        return rotation_at(rope, place.position, params.frequencies[pair]);
      },
      [&](std::int64_t head, std::int64_t pair, int count, const Compute* cos, const Compute* sin) {
        const bool is_query = head < rope.heads;
        const RopeOperand& operand = is_query ? rope.x : params.keys;
        const std::int64_t own = is_query ? head : head - rope.heads;
        const std::int64_t start = token.start_of(operand, own);
        Pairs<Compute> rotated = load_pairs<Compute>(rope, operand.data, start, pair, count);
        rotate_pairs(rotated, cos, sin);
        store_pairs(rope, operand.data, start, pair, count, rotated);
        if (is_query) return;
        store_pairs(rope, params.k_slots.data, slot_start(params.k_slots, place.slot, own), pair,
                    count, rotated);
      },
      [] { wait_for_kernel_before(); });
}

/// The keys' elements past rotary_dim, and the values.
template <class Bits>
__device__ inline void copy_rest(const RotateAppendParams& params, const Token& token,
                                 const TokenPlace& place) {
  constexpr int kWidth = sizeof(uint4) / sizeof(Bits);
  const RopeParams& rope = params.rope;
  // Calls copy(head, i) for the first elements of all chunks of rows [begin, end).
  const auto for_each_chunk = [&](std::int64_t begin, std::int64_t end, const auto& copy) {
    const std::int64_t chunks = (end - begin + kWidth - 1) / kWidth;
    for (std::int64_t item = blockIdx.y * blockDim.x + threadIdx.x;
         item < params.num_kv_heads * chunks; item += gridDim.y * blockDim.x) {
      copy(item / chunks, begin + item % chunks * kWidth);
    }
  };
  const auto count_at = [](std::int64_t end, std::int64_t i) {
    return end - i < kWidth ? static_cast<int>(end - i) : kWidth;
  };
  for_each_chunk(rope.rotary_dim, rope.head_dim, [&](std::int64_t head, std::int64_t i) {
    const std::int64_t from = token.start_of(params.keys, head) + i;
    move_elements(
        static_cast<Bits*>(params.k_slots.data) + slot_start(params.k_slots, place.slot, head) + i,
        static_cast<const Bits*>(params.keys.data) + from, count_at(rope.head_dim, i));
  });
  for_each_chunk(0, params.value_dim, [&](std::int64_t head, std::int64_t i) {
    const std::int64_t from =
        token.number * params.values.token_stride + head * params.values.head_stride + i;
    move_elements(
        static_cast<Bits*>(params.v_slots.data) + slot_start(params.v_slots, place.slot, head) + i,
        static_cast<const Bits*>(params.values.data) + from, count_at(params.value_dim, i));
  });
}

/// Does not wait for the kernel before: no result depends on when memory is prefetched.
__device__ inline void prefetch(const PrefetchParams& params, unsigned block) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x >= kWarp) return;
  const std::int64_t first = (std::int64_t{block} * kWarp + threadIdx.x) * params.bytes;
  if (first >= params.total) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                   __cvta_generic_to_global(params.data + first)),
               "r"(static_cast<unsigned>(min(params.total - first, params.bytes)))
               : "memory");
#endif
}

template <class Compute>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks, or pairs of doubles would be spilled
    rotate_and_append(const __grid_constant__ RotateAppendParams params) {
  if (blockIdx.x >= params.token_blocks) {
    return prefetch(params.prefetch, (blockIdx.x - params.token_blocks) * gridDim.y + blockIdx.y);
  }
  // Angles of lists in the params are computed before the wait, in rotate_token().
  if (params.places.uploaded != nullptr || params.frequencies.uploaded != nullptr) {
    wait_for_kernel_before();
  }
  const RopeParams& rope = params.rope;
  for (std::int64_t number = blockIdx.x; number < rope.batch * rope.seq;
       number += params.token_blocks) {
    const Token token{number, number / rope.seq, number % rope.seq};
    const TokenPlace place = params.places[number];
    rotate_token<Compute>(params, token, place);
    if constexpr (sizeof(Compute) == 8) {
      copy_rest<std::uint64_t>(params, token, place);
    } else if (rope.dtype == DType::kF32) {
      copy_rest<std::uint32_t>(params, token, place);
    } else {
      copy_rest<std::uint16_t>(params, token, place);
    }
  }
}

bool is_in_place(const RopeParams& params) {
  return params.x.data == params.out.data && params.x.batch_stride == params.out.batch_stride &&
         params.x.token_stride == params.out.token_stride &&
         params.x.head_stride == params.out.head_stride;
}

/// Whether the runs have the tokens one after the other, as they are in the keys and values.
bool are_all_tokens_in_order(const RopeParams& keys, const KvRowsParams& rows) {
  std::int64_t token = 0;
  for (std::int64_t n = 0; n < rows.num_runs; ++n) {
    const KvRun& run = rows.runs[n];
    for (std::int64_t i = 0; i < run.count; ++i, ++token) {
      const std::int64_t key =
          token / keys.seq * keys.out.batch_stride + token % keys.seq * keys.out.token_stride;
      if (run.k + i * rows.k.token_stride != key ||
          run.v + i * rows.v.token_stride != token * rows.v.token_stride) {
        return false;
      }
    }
  }
  return token == keys.batch * keys.seq;
}

bool go_together(std::span<const RopeParams> rope, const KvRowsParams& rows) {
  if (rope.size() != 2) return false;
  const RopeParams& keys = rope[1];
  return !keys.backward && !rows.format.scaled && rows.format.dtype == keys.dtype &&
         rows.k.dtype == keys.dtype && rows.v.data != nullptr && rows.v.dtype == keys.dtype &&
         rows.k.data == keys.out.data && rows.k.head_stride == keys.out.head_stride &&
         rows.num_kv_heads == keys.heads && rows.head_dim == keys.head_dim &&
         is_in_place(rope[0]) && is_in_place(keys) && has_same_angles(rope[0], keys) &&
         are_all_tokens_in_order(keys, rows);
}

/// What is worth prefetching of `next`, by so many blocks; nothing where it would be replaced
/// before it is read, or where the projection has so many rows that memory is not its limit.
PrefetchParams prefetch_params(const Queue& queue, const RopeParams& queries,
                               const KvRowsParams& rows, const PrefetchHint& next,
                               std::int64_t blocks) {
  constexpr std::int64_t kMostRows = 64;
  constexpr std::int64_t kChunkBytes = 128;
  const std::int64_t tokens = queries.batch * queries.seq;
  const auto total = static_cast<std::int64_t>(next.bytes);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(next.data) % 16 == 0 && total % 16 == 0;
  if (!is_hopper(queue.kernels()) || next.data == nullptr || total == 0 || !is_aligned ||
      tokens > kMostRows || total > queue.l2_cache() / 4 * 3) {
    return {};
  }
  std::int64_t keys = 0;  // at most; that many are read if each token is a sequence's
  for (std::int64_t token = 0; token < tokens; ++token) {
    keys += queries.position_of(token / queries.seq, token % queries.seq) + 1;
  }
  const auto size = static_cast<std::int64_t>(size_of(queries.dtype));
  const std::int64_t key_bytes = rows.num_kv_heads * (rows.head_dim + rows.value_dim) * size;
  if (keys > 4 * queue.l2_cache() / key_bytes) return {};
  return {.data = static_cast<const char*>(next.data),
          .total = total,
          .bytes = ceil_div(ceil_div(total, blocks * kWarp), kChunkBytes) * kChunkBytes};
}

}  // namespace

void append_kv(Queue& queue, const AppendSteps& steps, const KvRowsParams& rows) {
  const std::span<const RopeParams> rope = steps.rotations;
  if (!go_together(rope, rows)) {
    rotate(queue, rope);
    write_kv(queue, rows);
    return;
  }
  const RopeParams& queries = rope[0];
  const std::int64_t tokens = queries.batch * queries.seq;
  if (tokens == 0) return;
  RotateAppendParams params;
  params.rope = queries;
  params.keys = rope[1].out;
  params.num_kv_heads = rows.num_kv_heads;
  params.values = rows.v;
  params.value_dim = rows.value_dim;
  params.k_slots = rows.k_slots;
  params.v_slots = rows.v_slots;
  const ListForKernel<TokenPlace, kShortList> places(queue, tokens, [&](TokenPlace* place) {
    std::int64_t token = 0;
    for (std::int64_t n = 0; n < rows.num_runs; ++n) {
      for (std::int64_t i = 0; i < rows.runs[n].count; ++i, ++token) {
        place[token] = {queries.position_of(token / queries.seq, token % queries.seq),
                        rows.runs[n].slot + i};
      }
    }
  });
  const ListForKernel<double, kShortList> frequencies(queue, frequencies_of(queries));
  params.places = places.list();
  params.frequencies = frequencies.list();
  const std::int64_t heads = queries.heads + rows.num_kv_heads;
  dim3 blocks(blocks_for(tokens, 1), blocks_for_token(queries, heads, tokens));
  params.token_blocks = blocks.x;
  // One for each multiprocessor.
  const auto columns = static_cast<unsigned>(
      ceil_div(std::int64_t{queue.num_multiprocessors()}, std::int64_t{blocks.y}));
  params.prefetch = prefetch_params(queue, queries, rows, steps.next, columns * blocks.y);
  if (params.prefetch.data != nullptr) blocks.x += columns;
  queue.launch(queries.dtype == DType::kF64 ? rotate_and_append<double> : rotate_and_append<float>,
               Grid{.blocks = blocks,
                    .threads = threads_for_token(queries, heads, kThreads),
                    .starts_early = true},
               params);
}

}  // namespace ladon::cuda
