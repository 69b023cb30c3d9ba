// Instruction sets: which kernels this build holds, which this machine can run, and why not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/export.h"

namespace ladon {

/// Slowest first. `kReference` is the plain double-precision code that all others are tested
/// against; it runs everywhere.
enum class Isa : std::uint8_t { kReference, kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };

/// "reference", "baseline", "avx2", "avx512", "avx512_bf16", "amx": the names that LADON_ISA takes.
LADON_API const char* name_of(Isa isa) noexcept;
LADON_API std::optional<Isa> isa_from_name(std::string_view name) noexcept;

struct IsaInfo {
  Isa isa;
  std::string name;
  bool runnable = false;
  bool chosen = false;               // what a Context takes when nothing is forced by code
  std::string reason;                // why it was chosen, or why it was not
  std::vector<std::string> kernels;  // the kernels it holds
};

/// Every instruction set this library knows, slowest first. Reads LADON_ISA; throws when that names
/// an unknown set or one that cannot run here.
LADON_API std::vector<IsaInfo> list_isas();

}  // namespace ladon
