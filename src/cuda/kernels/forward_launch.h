// Launches of the forward kernels; each is defined in the file that instantiates it.
#pragma once

#include <cstdint>

#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

/// What a tensor-core kernel can do to scores: a positive scale and a window; every rule, over any
/// cache.
enum class ForwardRules : std::uint8_t { kWindow, kAll };

/// Which kernel a call needs.
struct ForwardKind {
  bool few_rows = false;  // at most 16 (tensor cores) or 8 rows a KV head
  // Tensor cores only.
  bool streamed = false;  // see is_streamed()
  ForwardRules rules = ForwardRules::kAll;
  bool chains = false;  // at most 8 rows a KV head, over several segments
};

void launch_forward_bf16(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                         const ForwardParams<float>& params);
void launch_forward_f16(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params);
void launch_forward_f32(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params);
void launch_forward_f64(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<double>& params);

/// At most 16 rows a KV head over an int8 or fp8 cache, heads up to 128, aligned rows, a positive
/// scale and a window.
void launch_decode_scaled_bf16(Queue& queue, std::int64_t tasks,
                               const ForwardParams<float>& params);
void launch_decode_scaled_f16(Queue& queue, std::int64_t tasks, const ForwardParams<float>& params);

/// Computes what params.unfinished names.
void finish_forward_bf16(Queue& queue, const ForwardParams<float>& params);
void finish_forward_f16(Queue& queue, const ForwardParams<float>& params);

/// Query rows of one block of threads.
inline constexpr int kMmaRows = 64;
constexpr std::int64_t mma_rows(bool few_rows) { return few_rows ? 16 : kMmaRows; }
constexpr std::int64_t simt_rows(bool few_rows, bool is_f64) {
  return few_rows ? 8 : is_f64 ? 16 : 32;
}

}  // namespace ladon::cuda
