#include "core/huge_pages.h"

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ladon {

void prefer_huge_pages(void* data, std::size_t bytes) noexcept {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::size_t kPage = std::size_t{1} << 21;  // of x86-64
  const std::size_t past = reinterpret_cast<std::uintptr_t>(data) % kPage;
  const std::size_t skipped = past == 0 ? 0 : kPage - past;
  if (bytes < skipped + kPage) return;
  const std::size_t whole = (bytes - skipped) / kPage * kPage;
  // Refusal is not an error: the array is just as good on small pages.
  static_cast<void>(madvise(static_cast<std::byte*>(data) + skipped, whole, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace ladon
