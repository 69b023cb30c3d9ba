// What this CPU and this operating system offer. Compiled for the baseline: it must run anywhere.
#pragma once

namespace ladon::cpu {

struct CpuFeatures {
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512_bf16 = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool intel = false;             // the vendor
  bool os_saves_ymm = false;      // XCR0 has the AVX state
  bool os_saves_zmm = false;      // XCR0 has the AVX-512 state too
  bool os_saves_tiles = false;    // XCR0 has the AMX state
  bool os_permits_tiles = false;  // and this process may use it
};

/// Asks CPUID and XGETBV, and the operating system for leave to use tiles where there are some:
/// Linux gives it to the whole process and for good. No state is kept here.
CpuFeatures detect_cpu_features() noexcept;

}  // namespace ladon::cpu
