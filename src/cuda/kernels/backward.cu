// attend_backward(): takes all memory, then enqueues the kernels: statistics of rows, dk and dv,
// dq, and the gradients of bias and sinks. Memory is 8 bytes for each row and head (16 in double),
// and flags for each 64 rows and keys; on Hopper also dq in f32.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/integer.h"
#include "cuda/hopper/attend.h"
#include "cuda/kernels/backward.cuh"
#include "cuda/operations.h"
#include "cuda/sequences.h"

namespace ladon::cuda {
namespace backward {
namespace {

/// Small GPUs do not have the shared memory for heads above 128.
bool use_tensor_cores(const Queue& queue, const AttentionParams& call) {
  const DType dtype = call.q.dtype;
  return (dtype == DType::kF16 || dtype == DType::kBF16) && call.k.dtype == dtype &&
         call.head_dim <= kMmaLongestHead && call.value_dim <= kMmaLongestHead &&
         mma_shared_bytes(call) <= queue.shared_memory();
}

/// Whether all rows of an operand of 16-bit elements begin at multiples of 16 bytes.
bool has_aligned_rows(const AttentionParams& call, const Operand& operand,
                      std::int64_t Sequence::*offset) {
  if (reinterpret_cast<std::uintptr_t>(operand.data) % 16 != 0) return false;
  if (operand.token_stride % 8 != 0 || operand.head_stride % 8 != 0) return false;
  return std::all_of(call.sequences, call.sequences + call.num_sequences,
                     [&](const Sequence& sequence) { return sequence.*offset % 8 == 0; });
}

/// The largest number of keys that are padding in a sequence.
std::int64_t most_padding(const AttentionParams& call) {
  std::int64_t most = 0;
  for (std::int64_t s = 0; s < call.num_sequences; ++s) {
    most = std::max(most, call.padded_kv_len - call.sequences[s].kv_len);
  }
  return most;
}

/// Counts of rows and tiles before each sequence; the last of each list is the total. One block of
/// memory, because it is one copy to the device, with zeros for any_not_finite and tickets at the
/// end.
class TileStarts {
 public:
  explicit TileStarts(const AttentionParams& call)
      : size_(static_cast<std::size_t>(call.num_sequences) + 1), list_(3 * size_ + 2) {
    const auto tiles = [](std::int64_t n) { return (n + kTile - 1) / kTile; };
    for (std::size_t s = 0; s + 1 < size_; ++s) {
      const Sequence& sequence = call.sequences[s];
      list_[s + 1] = list_[s] + sequence.query_len;
      list_[size_ + s + 1] = list_[size_ + s] + tiles(sequence.query_len);
      list_[2 * size_ + s + 1] = list_[2 * size_ + s] + tiles(sequence.kv_len);
    }
  }

  std::int64_t num_rows() const { return list_[size_ - 1]; }
  std::int64_t num_row_tiles() const { return list_[2 * size_ - 1]; }
  std::int64_t num_key_tiles() const { return list_[3 * size_ - 1]; }
  std::size_t bytes() const { return list_.size() * sizeof(std::int64_t); }

  void upload(Queue& queue, std::byte* to, BackwardParams& params) const {
    queue.upload(to, list_.data(), bytes());
    auto* const list = reinterpret_cast<std::int64_t*>(to);
    params.row_starts = list;
    params.row_tile_starts = list + size_;
    params.key_tile_starts = list + 2 * size_;
    params.num_rows = num_rows();
    params.num_row_tiles = num_row_tiles();
    params.num_key_tiles = num_key_tiles();
    params.any_not_finite = reinterpret_cast<unsigned*>(list + 3 * size_);
    params.next_ticket = params.any_not_finite + 2;
  }

 private:
  std::size_t size_;
  std::vector<std::int64_t> list_;
};

/// All memory of a call, taken before its first kernel.
class BackwardMemory {
 public:
  BackwardMemory(Queue& queue, const AttentionParams& call)
      : BackwardMemory(queue, call, TileStarts(call), use_tensor_cores(queue, call)) {}

  const BackwardParams& params() const noexcept { return params_; }
  bool tensor_cores() const noexcept { return tensor_cores_; }
  std::byte* hopper() const noexcept { return hopper_.data(); }

