// Case: one attention call, described. Tests and the fuzzer speak of calls as Cases; the benchmark
// has its own, bench/shape.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "ladon/attention.h"
#include "ladon/random.h"

namespace ladon::test {

enum class Lengths : std::uint8_t { kFull, kPadded, kPacked };

/// How a [batch, seq, heads, dim] tensor is laid out in memory.
enum class Memory : std::uint8_t {
  kDense,
  kHeadsFirst,  // stored [batch, heads, seq, dim]
  kSliced,      // a part of a larger array, at an odd place
};

/// Whether a mask or bias is there, and which of its four dimensions are full (the others are 1).
struct Broadcast {
  bool present = false;
  std::array<bool, 4> full{true, true, true, true};
};

struct Case {
  std::int64_t batch = 1;  // sequences
  std::int64_t query_len = 1;
  std::int64_t kv_len = 1;
  std::int64_t num_heads = 1;
  std::int64_t num_kv_heads = 1;
  std::int64_t head_dim = 8;
  std::int64_t value_dim = 8;
  DType dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  std::optional<double> scale{};
  bool causal = false;
  Alignment alignment = Alignment::kBottomRight;
  std::optional<std::int64_t> position_offset{};
  std::optional<std::int64_t> window_left{};
  std::optional<std::int64_t> window_right{};
  Lengths lengths = Lengths::kFull;
  Broadcast mask{};
  Broadcast bias{};
  DType bias_dtype = DType::kF32;
  double softcap = 0;
  bool alibi = false;
  bool sinks = false;
  double dropout = 0;
  std::int64_t first_head = 0;  // dropout's
  std::int64_t first_query = 0;
  std::int64_t first_key = 0;
  bool dlse = false;  // a gradient comes back through lse
  Memory memory = Memory::kDense;
  std::uint64_t seed = 1;  // of the data

  /// One line that says everything, for failure messages.
  std::string describe() const;
};

/// A random problem over every option, small enough for the reference.
Case random_case(Random& random);
/// Makes it a shard of a larger problem: a position offset, and dropout's numbers.
void make_shard(Random& random, Case& problem);

}  // namespace ladon::test
