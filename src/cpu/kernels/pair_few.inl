// Decoding where q, k and v are all bf16: q.k as dot products of pairs, both as they lie. The
// weighted values are as in forward_few.inl.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/forward_few.inl"
#include "cpu/kernels/pairs.inl"

namespace ladon::cpu {
namespace {

template <class V, class Pairs>
struct PairQueries {
  using Sums = Pairs;
  static constexpr bool kScaled = false;  // scale * q would be rounded

  template <class Function>
  static void with_keys(DType, const Function& function) {
    function(StoredAs<kDTypeOf<Pair>>{});
  }
  static std::int64_t length(std::int64_t head_dim) { return pairs_in(head_dim); }
  static void load(const AttentionParams& params, std::int64_t start, std::int64_t padded_dim,
                   float* to) {
    const auto used = static_cast<std::size_t>(params.head_dim) * sizeof(std::uint16_t);
    char* bytes = reinterpret_cast<char*>(to);
    __builtin_memcpy(bytes, at(params.q.data, params.q.dtype, start), used);
    __builtin_memset(bytes + used, 0, static_cast<std::size_t>(padded_dim) * sizeof(float) - used);
  }
};

template <class V, class Pairs>
void forward_few_of_pairs(const AttentionParams& params, const ForwardTask& task, void* memory) {
  if (params.head_dim % 2 == 0) {
    return run_forward_few<V, PairQueries<V, Pairs>>(params, task, memory);
  }
  forward_few<V>(params, task, memory);  // half of a key's last pair would be a stranger's
}

}  // namespace
}  // namespace ladon::cpu
