// CPU features and what the operating system enables of them. Compiled for the baseline, because it
// runs on any CPU.
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
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool intel = false;             // the vendor
  bool os_saves_ymm = false;      // XCR0 has the AVX state
  bool os_saves_zmm = false;      // XCR0 has the AVX-512 state too
  bool os_saves_tiles = false;    // XCR0 has the AMX state
  bool os_permits_tiles = false;  // and this process may use AMX
};

/// Reads CPUID and XGETBV, and requests permission to use AMX tiles where the CPU has them: Linux
/// grants it to the whole process, permanently. Keeps no state.
CpuFeatures detect_cpu_features() noexcept;

}  // namespace ladon::cpu
