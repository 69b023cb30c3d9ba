// Instantiates the decode kernels over quantised caches for one dtype of queries.
#pragma once

#include "cuda/kernels/decode_scaled.cuh"
#include "cuda/kernels/forward_launch.h"

namespace ladon::cuda {

template <class Half, DType kStored, int kRowGroups>
void launch_decode_scaled(Queue& queue, std::int64_t tasks, const ForwardParams<float>& params) {
  const auto launch = [&](auto kernel, unsigned threads) {
    queue.launch(kernel, {dim3(static_cast<unsigned>(tasks)), dim3(threads)}, params);
  };
  // Up to so many blocks a multiprocessor, two warps for each are faster than one.
  tasks <= 4 * queue.num_multiprocessors()
      ? launch(decode_scaled<Half, kStored, kRowGroups, 2>, 64)
      : launch(decode_scaled<Half, kStored, kRowGroups, 1>, 32);
}

template <class Half>
void launch_decode_scaled(Queue& queue, std::int64_t tasks, const ForwardParams<float>& params) {
  with_quantised_type(params.call.k.dtype, [&](auto stored) {
    params.call.max_query_len* params.call.group <= 8
        ? launch_decode_scaled<Half, stored.kDType, 1>(queue, tasks, params)
        : launch_decode_scaled<Half, stored.kDType, 2>(queue, tasks, params);
  });
}

}  // namespace ladon::cuda
