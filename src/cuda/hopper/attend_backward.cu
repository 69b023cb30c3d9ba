// attend_backward(): which calls Hopper's kernels take.

#include <algorithm>

#include "core/integer.h"
#include "cuda/hopper/attend.h"
#include "cuda/hopper/backward_launch.h"
#include "cuda/hopper/backward_tile.cuh"
#include "cuda/hopper/tensor_map.h"
#include "cuda/hopper/token_rows.h"

namespace ladon::cuda::hopper {
namespace {

constexpr std::int64_t kMostTickets = std::int64_t{1} << 30;

std::optional<CUtensorMap> map_of(const AttentionParams& call, const Operand& operand,
                                  std::int64_t Sequence::*start, std::int64_t Sequence::*length,
                                  std::int64_t columns, std::int64_t heads, int box_rows) {
  return make_tensor_map({operand.data,
                          operand.dtype,
                          {columns, count_rows(call, operand, start, length), heads},
                          {operand.token_stride, operand.head_stride},
                          {kBoxColumns, box_rows, 1}});
}

/// Nothing where the heads are too long.
std::optional<BackwardWidth> width_of(const AttentionParams& call) {
  const auto fits = [&](auto shape) {
    return call.head_dim <= decltype(shape)::kHeadColumns &&
           call.value_dim <= decltype(shape)::kValueColumns;
  };
  if (fits(NarrowShape{})) return BackwardWidth::k64;
  if (fits(MiddleShape{})) return BackwardWidth::k128;
  if (fits(LatentShape{})) return BackwardWidth::k192And128;
  if (fits(WideShape{})) return BackwardWidth::k256;
  return std::nullopt;
}

/// What differs between the shapes.
struct WidthSizes {
  int dq_columns = 0;  // of sums in global memory
  int step_rows = 0;
};
WidthSizes sizes_of(BackwardWidth width) {
  const auto sizes = [](auto shape) {
    return WidthSizes{decltype(shape)::kHeadColumns, decltype(shape)::kStepRows};
  };
  switch (width) {
    case BackwardWidth::k64: return sizes(NarrowShape{});
    case BackwardWidth::k128: return sizes(MiddleShape{});
    case BackwardWidth::k192And128: return sizes(LatentShape{});
    case BackwardWidth::k256: return {0, kTile};
  }
  return {};
}

bool is_suited(const Queue& queue, const AttentionParams& call) {
  if (!is_hopper(queue.kernels())) return false;
  const std::optional<BackwardWidth> width = width_of(call);
  // One kernel computes all three gradients; without dq the generic one has less to do.
  const bool has_kernel = width == BackwardWidth::k256 || (width && call.dq.data != nullptr);
  const auto is_bf16 = [](const Operand& operand) { return operand.dtype == DType::kBF16; };
  return has_kernel && only_scale_and_window(call.rules) && is_bf16(call.q) && is_bf16(call.k) &&
         is_bf16(call.v) && is_bf16(call.dout) && call.max_query_len >= kTile &&
         call.max_kv_len >= kTile;
}

std::size_t count_row_tiles(const AttentionParams& call, std::int64_t num_row_tiles) {
  return saturating_product(static_cast<std::size_t>(num_row_tiles),
                            static_cast<std::size_t>(call.num_heads));
}

/// Blocks of one head that start together wait for each other, because all add to the same rows
/// first, unless the window keeps them apart. With causal masks the longest blocks of a head come
/// last, and few heads at once leave less to do at the end, unless all blocks are short (H200,
/// heads of 128, causal, one head and 16: S1024 634 and 611 us, S4096 1567 and 1778 us).
int heads_at_once(const AttentionParams& call) {
  constexpr std::int64_t kShort = 1024;
  return call.rules.window_right <= 0 && call.max_kv_len > kShort ? 1 : 16;
}

/// Of the sums of dq.
std::size_t tile_bytes(BackwardWidth width) {
  return sizeof(float) * kTile * static_cast<std::size_t>(sizes_of(width).dq_columns);
}

/// Of the kernels for heads up to 256: as many as have what all their blocks read in the L2 cache,
/// so that the longest blocks of several heads come first, and short ones at the end.
int wide_heads_at_once(const Queue& queue, const AttentionParams& call, std::int64_t rows,
                       std::int64_t heads) {
  constexpr std::int64_t kElementBytes = 2;
  const std::int64_t bytes = rows * (call.head_dim + call.value_dim) * kElementBytes;
  return static_cast<int>(std::clamp<std::int64_t>(queue.l2_cache() / 2 / bytes, 1, heads));
}

/// Two kernels, with nothing in global memory between them.
void attend_wide(Queue& queue, const AttentionParams& call, HopperBackwardParams ready) {
  prepare_keys(queue, ready.backward);
  const auto blocks = [&] { return std::min(queue.num_multiprocessors(), ready.tickets); };
  if (call.dk.data != nullptr || call.dv.data != nullptr) {
    ready.tickets = static_cast<int>(ready.backward.num_key_tiles * call.num_kv_heads);
    ready.heads_at_once =
        wide_heads_at_once(queue, call, call.max_query_len * call.group, call.num_kv_heads);
    launch_wide_keys_bf16(queue, blocks(), ready);
  }
  if (call.dq.data != nullptr) {
    ready.tickets = static_cast<int>(
        slots_before<kRowTiles>(ready.backward.num_row_tiles, call.num_sequences) * call.num_heads);
    // Heads of a group share keys and values.
    const int kv_heads = wide_heads_at_once(queue, call, call.max_kv_len, call.num_kv_heads);
    ready.heads_at_once = kv_heads * static_cast<int>(call.group);
    ++ready.backward.next_ticket;
    launch_wide_rows_bf16(queue, blocks(), ready);
  }
}

}  // namespace

std::size_t backward_bytes(const Queue& queue, const AttentionParams& call,
                           std::int64_t num_row_tiles) {
  if (!is_suited(queue, call) || width_of(call) == BackwardWidth::k256) return 0;
  return saturating_product(count_row_tiles(call, num_row_tiles),
                            tile_bytes(*width_of(call)) + sizeof(unsigned));
}

bool attend_backward(Queue& queue, const AttentionParams& call,
                     const backward::BackwardParams& params, std::byte* scratch) {
  if (!is_suited(queue, call)) return false;
  const BackwardWidth width = *width_of(call);
  const std::int64_t tickets =
      slots_before(params.num_key_tiles, call.num_sequences) * call.num_kv_heads;
  const std::size_t row_tiles = count_row_tiles(call, params.num_row_tiles);
  const std::int64_t most =
      std::max({tickets, params.num_key_tiles * call.num_kv_heads,
                static_cast<std::int64_t>(row_tiles) + call.num_sequences * call.num_heads});
  if (most > kMostTickets) return false;
  const auto of_rows = [&](const Operand& operand, std::int64_t Sequence::*start,
                           std::int64_t columns) {
    return map_of(call, operand, start, &Sequence::query_len, columns, call.num_heads,
                  sizes_of(width).step_rows);
  };
  const auto of_keys = [&](const Operand& operand, std::int64_t Sequence::*start,
                           std::int64_t columns) {
    return map_of(call, operand, start, &Sequence::kv_len, columns, call.num_kv_heads, kTile);
  };
  const std::optional<CUtensorMap> q = of_rows(call.q, &Sequence::q, call.head_dim);
  const std::optional<CUtensorMap> k = of_keys(call.k, &Sequence::k, call.head_dim);
  const std::optional<CUtensorMap> v = of_keys(call.v, &Sequence::v, call.value_dim);
  const std::optional<CUtensorMap> dout = of_rows(call.dout, &Sequence::dout, call.value_dim);
  if (!q || !k || !v || !dout) return false;

  HopperBackwardParams ready{*q, *k, *v, *dout, params, static_cast<float>(call.rules.scale)};
  if (width == BackwardWidth::k256) {
    attend_wide(queue, call, ready);
    return true;
  }
  ready.tickets = static_cast<int>(tickets);
  ready.heads_at_once = heads_at_once(call);
  ready.dq_sums = reinterpret_cast<float*>(scratch);
  ready.dq_turns = reinterpret_cast<unsigned*>(scratch + row_tiles * tile_bytes(width));
  queue.zero(ready.dq_turns, row_tiles * sizeof(unsigned));
  const auto blocks = std::min<std::int64_t>(queue.num_multiprocessors(), tickets);
  launch_backward_bf16(queue, static_cast<int>(blocks), width, ready);
  launch_finish_dq_bf16(queue, width, ready);
  return true;
}

}  // namespace ladon::cuda::hopper
