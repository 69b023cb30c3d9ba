// attend(): which calls Hopper's kernel takes, and how their tiles are numbered.

#include "cuda/hopper/attend.h"

#include <algorithm>
#include <numeric>

#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/forward_launch.h"
#include "cuda/hopper/forward_params.h"
#include "cuda/hopper/forward_shape.h"
#include "cuda/hopper/tensor_map.h"
#include "cuda/hopper/token_rows.h"
#include "cuda/kernels/forward_launch.h"

namespace ladon::cuda::hopper {
namespace {

constexpr std::int64_t kLongestHead = 256;
// Keys and values that stay in the L2 cache (50 MiB on an H200) while other tiles stream through
// it.
constexpr std::int64_t kSectionBytes = std::int64_t{32} << 20;
// Below this many rows of a tile, half of it or more is padding, and the generic kernel splits the
// keys among more blocks of threads.
constexpr std::int64_t kFewestRows = 64;

/// Of q or out. A box has rows of some heads that share a KV head.
std::optional<CUtensorMap> row_map(const AttentionParams& call, const Operand& operand,
                                   std::int64_t Sequence::*start, std::int64_t columns,
                                   int box_heads, int box_rows) {
  const std::int64_t rows = count_rows(call, operand, start, &Sequence::query_len);
  return make_tensor_map({operand.data,
                          operand.dtype,
                          {columns, call.num_heads, rows},
                          {operand.head_stride, operand.token_stride},
                          {kBoxColumns, box_heads, box_rows / box_heads}});
}

std::optional<CUtensorMap> key_map(const AttentionParams& call, const Operand& operand,
                                   std::int64_t Sequence::*start, std::int64_t columns) {
  const std::int64_t rows = count_rows(call, operand, start, &Sequence::kv_len);
  return make_tensor_map({operand.data,
                          operand.dtype,
                          {columns, rows, call.num_kv_heads},
                          {operand.token_stride, operand.head_stride},
                          {kBoxColumns, kBlockKeys, 1}});
}

/// Heads that share a KV head, or an even part of them, are rows of one tile where there are few
/// tokens.
int packed_heads(const AttentionParams& call, int tile_rows) {
  if (call.max_query_len >= tile_rows) return 1;
  return static_cast<int>(std::gcd(call.group, std::int64_t{tile_rows}));
}

ForwardColumns columns_for(const AttentionParams& call) {
  const auto fits = [&](std::int64_t head, std::int64_t value) {
    return call.head_dim <= head && call.value_dim <= value;
  };
  if (fits(64, 64)) return ForwardColumns::k64;
  if (fits(128, 128)) return ForwardColumns::k128;
  if (fits(192, 128)) return ForwardColumns::k192And128;
  return ForwardColumns::k256;
}

ForwardSchedule make_schedule(const AttentionParams& call, int tile_rows) {
  ForwardSchedule schedule;
  schedule.num_heads = static_cast<int>(call.num_heads);
  schedule.packed_heads = packed_heads(call, tile_rows);
  const std::int64_t packs = call.num_heads / schedule.packed_heads;
  const std::int64_t tokens = tile_rows / schedule.packed_heads;
  schedule.columns = static_cast<int>(call.num_sequences * packs);
  schedule.row_tiles = static_cast<int>((call.max_query_len + tokens - 1) / tokens);
  const std::int64_t bytes = std::max<std::int64_t>(
      1, call.max_kv_len * (call.head_dim + call.value_dim) * std::int64_t{2});
  const std::int64_t kv_heads = std::max<std::int64_t>(1, kSectionBytes / bytes);
  schedule.section_columns = static_cast<int>(
      std::min<std::int64_t>(schedule.columns, kv_heads * (call.group / schedule.packed_heads)));
  return schedule;
}

/// Whether the keys of a sequence are in more than one segment.
bool has_segments(const AttentionParams& call, SegmentSize size) {
  return std::any_of(call.sequences, call.sequences + call.num_sequences, [=](const Sequence& s) {
    const std::int64_t last = s.key_origin + std::max<std::int64_t>(s.kv_len, 1) - 1;
    return size.of_key(s.key_origin) != size.of_key(last);
  });
}

bool is_suited(const AttentionParams& call, const ForwardParams<float>& params,
               ForwardRules rules) {
  if (call.head_dim > kLongestHead || call.value_dim > kLongestHead) return false;
  const int tile_rows = forward_sizes(columns_for(call), rules).tile_rows;
  return params.partials.maximum == nullptr && call.kv_layout.plain() &&
         call.k.dtype == call.q.dtype && call.v.dtype == call.q.dtype &&
         call.out.dtype == call.q.dtype && call.max_kv_len > 0 &&
         call.max_query_len * packed_heads(call, tile_rows) >= kFewestRows &&
         call.num_sequences * call.num_heads * (call.max_query_len / tile_rows + 1) < (1 << 30);
}

}  // namespace

bool attend(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
            ForwardRules rules) {
  if (!is_suited(call, params, rules)) return false;
  const ForwardColumns columns = columns_for(call);
  const ForwardSizes sizes = forward_sizes(columns, rules);
  HopperForwardParams ready;
  ready.schedule = make_schedule(call, sizes.tile_rows);
  const int packed = ready.schedule.packed_heads;
  const std::optional<CUtensorMap> q =
      row_map(call, call.q, &Sequence::q, call.head_dim, packed, sizes.tile_rows);
  const std::optional<CUtensorMap> k = key_map(call, call.k, &Sequence::k, call.head_dim);
  const std::optional<CUtensorMap> v = key_map(call, call.v, &Sequence::v, call.value_dim);
  if (!q || !k || !v) return false;
  ready.q = *q;
  ready.k = *k;
  ready.v = *v;
  const std::optional<CUtensorMap> out =
      row_map(call, call.out, &Sequence::out, call.value_dim, 1, kStoredRows);
  ready.stores_boxes = out && packed == 1;
  if (out) ready.out = *out;

  params.row_tiles = (call.max_query_len * call.group + kMmaRows - 1) / kMmaRows;
  params.value_chunks = 1;
  const auto careful_tiles =
      static_cast<std::size_t>(call.num_sequences * call.num_kv_heads * params.row_tiles);
  const std::size_t bytes = (2 + careful_tiles) * sizeof(int);
  const Workspace counters(queue.scratch(), bytes);
  queue.zero(counters.data(), bytes);
  ready.next_ticket = reinterpret_cast<int*>(counters.data());
  params.unfinished = ready.next_ticket + 1;
  ready.forward = params;

  const int tickets = ready.schedule.columns * ready.schedule.row_tiles;
  const int blocks = std::min(queue.num_multiprocessors(), tickets);
  std::optional<Workspace> earlier;
  if (sizes.earlier_bytes != 0 && has_segments(call, params.segment_size)) {
    earlier.emplace(queue.scratch(), static_cast<std::size_t>(blocks * sizes.earlier_bytes));
    ready.earlier = reinterpret_cast<float4*>(earlier->data());
  }
  const bool is_bf16 = call.q.dtype == DType::kBF16;
  if (rules == ForwardRules::kAll) {
    (is_bf16 ? launch_forward_rules_bf16 : launch_forward_rules_f16)(queue, blocks, columns, ready);
    (is_bf16 ? finish_forward_rules_bf16 : finish_forward_rules_f16)(queue, params);
  } else {
    (is_bf16 ? launch_forward_bf16 : launch_forward_f16)(queue, blocks, columns, ready);
    (is_bf16 ? finish_forward_bf16 : finish_forward_f16)(queue, params);
  }
  return true;
}

}  // namespace ladon::cuda::hopper
