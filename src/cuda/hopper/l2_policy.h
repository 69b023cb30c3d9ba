// How long the L2 cache keeps what a copy reads.
#pragma once

#include <cstdint>

namespace ladon::cuda::hopper {

/// The codes that createpolicy makes for all of a copy's bytes.
enum class L2Policy : std::uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
};

}  // namespace ladon::cuda::hopper
