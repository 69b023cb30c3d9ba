// Rotary position embedding over [batch, seq, heads, head_dim], as every backend sees it: plain
// data.
#pragma once

#include <cstdint>

#include "ladon/dtype.h"

namespace ladon {

/// x or out; the last stride is 1.
struct RopeOperand {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// Cosines or sines, [position, pair] or [batch, token, pair].
struct RopeTableOperand {
  const void* data = nullptr;  // null where angles come from frequencies
  DType dtype = DType::kF32;
  std::int64_t batch_stride = 0;  // 0 for a table by position
  std::int64_t row_stride = 0;    // of a position or a token
  std::int64_t pair_stride = 0;
};

struct RopeParams {
  std::int64_t batch = 0;
  std::int64_t seq = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t rotary_dim = 0;
  bool interleaved = false;
  bool backward = false;  // rotates by the negative angle
  DType dtype = DType::kF32;
  RopeOperand x{};
  RopeOperand out{};  // may be x itself

  // Host memory: the position of each token, [seq] or [batch, seq]. Null: first_position + token.
  const std::int64_t* positions = nullptr;
  bool positions_per_sequence = false;
  std::int64_t first_position = 0;

  // Either frequencies of the rotary_dim / 2 pairs (host memory), with a factor of the cosines and
  // sines; or tables.
  const double* frequencies = nullptr;
  double magnitude = 1;
  RopeTableOperand cos{};
  RopeTableOperand sin{};
  bool table_by_position = false;

  std::int64_t pairs() const { return rotary_dim / 2; }
  std::int64_t position_of(std::int64_t sequence, std::int64_t token) const {
    if (positions == nullptr) return first_position + token;
    return positions[positions_per_sequence ? sequence * seq + token : token];
  }
};

}  // namespace ladon
