// operator new that counts. A test binary that has counted_new.cpp among its sources gets it.
#pragma once

#include <atomic>
#include <cstdint>

namespace ladon::test {

inline std::atomic<std::int64_t> allocations{0};
inline std::atomic<std::int64_t> allocated_bytes{0};

}  // namespace ladon::test
