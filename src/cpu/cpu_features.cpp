#include "cpu/cpu_features.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ladon::cpu {

#if defined(__x86_64__) || defined(__i386__)

namespace {

bool has_bit(unsigned value, int bit) noexcept { return ((value >> bit) & 1U) != 0; }

/// The low half of XCR0: which registers the operating system saves on a context switch. In
/// assembly, because the intrinsic would need this file to be compiled for XSAVE.
unsigned read_xcr0() noexcept {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

/// Requests permission to use AMX tiles. Linux requires it because tiles are 8 KiB of registers
/// that signal frames must have space for.
bool request_tiles() noexcept {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

CpuFeatures detect_cpu_features() noexcept {
  CpuFeatures features;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.intel = ebx == signature_INTEL_ebx && ecx == signature_INTEL_ecx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.fma = has_bit(ecx, 12);
  features.f16c = has_bit(ecx, 29);
  if (has_bit(ecx, 27)) {                 // OSXSAVE: without it xgetbv is an illegal instruction
    constexpr unsigned kYmmState = 0x06;  // SSE, AVX
    constexpr unsigned kZmmState = 0xe6;  // and opmask, upper halves of zmm0-15, zmm16-31
    constexpr unsigned kTileState = 0x60000;  // configuration, data
    const unsigned saved = read_xcr0();
    features.os_saves_ymm = (saved & kYmmState) == kYmmState;
    features.os_saves_zmm = (saved & kZmmState) == kZmmState;
    features.os_saves_tiles = (saved & kTileState) == kTileState;
  }
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx2 = has_bit(ebx, 5);
  features.avx512f = has_bit(ebx, 16);
  features.avx512dq = has_bit(ebx, 17);
  features.avx512bw = has_bit(ebx, 30);
  features.avx512vl = has_bit(ebx, 31);
  features.avx512_vnni = has_bit(ecx, 11);
  features.amx_bf16 = has_bit(edx, 22);
  features.amx_tile = has_bit(edx, 24);
  if (features.amx_tile && features.os_saves_tiles) features.os_permits_tiles = request_tiles();
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx512_bf16 = has_bit(eax, 5);
  return features;
}

#else

CpuFeatures detect_cpu_features() noexcept { return {}; }

#endif

}  // namespace ladon::cpu
