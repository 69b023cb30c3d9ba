// attend_latents(): which calls Hopper's latent kernel takes, and how they are cut into tasks.

#include "cuda/hopper/attend_latents.h"

#include <algorithm>

#include "cuda/hopper/latent_launch.h"
#include "cuda/hopper/latent_params.h"
#include "cuda/hopper/tensor_map.h"
#include "cuda/hopper/token_rows.h"
#include "cuda/kernels/forward_finish.h"
#include "cuda/kernels/tile_stream.cuh"

namespace ladon::cuda::hopper {
namespace {

// Rows a KV head up to which parts of the keys are computed apart; as in kernels/forward.cu, a
// constant keeps memory linear.
constexpr std::int64_t kMostSplitRows = 1024;
// Rows of a page in the layout that products read: whole groups of 8.
constexpr std::int64_t kShortestPage = 8;
constexpr std::int64_t kMostTasks = std::int64_t{1} << 30;

/// Whether values are the first columns of the keys.
bool has_latents(const AttentionParams& call) {
  return call.v.data == call.k.data && call.v.token_stride == call.k.token_stride &&
         call.v.head_stride == call.k.head_stride &&
         std::all_of(call.sequences, call.sequences + call.num_sequences,
                     [](const Sequence& sequence) { return sequence.v == sequence.k; });
}

/// Latents that one copy takes; 0 where copies cannot take them as they are stored.
std::int64_t box_rows(const AttentionParams& call) {
  const std::int64_t page = call.kv_layout.page_size;
  if (call.kv_layout.ring_slots != 0) return 0;
  if (page % kBlockKeys == 0) return kBlockKeys;
  const bool is_whole = std::all_of(
      call.sequences, call.sequences + call.num_sequences,
      [](const Sequence& sequence) { return sequence.key_origin == 0 && sequence.k == 0; });
  return is_whole && kBlockKeys % page == 0 && page >= kShortestPage ? page : 0;
}

/// Of the tensor that the copies read; pages may be anywhere.
std::int64_t count_latents(const AttentionParams& call) {
  constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1;
  return call.kv_layout.page_size != 0 ? kMostRows
                                       : count_rows(call, call.k, &Sequence::k, &Sequence::kv_len);
}

std::optional<CUtensorMap> latent_map(const AttentionParams& call, std::int64_t rows_at_once) {
  return make_tensor_map({call.k.data,
                          call.k.dtype,
                          {call.head_dim, count_latents(call), call.num_kv_heads},
                          {call.k.token_stride, call.k.head_stride},
                          {64, static_cast<int>(rows_at_once), 1}});
}

/// The same with `columns` of the values in one box. It cannot tell where a row ends, so rows must
/// have them all.
std::optional<CUtensorMap> wide_map(const AttentionParams& call, std::int64_t rows_at_once,
                                    int columns) {
  if (rows_at_once != kBlockKeys || call.num_kv_heads != 1) {
    return std::nullopt;
  }
  return make_tensor_map({call.k.data,
                          call.k.dtype,
                          {64, count_latents(call), kLatentColumns / 64},
                          {call.k.token_stride, 64},
                          {64, static_cast<int>(kBlockKeys), columns / 64}});
}

/// Parts of the keys: as many as give all multiprocessors the same work. Costs are in segments of a
/// tile, about 12 us. The first part folds its segments; those of the others are written, read and
/// folded by another kernel.
LatentSchedule make_schedule(const AttentionParams& call, std::int64_t segments,
                             int multiprocessors) {
  constexpr double kTaskCost = 0.3;
  constexpr double kFoldCost = 0.1;
  constexpr double kLaunchCost = 0.25;
  constexpr double kApartCost = 0.004;
  const std::int64_t rows = call.max_query_len * call.group;
  LatentSchedule schedule;
  schedule.row_tiles = static_cast<int>((rows + kLatentRows - 1) / kLatentRows);
  schedule.has_pairs = schedule.row_tiles % 2 == 0;
  const std::int64_t tiles = call.num_sequences * call.num_kv_heads * schedule.row_tiles;
  const std::int64_t most =
      rows > kMostSplitRows ? 1 : std::min<std::int64_t>(segments, 2 * multiprocessors);
  double best = 0;
  for (std::int64_t parts = 1; parts <= std::max<std::int64_t>(1, most); ++parts) {
    const std::int64_t length = std::max<std::int64_t>(1, (segments + parts - 1) / parts);
    if (parts > 1 && (segments + length - 1) / length != parts) continue;
    const auto rounds =
        static_cast<double>((tiles * parts + multiprocessors - 1) / multiprocessors);
    double cost = rounds * (static_cast<double>(length) * (1 + kFoldCost) + kTaskCost);
    if (parts > 1) {
      cost += kLaunchCost + kApartCost * static_cast<double>(tiles * (segments - length));
    }
    if (parts > 1 && cost >= best) continue;
    best = cost;
    schedule.parts = static_cast<int>(parts);
    schedule.part_segments = static_cast<int>(length);
  }
  schedule.tasks = static_cast<int>(std::min(kMostTasks, tiles * schedule.parts));
  return schedule;
}

/// Scratch memory of a call.
class LatentScratch {
 public:
  LatentScratch(Queue& queue, const AttentionParams& call, const LatentSchedule& schedule,
                std::int64_t segments, std::int64_t blocks)
      : earlier_(schedule.part_segments > 1 ? blocks * 2 * (kSumColumns / 8) * std::int64_t{128} * 4
                                            : 0),
        partials_{.segments = segments, .rows = call.max_query_len * call.group},
        states_(schedule.parts > 1
                    ? call.num_sequences * call.num_kv_heads * segments * partials_.rows
                    : 0),
        memory_(queue.scratch(), static_cast<std::size_t>(
                                     earlier_ + states_ * (2 + call.value_dim) + schedule.tasks) *
                                     sizeof(float)) {
    if (states_ == 0) return;
    partials_.out = floats() + earlier_;
    partials_.maximum = partials_.out + states_ * call.value_dim;
    partials_.sum = partials_.maximum + states_;
    flags_ = states_ * (2 + call.value_dim);
  }

