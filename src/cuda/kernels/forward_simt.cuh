// Attention forward with plain multiply-adds: f32, f64, and mixed dtypes, with every option.
//
// A block of 128 threads computes kRows query rows of one KV head over key blocks of 64, and up to
// 128 columns of V. Scores: thread (r, c) of 8 x 16 has rows r + 8i and keys c + 16j; dot products
// run over head_dim in steps of 32 through shared memory, in chains of at most 128 terms. Weighted
// sums: the same rows, and columns c + 16j; a block's 64 keys are summed before they are added to
// the segment's. Masked keys are marked and passed over, so that nothing of theirs is used.
//
// kRows changes nothing but the speed: 8 for few rows, else 32 (16 for f64, for its registers). The
// limit is shared memory: 8 loads for each 16 multiply-adds.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"

namespace ladon::cuda {

inline constexpr int kSimtThreads = 128;
inline constexpr int kSimtLanes = 16;
inline constexpr int kSimtRowGroups = kSimtThreads / kSimtLanes;
inline constexpr int kSimtStep = 32;    // elements of a head at a time
inline constexpr int kSimtChain = 128;  // terms that are summed without a new start
inline constexpr int kSimtColumns = 128;
inline constexpr int kSimtKeysPerThread = kBlockKeys / kSimtLanes;
inline constexpr int kSimtColumnsPerThread = kSimtColumns / kSimtLanes;

template <class Compute, int kRows>
class SimtForwardTile {
 public:
  struct Memory {
    Compute weights[kRows][kBlockKeys];  // -1: masked
    union {
      struct {
        Compute queries[kRows][kSimtStep + 1];
        Compute keys[kBlockKeys][kSimtStep + 1];
      };
      Compute values[kSimtStep][kSimtColumns];
    };
    std::int64_t slots[kBlockKeys];  // -1: no such key
    // Sums of earlier segments.
    Compute earlier[kRows * kSimtColumns];
  };

  __device__ SimtForwardTile(const ForwardParams<Compute>& params, const ForwardTask& task,
                             Memory& memory)
      : params_(params),
        call_(params.call),
        task_(task),
        sequence_(params.call.sequences[task.sequence]),
        memory_(memory),
        rows_(sequence_.query_len * params.call.group),
        first_row_(task.row_tile * kRows),
        first_value_(task.value_chunk * kSimtColumns),
        lane_(static_cast<int>(threadIdx.x) % kSimtLanes),
        group_(static_cast<int>(threadIdx.x) / kSimtLanes) {}

  __device__ void run() {
    if (first_row_ >= rows_) return;
    const std::int64_t last_row = min(rows_, first_row_ + kRows) - 1;
    BlockRange blocks =
        visible_blocks(call_.rules, sequence_, first_row_ / call_.group, last_row / call_.group);
    const bool is_partial = params_.partials.maximum != nullptr;
    if (is_partial) {
      blocks = blocks_in_segment(params_.segment_size, sequence_, blocks, task_.segment);
      if (blocks.begin == blocks.end) return;
    }
    find_rows();
    for (int block = blocks.begin; block < blocks.end;) {
      const int end = min(params_.segment_size.end_after(block), blocks.end);
      run_segment(block, end);
      if (is_partial) {
        store_partial();
      } else {
        fold_segment(end == blocks.end);
      }
      block = end;
    }
    if (!is_partial) store_rows();
  }

 private:
  static constexpr int kThreadRows = kRows / kSimtRowGroups;

  __device__ std::int64_t row_of(int i) const { return first_row_ + group_ + i * kSimtRowGroups; }

  __device__ void find_rows() {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      // A row that does not exist is computed like the last one, and not stored.
      const std::int64_t row = min(row_of(i), rows_ - 1);
      query_[i] = {row / call_.group, task_.kv_head * call_.group + row % call_.group};
    }
  }

