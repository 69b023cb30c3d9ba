// attend_backward(): which calls Hopper's kernels take.

#include <algorithm>

#include "cuda/hopper/attend.h"
#include "cuda/hopper/backward_launch.h"
#include "cuda/hopper/backward_tile.cuh"
#include "cuda/hopper/tensor_map.h"
#include "cuda/hopper/token_rows.h"

namespace ladon::cuda::hopper {
namespace {

constexpr std::int64_t kLongestHead = 128;
constexpr std::int64_t kMostTickets = std::int64_t{1} << 30;

std::optional<CUtensorMap> map_of(const AttentionParams& call, const Operand& operand,
                                  std::int64_t Sequence::*start, std::int64_t Sequence::*length,
                                  std::int64_t columns, std::int64_t heads) {
  return make_tensor_map({operand.data,
                          operand.dtype,
                          {columns, count_rows(call, operand, start, length), heads},
                          {operand.token_stride, operand.head_stride},
                          {kBoxColumns, kTile, 1}});
}

bool is_suited(const AttentionParams& call) {
  const auto is_bf16 = [](const Operand& operand) { return operand.dtype == DType::kBF16; };
  return only_scale_and_window(call.rules) && is_bf16(call.q) && is_bf16(call.k) &&
         is_bf16(call.v) && is_bf16(call.dout) && call.head_dim <= kLongestHead &&
         call.value_dim <= kLongestHead && call.max_query_len >= kTile && call.max_kv_len >= kTile;
}

}  // namespace

bool attend_backward(Queue& queue, const AttentionParams& call,
                     const backward::BackwardParams& params) {
  if (!is_suited(call)) return false;
  const bool is_wide = call.head_dim > 64 || call.value_dim > 64;
  const auto slots = [&](std::int64_t tiles) {
    return slots_before(tiles, call.num_sequences, own_tiles(is_wide));
  };
  const std::int64_t key_tickets = slots(params.num_key_tiles) * call.num_kv_heads;
  const std::int64_t row_tickets = slots(params.num_row_tiles) * call.num_heads;
  if (std::max(key_tickets, row_tickets) > kMostTickets) return false;
  const auto of_rows = [&](const Operand& operand, std::int64_t Sequence::*start,
                           std::int64_t columns) {
    return map_of(call, operand, start, &Sequence::query_len, columns, call.num_heads);
  };
  const auto of_keys = [&](const Operand& operand, std::int64_t Sequence::*start,
                           std::int64_t columns) {
    return map_of(call, operand, start, &Sequence::kv_len, columns, call.num_kv_heads);
  };
  const std::optional<CUtensorMap> q = of_rows(call.q, &Sequence::q, call.head_dim);
  const std::optional<CUtensorMap> k = of_keys(call.k, &Sequence::k, call.head_dim);
  const std::optional<CUtensorMap> v = of_keys(call.v, &Sequence::v, call.value_dim);
  const std::optional<CUtensorMap> dout = of_rows(call.dout, &Sequence::dout, call.value_dim);
  if (!q || !k || !v || !dout) return false;

  HopperBackwardParams ready{*q, *k, *v, *dout, params, static_cast<float>(call.rules.scale)};
  const auto launch = [&](const auto& kernel, std::int64_t tickets) {
    ready.tickets = static_cast<int>(tickets);
    const auto blocks = std::min<std::int64_t>(queue.num_multiprocessors(), tickets);
    kernel(queue, static_cast<int>(blocks), is_wide, ready);
  };
  if (call.dk.data != nullptr || call.dv.data != nullptr) launch(launch_dkdv_bf16, key_tickets);
  if (call.dq.data != nullptr) launch(launch_dq_bf16, row_tickets);
  return true;
}

}  // namespace ladon::cuda::hopper