 private:
  BackwardMemory(Queue& queue, const AttentionParams& call, const TileStarts& starts,
                 bool tensor_cores)
      : tensor_cores_(tensor_cores),
        sequences_(queue, call),
        starts_(queue.scratch(), starts.bytes()),
        stats_(queue.scratch(), stats_bytes(call, starts)),
        live_rows_(queue.scratch(),
                   saturating_product(sizeof(std::uint64_t), row_flags(call, starts))),
        rows_not_finite_(queue.scratch(), row_flags(call, starts)),
        keys_not_finite_(queue.scratch(), key_flags(call, starts)),
        hopper_(queue.scratch(), hopper::backward_bytes(queue, call, starts.num_row_tiles())) {
    params_.call = sequences_.params();
    params_.aligned = {has_aligned_rows(call, call.q, &Sequence::q),
                       has_aligned_rows(call, call.k, &Sequence::k),
                       has_aligned_rows(call, call.v, &Sequence::v),
                       has_aligned_rows(call, call.dout, &Sequence::dout)};
    starts.upload(queue, starts_.data(), params_);
    params_.stats = stats_.data();
    params_.live_rows = reinterpret_cast<std::uint64_t*>(live_rows_.data());
    params_.rows_not_finite = reinterpret_cast<std::uint8_t*>(rows_not_finite_.data());
    params_.keys_not_finite = reinterpret_cast<std::uint8_t*>(keys_not_finite_.data());
    params_.lse_shows_q = only_scale_and_window(call.rules) && call.rules.sinks.data == nullptr;
    if (!tensor_cores_) params_.any_not_finite = nullptr;
  }

  static std::size_t heads_times(std::int64_t heads, std::int64_t count) {
    return saturating_product(static_cast<std::size_t>(heads), static_cast<std::size_t>(count));
  }
  static std::size_t stats_bytes(const AttentionParams& call, const TileStarts& starts) {
    const std::size_t bytes =
        call.q.dtype == DType::kF64 ? sizeof(RowStats<double>) : sizeof(RowStats<float>);
    return saturating_product(bytes, heads_times(call.num_heads, starts.num_rows()));
  }
  std::size_t row_flags(const AttentionParams& call, const TileStarts& starts) const {
    if (!tensor_cores_) return 0;
    return heads_times(call.num_heads, starts.num_row_tiles());
  }
  std::size_t key_flags(const AttentionParams& call, const TileStarts& starts) const {
    if (!tensor_cores_) return 0;
    return heads_times(call.num_kv_heads, starts.num_key_tiles());
  }

  const bool tensor_cores_;
  DeviceSequences sequences_;
  Workspace starts_;
  Workspace stats_;
  Workspace live_rows_;
  Workspace rows_not_finite_;
  Workspace keys_not_finite_;
  Workspace hopper_;
  BackwardParams params_;
};

}  // namespace
}  // namespace backward

void attend_backward(Queue& queue, const AttentionParams& call) {
  using namespace backward;
  const BackwardMemory memory(queue, call);
  const BackwardParams& params = memory.params();
  const bool tensor_cores = memory.tensor_cores();
  zero_padding(queue, params, most_padding(call));
  prepare_rows(queue, params);
  const bool is_done = hopper::attend_backward(queue, call, params, memory.hopper());
  if (tensor_cores && !is_done) prepare_keys(queue, params);
  const auto gradients_of_keys = [&] {
    if (!tensor_cores) return simt_dkdv(queue, params);
    if (!is_done) mma_dkdv(queue, params);
    careful_mma_dkdv(queue, params);
  };
  const auto gradients_of_rows = [&] {
    if (!tensor_cores) return simt_dq(queue, params);
    if (!is_done) mma_dq(queue, params);
    careful_mma_dq(queue, params);
  };
  if (call.dk.data != nullptr || call.dv.data != nullptr) gradients_of_keys();
  if (call.dq.data != nullptr) gradients_of_rows();
  if (call.dbias.data != nullptr) bias_gradient(queue, params);
  if (call.dsinks.data != nullptr) sink_gradient(queue, params);
}

}  // namespace ladon::cuda
