#include "host_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/gather.h"
#include "ladon/tensor.h"

namespace ladon::bench {

HostCache::HostCache(const Context& context, const KvCache& cache) : cache_(cache) {
  if (cache.device().is_cpu()) return;
  const Context host(ContextOptions{.num_threads = context.num_threads()});
  KvCacheOptions options = cache.options();
  const DType dtype = options.format.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  options.format = dtype;
  // One sequence after the other, because their lengths may differ.
  std::int64_t longest = 0;
  std::vector<std::int64_t> lengths;
  for (std::int64_t b = 0; b < options.batch; ++b) {
    lengths.push_back(cache.held(b));
    longest = std::max(longest, lengths.back());
  }
  const auto make = [&](std::int64_t dim) {
    return Tensor(dtype, {options.batch, longest, options.num_kv_heads, dim});
  };
  Tensor keys = make(options.head_dim);
  Tensor values = options.values_in_keys ? Tensor() : make(options.value_dim);
  const KvCacheView view = cache.view();
  for (std::int64_t b = 0; b < options.batch; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    const auto rows = [&](std::int64_t dim) {
      return Tensor(context, dtype, {length, options.num_kv_heads * dim});
    };
    Tensor k = rows(options.head_dim);
    Tensor v = options.values_in_keys ? Tensor() : rows(options.value_dim);
    gather_sequence(context, view, static_cast<std::size_t>(b), k, v);
    const auto put = [&](const Tensor& from, Tensor& to, std::int64_t dim) {
      ladon::copy(context, from.view().reshape({length, options.num_kv_heads, dim}),
                  to.view().select(0, b).slice(0, 0, length));
    };
    put(k, keys, options.head_dim);
    if (!options.values_in_keys) put(v, values, options.value_dim);
  }
  copy_ = KvCache::contiguous(host, options);
  copy_->append(host, keys, values, lengths);
}

}  // namespace ladon::bench
