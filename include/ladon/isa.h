// Instruction sets: which kernels this build holds, which this machine can run, and why not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/export.h"

namespace ladon {

/// Every instruction set that kernels are compiled for, slowest first: its enumerator and its name.
/// The library, its command and its tests are made from this list.
#define LADON_KERNEL_ISAS(X)  \
  X(kBaseline, baseline)      \
  X(kAvx2, avx2)              \
  X(kAvx512, avx512)          \
  X(kAvx512Bf16, avx512_bf16) \
  X(kAmx, amx)

#define LADON_ISA_ENUMERATOR(id, name) id,
/// Slowest first. `kReference` is the plain double-precision code that all others are tested
/// against; it runs everywhere.
enum class Isa : std::uint8_t { kReference, LADON_KERNEL_ISAS(LADON_ISA_ENUMERATOR) };
#undef LADON_ISA_ENUMERATOR

#define LADON_ISA_VALUE(id, name) Isa::id,
inline constexpr Isa kAllIsas[] = {Isa::kReference, LADON_KERNEL_ISAS(LADON_ISA_VALUE)};
#undef LADON_ISA_VALUE

/// "reference", "baseline", "avx2", ...: the names that LADON_ISA takes.
LADON_API const char* name_of(Isa isa) noexcept;
/// All names, as a sentence has them: "reference, baseline, avx2, avx512, avx512_bf16 or amx".
LADON_API std::string isa_names();
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
