#include "cpu/cache_sizes.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace ladon::cpu {
namespace {

constexpr std::int64_t kKiB = 1024;

std::array<std::int64_t*, 3> levels(CacheSizes& sizes) noexcept {
  return {&sizes.l1, &sizes.l2, &sizes.l3};
}

/// Intel's leaf 4, and AMD's, which has the same layout and is found where TOPOEXT is set. Both
/// list caches until one of type 0.
CacheSizes read_cpuid() noexcept {
  CacheSizes sizes;
#if defined(__x86_64__) || defined(__i386__)
  constexpr unsigned kIntel = 4;
  constexpr unsigned kAmd = 0x8000001D;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  unsigned leaf = kIntel;
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) != 0 && ((ecx >> 22U) & 1U) != 0) leaf = kAmd;
  constexpr unsigned kMostCaches = 16;
  for (unsigned index = 0; index < kMostCaches; ++index) {
    if (__get_cpuid_count(leaf, index, &eax, &ebx, &ecx, &edx) == 0) break;
    const unsigned type = eax & 0x1FU;
    if (type == 0) break;
    constexpr unsigned kInstructions = 2;
    const unsigned level = (eax >> 5U) & 7U;
    if (type == kInstructions || level < 1 || level > 3) continue;
    const std::int64_t line = (ebx & 0xFFFU) + 1;
    const std::int64_t partitions = ((ebx >> 12U) & 0x3FFU) + 1;
    const std::int64_t ways = ((ebx >> 22U) & 0x3FFU) + 1;
    const std::int64_t sets = std::int64_t{ecx} + 1;
    *levels(sizes)[level - 1] = line * partitions * ways * sets;
  }
#endif
  return sizes;
}

/// Reads "L1,L2,L3" in KiB; what does not parse leaves its level as it was.
void read_environment(CacheSizes& sizes) noexcept {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): unsafe only where the program calls setenv meanwhile
  const char* const value = std::getenv("LADON_CACHE_SIZES");
  if (value == nullptr) return;
  std::string_view text = value;
  for (std::int64_t* size : levels(sizes)) {
    std::int64_t kib = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), kib);
    if (error != std::errc{}) return;
    *size = kib * kKiB;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.empty() || text.front() != ',') return;
    text.remove_prefix(1);
  }
}

/// Hypervisors may report nothing, or nonsense.
CacheSizes plausible(CacheSizes sizes) noexcept {
  const auto check = [](std::int64_t& size, std::int64_t least, std::int64_t most,
                        std::int64_t otherwise) {
    if (size < least || size > most) size = otherwise;
  };
  check(sizes.l1, 4 * kKiB, 1024 * kKiB, 32 * kKiB);
  check(sizes.l2, 64 * kKiB, 64 * 1024 * kKiB, 512 * kKiB);
  check(sizes.l3, 512 * kKiB, 4 * 1024 * 1024 * kKiB, 32 * 1024 * kKiB);
  return sizes;
}

}  // namespace

const CacheSizes& cache_sizes() noexcept {
  static const CacheSizes sizes = [] {
    CacheSizes found = read_cpuid();
    read_environment(found);
    return plausible(found);
  }();
  return sizes;
}

}  // namespace ladon::cpu