  float4* earlier() const { return reinterpret_cast<float4*>(floats()); }
  const Partials<float>& partials() const { return partials_; }
  int* flags() const { return reinterpret_cast<int*>(floats() + earlier_ + flags_); }

 private:
  float* floats() const { return reinterpret_cast<float*>(memory_.data()); }

  const std::int64_t earlier_;
  Partials<float> partials_;
  const std::int64_t states_;
  std::int64_t flags_ = 0;
  const Workspace memory_;
};

}  // namespace

bool takes_latents(const AttentionParams& call) {
  return call.head_dim >= kLatentColumns && call.head_dim <= kLatentKeyColumns &&
         call.value_dim == kLatentColumns && call.max_kv_len > 0 && has_latents(call) &&
         box_rows(call) != 0;
}

bool attend_latents(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
                    std::int64_t segments) {
  if (!params.aligned_q || !params.aligned_k || !params.aligned_out) return false;
  const std::int64_t rows_at_once = box_rows(call);
  const std::optional<CUtensorMap> map = latent_map(call, rows_at_once);
  LatentParams ready;
  ready.schedule = make_schedule(call, segments, queue.num_multiprocessors());
  if (!map || ready.schedule.tasks == kMostTasks) return false;
  const bool has_pairs = ready.schedule.has_pairs;
  const int multiprocessors = queue.num_multiprocessors();
  const int blocks =
      std::min(has_pairs ? multiprocessors / 2 * 2 : multiprocessors, ready.schedule.tasks);
  const LatentScratch scratch(queue, call, ready.schedule, segments, blocks);
  params.partials = scratch.partials();
  params.unfinished = scratch.flags();
  ready.latents = *map;
  const std::optional<CUtensorMap> wide =
      wide_map(call, rows_at_once, has_pairs ? kLatentColumns / 2 : kLatentColumns);
  ready.has_wide_boxes = wide.has_value();
  if (wide) ready.wide_latents = *wide;
  ready.has_rope = call.head_dim > kLatentColumns;
  ready.forward = params;
  ready.box_rows = static_cast<int>(rows_at_once);
  // Latents are read once, by one tile or a pair; folded sums must not make way for them.
  if (ready.schedule.row_tiles <= 2) ready.policy = L2Policy::kEvictFirst;
  ready.earlier = scratch.earlier();
  ready.unfinished = scratch.flags();

  const bool is_bf16 = call.q.dtype == DType::kBF16;
  (is_bf16 ? launch_latent_bf16 : launch_latent_f16)(queue, blocks, ready);
  if (ready.schedule.parts > 1) fold_partials(queue, params, ready.schedule.part_segments);
  params.partials = {};
  params.row_tiles = ready.schedule.row_tiles;
  params.value_chunks = (call.value_dim + kTileColumns - 1) / kTileColumns;
  (is_bf16 ? finish_streamed_bf16 : finish_streamed_f16)(queue, params, ready.schedule.parts);
  return true;
}

}  // namespace ladon::cuda::hopper