  __device__ void run_segment(int block, int end) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      segment_[i] = {};
#pragma unroll
      for (int j = 0; j < kSimtColumnsPerThread; ++j) sums_[i][j] = 0;
    }
    for (; block < end; ++block) {
      const std::int64_t first =
          static_cast<std::int64_t>(block) * kBlockKeys - sequence_.key_origin;
      __syncthreads();
      if (threadIdx.x < kBlockKeys) {
        const std::int64_t key = first + threadIdx.x;
        memory_.slots[threadIdx.x] =
            key >= 0 && key < sequence_.kv_len ? kv_slot(call_.kv_layout, sequence_, key) : -1;
      }
      Compute scores[kThreadRows][kSimtKeysPerThread];
      multiply_keys(scores);
      weigh(scores, first);
      __syncthreads();
      multiply_values();
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      for (int distance = 1; distance < kSimtLanes; distance *= 2) {
        segment_[i].sum += __shfl_xor_sync(0xffffffffU, segment_[i].sum, distance);
      }
    }
  }

  __device__ void multiply_keys(Compute (&scores)[kThreadRows][kSimtKeysPerThread]) {
    Compute chain[kThreadRows][kSimtKeysPerThread] = {};
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kSimtKeysPerThread; ++j) scores[i][j] = 0;
    }
    for (std::int64_t step = 0; step < call_.head_dim; step += kSimtStep) {
      __syncthreads();
      load_step(step);
      __syncthreads();
#pragma unroll 8
      for (int d = 0; d < kSimtStep; ++d) {
        Compute query[kThreadRows];
        Compute key[kSimtKeysPerThread];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
          query[i] = memory_.queries[group_ + i * kSimtRowGroups][d];
        }
#pragma unroll
        for (int j = 0; j < kSimtKeysPerThread; ++j) {
          key[j] = memory_.keys[lane_ + j * kSimtLanes][d];
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
          for (int j = 0; j < kSimtKeysPerThread; ++j) {
            chain[i][j] = fma(query[i], key[j], chain[i][j]);
          }
        }
      }
      if ((step + kSimtStep) % kSimtChain != 0 && step + kSimtStep < call_.head_dim) continue;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < kSimtKeysPerThread; ++j) {
          scores[i][j] += chain[i][j];
          chain[i][j] = 0;
        }
      }
    }
  }

  /// Elements [step, step + 32) of the tile's queries and the block's keys.
  __device__ void load_step(std::int64_t step) {
    const int d = static_cast<int>(threadIdx.x) % kSimtStep;
    const bool is_inside = step + d < call_.head_dim;
    constexpr int kRowsAtOnce = kSimtThreads / kSimtStep;
    for (int row = static_cast<int>(threadIdx.x) / kSimtStep; row < kRows; row += kRowsAtOnce) {
      Compute element = 0;
      if (is_inside && first_row_ + row < rows_) {
        const std::int64_t token = (first_row_ + row) / call_.group;
        const std::int64_t head = task_.kv_head * call_.group + (first_row_ + row) % call_.group;
        element = load_element<Compute>(
            call_.q.data, call_.q.dtype,
            sequence_.q + token * call_.q.token_stride + head * call_.q.head_stride + step + d);
      }
      memory_.queries[row][d] = element;
    }
    for (int key = static_cast<int>(threadIdx.x) / kSimtStep; key < kBlockKeys;
         key += kRowsAtOnce) {
      memory_.keys[key][d] = is_inside ? cached<true>(memory_.slots[key], step + d) : Compute{0};
    }
  }

  /// One element of K or V; 0 where there is no such key.
  template <bool kKeys>
  __device__ Compute cached(std::int64_t slot, std::int64_t column) const {
    if (slot < 0) return 0;
    const Operand& operand = kKeys ? call_.k : call_.v;
    const KvLayout& layout = call_.kv_layout;
    const Compute element = load_stored_element<Compute>(
        operand.data, operand.dtype,
        (kKeys ? sequence_.k : sequence_.v) + slot * operand.token_stride +
            task_.kv_head * operand.head_stride + column);
    const float* scales = kKeys ? layout.k_scales : layout.v_scales;
    if (scales == nullptr) return element;
    return element *
           static_cast<Compute>(
               scales[slot * layout.scale_slot_stride + task_.kv_head * layout.scale_head_stride]);
  }

  __device__ void weigh(Compute (&scores)[kThreadRows][kSimtKeysPerThread], std::int64_t first) {
    const Compute scale = static_cast<Compute>(call_.rules.scale);
    const Compute masked = -static_cast<Compute>(INFINITY);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      Compute largest = segment_[i].maximum;
#pragma unroll
      for (int j = 0; j < kSimtKeysPerThread; ++j) {
        const std::int64_t key = first + lane_ + j * kSimtLanes;
        scores[i][j] = key < 0 ? masked
                               : masked_score(call_.rules, sequence_, query_[i], key,
                                              softcapped(call_.rules, scores[i][j] * scale).score);
        largest = fmax(largest, scores[i][j]);
      }
      for (int distance = 1; distance < kSimtLanes; distance *= 2) {
        largest = fmax(largest, __shfl_xor_sync(0xffffffffU, largest, distance));
      }
      const Compute base = largest == masked ? Compute{0} : largest;
      const Compute rescale =
          largest == segment_[i].maximum ? Compute{1} : exp(segment_[i].maximum - base);
      segment_[i].maximum = largest;
      segment_[i].sum *= rescale;
#pragma unroll
      for (int j = 0; j < kSimtColumnsPerThread; ++j) sums_[i][j] *= rescale;
#pragma unroll
      for (int j = 0; j < kSimtKeysPerThread; ++j) {
        const int key = lane_ + j * kSimtLanes;
        Compute weight = -1;
        if (scores[i][j] != masked) {
          weight = exp(scores[i][j] - base);
          segment_[i].sum += weight;
          weight *= dropout_factor<Compute>(call_.rules, sequence_, query_[i], first + key);
        }
        memory_.weights[group_ + i * kSimtRowGroups][key] = weight;
      }
    }
  }

  __device__ void multiply_values() {
    Compute block_sums[kThreadRows][kSimtColumnsPerThread] = {};
    for (int start = 0; start < kBlockKeys; start += kSimtStep) {
      if (start != 0) __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kSimtStep * kSimtColumns; i += kSimtThreads) {
        const int key = i / kSimtColumns;
        const std::int64_t column = first_value_ + i % kSimtColumns;
        memory_.values[key][i % kSimtColumns] =
            column < call_.value_dim ? cached<false>(memory_.slots[start + key], column)
                                     : Compute{0};
      }
      __syncthreads();
      for (int key = 0; key < kSimtStep; ++key) {
        Compute value[kSimtColumnsPerThread];
#pragma unroll
        for (int j = 0; j < kSimtColumnsPerThread; ++j) {
          value[j] = memory_.values[key][lane_ + j * kSimtLanes];
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
          const Compute weight = memory_.weights[group_ + i * kSimtRowGroups][start + key];
          if (weight < 0) continue;
#pragma unroll
          for (int j = 0; j < kSimtColumnsPerThread; ++j) {
            block_sums[i][j] = fma(weight, value[j], block_sums[i][j]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kSimtColumnsPerThread; ++j) sums_[i][j] += block_sums[i][j];
    }
  }

  __device__ Compute& earlier(int i, int j) {
    return memory_
        .earlier[(i * kSimtColumnsPerThread + j) * kSimtThreads + static_cast<int>(threadIdx.x)];
  }

  __device__ void fold_segment(bool is_last) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const Fold<Compute> fold(total_[i], segment_[i], NaturalExp<Compute>{});
      total_[i] = fold.state;
#pragma unroll
      for (int j = 0; j < kSimtColumnsPerThread; ++j) {
        if (has_earlier_) sums_[i][j] = fold(earlier(i, j), sums_[i][j]);
        if (!is_last) earlier(i, j) = sums_[i][j];
      }
    }
    has_earlier_ = true;
  }

  __device__ void store_partial() const {
    const Partials<Compute>& partials = params_.partials;
    const std::int64_t place = task_.sequence * call_.num_kv_heads + task_.kv_head;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (row_of(i) >= rows_) continue;
      const std::int64_t index = partials.index(place, task_.segment, row_of(i));
      if (lane_ == 0 && task_.value_chunk == 0) {
        partials.maximum[index] = segment_[i].maximum;
        partials.sum[index] = segment_[i].sum;
      }
#pragma unroll
      for (int j = 0; j < kSimtColumnsPerThread; ++j) {
        const std::int64_t column = first_value_ + lane_ + j * kSimtLanes;
        if (column < call_.value_dim) {
          partials.out[index * call_.value_dim + column] = sums_[i][j];
        }
      }
    }
  }

  __device__ void store_rows() const {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (row_of(i) >= rows_) continue;
      const auto [token, head] = query_[i];
      const RowResult<Compute> result =
          finish_row(call_.rules, head, total_[i].maximum, total_[i].sum, Compute{1});
      if (call_.lse.data != nullptr && lane_ == 0 && task_.value_chunk == 0) {
        store_lse(call_.lse,
                  sequence_.lse + token * call_.lse.token_stride + head * call_.lse.head_stride,
                  result.lse);
      }
#pragma unroll
      for (int j = 0; j < kSimtColumnsPerThread; ++j) {
        const std::int64_t column = first_value_ + lane_ + j * kSimtLanes;
        if (column >= call_.value_dim) continue;
        const Compute out = total_[i].sum == 0 ? Compute{0} : result_of(sums_[i][j], result.weight);
        store_element(
            call_.out.data, call_.out.dtype,
            sequence_.out + token * call_.out.token_stride + head * call_.out.head_stride + column,
            out);
      }
    }
  }

  const ForwardParams<Compute>& params_;
  const AttentionParams& call_;
  const ForwardTask& task_;
  const Sequence& sequence_;
  Memory& memory_;
  const std::int64_t rows_;
  const std::int64_t first_row_;
  const std::int64_t first_value_;
  const int lane_;
  const int group_;
  QueryRow query_[kThreadRows];
  RowState<Compute> segment_[kThreadRows];
  RowState<Compute> total_[kThreadRows];
  Compute sums_[kThreadRows][kSimtColumnsPerThread];
  bool has_earlier_ = false;
};

template <class Compute, int kRows>
__global__ void __launch_bounds__(kSimtThreads)
    forward_simt(const __grid_constant__ ForwardParams<Compute> params) {
  using Tile = SimtForwardTile<Compute, kRows>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ForwardTask task(params, std::int64_t{blockIdx.x});
  Tile(params, task, *reinterpret_cast<typename Tile::Memory*>(shared)).run();
}

}  // namespace ladon::cuda
