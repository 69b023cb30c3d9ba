// What the tests of caches share: one of every kind, and ways to compare what they hold.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/element.h"
#include "ladon/kv_cache.h"
#include "ladon/paged_kv_cache.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "support/contexts.h"
#include "support/host_context.h"

namespace ladon::test {

inline constexpr DType kStorages[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kI8,
                                      DType::kF8E4M3};

/// A kind of cache, and what it is made with.
struct CacheKind {
  std::string name;
  std::int64_t page_size = 0;     // paged
  std::int64_t window_left = -1;  // window
};

inline std::vector<CacheKind> unlimited_kinds() {
  return {{"contiguous"}, {"paged", 1}, {"paged", 7}, {"paged", 16}, {"paged", 64}};
}

inline KvCache make_cache(const Context& context, const CacheKind& kind,
                          const KvCacheOptions& options, std::int64_t pool_tokens = 2048,
                          std::int64_t spare = 4) {
  if (kind.name == "contiguous") return KvCache::contiguous(context, options);
  if (kind.name == "window") return KvCache::window(context, options, kind.window_left, spare);
  // Every sequence may leave its last page part empty.
  const std::int64_t pages = pool_tokens / kind.page_size + 4 * options.batch;
  return KvCache::paged(std::make_shared<PagePool>(context, options, kind.page_size, pages),
                        options.batch);
}

/// On the Context's device.
inline Tensor random_tensor(const Context& context, DType dtype, const Dims& shape,
                            std::uint64_t stream, double deviation = 1) {
  Tensor tensor(context, dtype, shape);
  fill_normal(context, tensor, 0, deviation, 77, stream);
  return tensor;
}
inline Tensor random_tensor(DType dtype, const Dims& shape, std::uint64_t stream,
                            double deviation = 1) {
  return random_tensor(host_context(), dtype, shape, stream, deviation);
}

/// Of a view on the host.
inline double number_at(const ConstTensorView& view, std::int64_t i) {
  return load_element(view.data(), view.dtype(), i);
}

/// The largest difference, as a share of the largest number of `truth`. NaN where a number is one.
inline double relative_difference(const Tensor& got, const Tensor& truth) {
  const std::vector<double> left = elements_of(got);
  const std::vector<double> right = elements_of(truth);
  double difference = 0;
  double largest = 1e-30;
  for (std::size_t i = 0; i < right.size(); ++i) {
    const double error = std::fabs(left.at(i) - right[i]);
    if (std::isnan(error)) return error;
    difference = std::max(difference, error);
    largest = std::max(largest, std::fabs(right[i]));
  }
  return difference / largest;
}

/// The slot of key j of a sequence, as KvSequenceView says.
inline std::int64_t slot_in(const KvCacheView& view, const KvSequenceView& sequence,
                            std::int64_t j) {
  if (view.page_size != 0) {
    return sequence.pages[j / view.page_size] * view.page_size + j % view.page_size;
  }
  if (view.ring_slots != 0) {
    return sequence.first_slot + (sequence.ring_start + j) % view.ring_slots;
  }
  return sequence.first_slot + j;
}

/// Which slots the sequences of a view hold.
inline std::vector<bool> live_slots(const KvCacheView& view) {
  std::vector<bool> live(static_cast<std::size_t>(view.num_slots), false);
  for (const KvSequenceView& sequence : view.sequences) {
    for (std::int64_t j = 0; j < sequence.length; ++j) {
      live[static_cast<std::size_t>(slot_in(view, sequence, j))] = true;
    }
  }
  return live;
}

/// Calls visit(begin, end) for each run of slots whose entry is `wanted`.
template <class Visit>
void for_each_run(const std::vector<bool>& slots, bool wanted, const Visit& visit) {
  for (auto begin = slots.begin(); begin != slots.end();) {
    begin = std::find(begin, slots.end(), wanted);
    const auto end = std::find(begin, slots.end(), !wanted);
    if (begin != end) visit(begin - slots.begin(), end - slots.begin());
    begin = end;
  }
}

/// A view that the host can read: a cache's own where it is on the host, else one of copies.
struct HostView {
  KvCacheView view{};
  Tensor k{}, v{}, k_scales{}, v_scales{};
};

/// Copies the slots that are held and no others: what a cache has not written is not read.
inline HostView host_view(const Context& context, const KvCacheView& cache) {
  HostView host{.view = cache};
  if (cache.device.is_cpu()) return host;
  const std::vector<bool> live = live_slots(cache);
  const auto download = [&](const void* data, DType dtype, std::int64_t slot_stride) {
    const ConstTensorView slots(data, dtype, {cache.num_slots, slot_stride}, cache.device);
    Tensor copies(dtype, slots.shape());
    for_each_run(live, true, [&](std::int64_t begin, std::int64_t end) {
      copy(context, slots.slice(0, begin, end), copies.view().slice(0, begin, end));
    });
    return copies;
  };
  host.k = download(cache.k, cache.format.dtype, cache.k_slot_stride);
  host.v = download(cache.v, cache.format.dtype, cache.v_slot_stride);
  host.view.k = host.k.data();
  host.view.v = host.v.data();
  host.view.device = DeviceId();
  if (cache.k_scales == nullptr) return host;
  host.k_scales = download(cache.k_scales, DType::kF32, cache.scale_slot_stride);
  host.v_scales = download(cache.v_scales, DType::kF32, cache.scale_slot_stride);
  host.view.k_scales = host.k_scales.data_as<float>();
  host.view.v_scales = host.v_scales.data_as<float>();
  return host;
}

/// All numbers of one sequence in order, key by key, scales applied: what attention would read. Of
/// a view on the host.
inline std::vector<double> content_of(const KvCacheView& view, std::int64_t b) {
  const KvSequenceView& sequence = view.sequences[static_cast<std::size_t>(b)];
  std::vector<double> numbers;
  for (std::int64_t j = 0; j < sequence.length; ++j) {
    const std::int64_t slot = slot_in(view, sequence, j);
    for (std::int64_t head = 0; head < view.num_kv_heads; ++head) {
      const auto add = [&](const void* data, std::int64_t start, std::int64_t dim,
                           const float* scales) {
        const double scale =
            scales == nullptr
                ? 1
                : static_cast<double>(
                      scales[slot * view.scale_slot_stride + head * view.scale_head_stride]);
        for (std::int64_t i = 0; i < dim; ++i) {
          numbers.push_back(load_element(data, view.format.dtype, start + i) * scale);
        }
      };
      add(view.k, slot * view.k_slot_stride + head * view.k_head_stride, view.head_dim,
          view.k_scales);
      add(view.v, slot * view.v_slot_stride + head * view.v_head_stride, view.value_dim,
          view.v_scales);
    }
  }
  return numbers;
}

inline std::vector<double> content_of(const Context& context, const KvCache& cache,
                                      std::int64_t b) {
  return content_of(host_view(context, cache.view()).view, b);
}
inline std::vector<double> content_of(const KvCache& cache, std::int64_t b) {
  return content_of(cache.view(), b);
}

/// Everything that can be seen of a cache.
struct CacheState {
  std::vector<std::int64_t> lengths, held;
  std::vector<std::vector<double>> content;
  std::int64_t bytes_used = 0, bytes_reserved = 0, mha_bytes = 0;
  bool operator==(const CacheState&) const = default;
};

inline CacheState state_of(const Context& context, const KvCache& cache) {
  CacheState state;
  const HostView host = host_view(context, cache.view());
  for (std::int64_t b = 0; b < cache.batch(); ++b) {
    state.lengths.push_back(cache.length(b));
    state.held.push_back(cache.held(b));
    state.content.push_back(content_of(host.view, b));
  }
  state.bytes_used = cache.bytes_used();
  state.bytes_reserved = cache.bytes_reserved();
  state.mha_bytes = cache.mha_bytes();
  return state;
}

inline CacheState state_of(const KvCache& cache) { return state_of(host_context(), cache); }

/// Overwrites with NaN the slots that are not live.
inline void poison_slots(const Context& context, const KvCacheView& memory,
                         const std::vector<bool>& live) {
  const auto poison = [&](const void* data, DType dtype, std::int64_t stride) {
    const TensorView slots(const_cast<void*>(data), dtype, {memory.num_slots, stride},
                           memory.device);
    for_each_run(live, false, [&](std::int64_t begin, std::int64_t end) {
      const std::vector<double> nans(static_cast<std::size_t>((end - begin) * stride),
                                     std::nan(""));
      set_elements(context, slots.slice(0, begin, end), nans);
    });
  };
  if (memory.k_scales != nullptr) {
    poison(memory.k_scales, DType::kF32, memory.scale_slot_stride);
    poison(memory.v_scales, DType::kF32, memory.scale_slot_stride);
  } else {
    poison(memory.k, memory.format.dtype, memory.k_slot_stride);
    poison(memory.v, memory.format.dtype, memory.v_slot_stride);
  }
}

/// Poisons every slot that no sequence of these caches, which share their memory, holds.
inline void poison_dead_slots(const Context& context, const std::vector<const KvCache*>& caches) {
  const KvCacheView memory = caches.front()->view();
  std::vector<bool> live(static_cast<std::size_t>(memory.num_slots), false);
  for (const KvCache* cache : caches) {
    const std::vector<bool> held = live_slots(cache->view());
    std::transform(live.begin(), live.end(), held.begin(), live.begin(), std::logical_or<>());
  }
  poison_slots(context, memory, live);
}

}  // namespace ladon::test
