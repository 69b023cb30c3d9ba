// Checks every argument of the attention functions, once, before anything is touched.
#pragma once

#include <cstdint>
#include <span>

#include "core/checks.h"
#include "ladon/attention.h"
#include "ladon/kv_cache_view.h"

namespace ladon {

/// Lengths and positions are below this, so that sums of a few of them do not overflow.
inline constexpr std::int64_t kMaxLength = std::int64_t{1} << 56;

/// Sizes that a checked call has.
struct AttentionSizes {
  std::int64_t batch = 0;          // first dimension of q, k and v: 1 in a packed batch
  std::int64_t num_sequences = 0;  // batch, or the number of packed sequences
  std::int64_t query_len = 0;      // second dimension of q
  std::int64_t kv_len = 0;         // second dimension of k
  std::int64_t max_query_len = 0;  // of any sequence
  std::int64_t max_kv_len = 0;     // of any sequence, padding included
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;  // 0 where there is no v
  bool packed = false;
};

/// q, k, v (may be absent) and the options against each other.
AttentionSizes check_inputs(const Operation& operation, const ConstTensorView& q,
                            const ConstTensorView& k, const ConstTensorView& v,
                            const AttentionOptions& options);

/// The same sizes of a call that has been checked already.
AttentionSizes sizes_of_inputs(const ConstTensorView& q, const ConstTensorView& k,
                               const ConstTensorView& v, const AttentionOptions& options);
AttentionSizes sizes_of_cache_inputs(const ConstTensorView& q, const KvCacheView& cache,
                                     const AttentionOptions& options);

/// All slots of a cache as [num_slots, num_kv_heads, dim].
ConstTensorView cache_keys(const KvCacheView& cache);
ConstTensorView cache_values(const KvCacheView& cache);

/// q, a cache and the options against each other.
AttentionSizes check_cache_inputs(const Operation& operation, const ConstTensorView& q,
                                  const KvCacheView& cache, const AttentionOptions& options);

/// All options but lengths and offsets.
void check_options(const Operation& operation, const AttentionOptions& options,
                   const AttentionSizes& sizes);

/// Both may be absent. Of the sizes, the numbers of sequences and heads and the longest lengths.
void check_mask_and_bias(const Operation& operation, const ConstTensorView& mask,
                         const ConstTensorView& bias, const AttentionSizes& sizes);

/// One length from 0 to kv_len for each sequence, or none.
void check_kv_lengths(const Operation& operation, std::span<const std::int64_t> kv_lengths,
                      std::int64_t batch, std::int64_t kv_len);

/// A result of the dtype of its inputs, or f32 where they are f16 or bf16.
void check_result(const Operation& operation, const NamedView& argument, DType dtype,
                  const Dims& shape);

/// [batch, num_heads, query_len], f64, or f32 where q is not f64.
void check_lse(const Operation& operation, const NamedView& argument, const AttentionSizes& sizes,
               DType q_dtype);

/// A gradient of an option must fit it, where it is wanted.
void check_side_gradient(const Operation& operation, const NamedView& gradient,
                         const NamedView& input);

}  // namespace ladon
