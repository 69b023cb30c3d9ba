// Operands as the rows of a tensor map.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/attention_params.h"

namespace ladon::cuda::hopper {

/// The tokens of an operand as rows that are token_stride apart, up to the end of the last
/// sequence; 0 where a sequence does not start at a whole row.
inline std::int64_t count_rows(const AttentionParams& call, const Operand& operand,
                               std::int64_t Sequence::*start, std::int64_t Sequence::*length) {
  if (operand.token_stride <= 0) return 0;
  std::int64_t rows = 0;
  for (std::int64_t s = 0; s < call.num_sequences; ++s) {
    const Sequence& sequence = call.sequences[s];
    const std::int64_t offset = sequence.*start;
    if (offset < 0 || offset % operand.token_stride != 0) return 0;
    const std::int64_t slot = length == &Sequence::kv_len ? sequence.first_slot : 0;
    rows = std::max(rows, offset / operand.token_stride + slot + sequence.*length);
  }
  return rows;
}

}  // namespace ladon::cuda::hopper
