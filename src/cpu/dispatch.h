// Chooses the kernels to run, by the CPU, the operating system and LADON_ISA.
#pragma once

#include <optional>
#include <string>

#include "cpu/cpu_features.h"
#include "ladon/isa.h"

namespace ladon::cpu {

struct KernelTable;

/// The instruction set to use: the requested one, else LADON_ISA, else the fastest that can run.
/// Throws an Error with the reason when the requested one cannot run here.
Isa choose_isa(std::optional<Isa> requested);
/// The same for a machine with these features.
Isa choose_isa(std::optional<Isa> requested, const CpuFeatures& features);

/// Why an instruction set cannot run on a machine with these features; empty if it can.
std::string refusal_of(Isa isa, const CpuFeatures& features);

/// The kernels of an instruction set that runs here; null for Isa::kReference.
const KernelTable* kernels_for(Isa isa) noexcept;

}  // namespace ladon::cpu
