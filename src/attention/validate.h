// Checks every argument of the attention functions, once, before anything is touched.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "ladon/attention.h"

namespace ladon {

struct NamedView {
  std::string_view name;
  ConstTensorView view;
};

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

/// A present, non-null, aligned view of the wanted rank in CPU memory whose sizes make sense and
/// whose last dimension is dense.
void check_view(std::string_view operation, const NamedView& argument, int rank);
/// The same for views that may be strided in every dimension.
void check_strided_view(std::string_view operation, const NamedView& argument, int rank);
void check_float(std::string_view operation, const NamedView& argument);
void check_dtype(std::string_view operation, const NamedView& argument, DType wanted);
void check_shape(std::string_view operation, const NamedView& argument, const Dims& wanted);
/// Each output must be free of itself, of the other outputs and of all inputs. Absent views pass.
void check_no_overlap(std::string_view operation, std::span<const NamedView> outputs,
                      std::span<const NamedView> inputs);

/// q, k, v (may be absent) and the options against each other.
AttentionSizes check_inputs(std::string_view operation, const ConstTensorView& q,
                            const ConstTensorView& k, const ConstTensorView& v,
                            const AttentionOptions& options);

/// [batch, num_heads, query_len], f64 where q is f64, else f32.
void check_lse(std::string_view operation, const NamedView& argument, const AttentionSizes& sizes,
               DType q_dtype);

}  // namespace ladon
