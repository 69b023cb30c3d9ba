// operator new that can be told to fail. A test binary that has failing_allocator.cpp among its
// sources gets it.
#pragma once

#include <cstdint>

namespace ladon::test {

/// The allocation after `count` others fails; after it, all do or none.
void fail_allocation(std::int64_t count, bool from_then_on) noexcept;
/// No allocation fails any more. Returns whether one has.
bool stop_failing() noexcept;

}  // namespace ladon::test
