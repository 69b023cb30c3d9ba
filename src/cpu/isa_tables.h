// The kernel table of each instruction set; src/cpu/isa/<name>.cpp defines it.
#pragma once

#include "cpu/kernel_table.h"
#include "ladon/isa.h"

namespace ladon::cpu::kernels {

#define LADON_ISA_TABLE(id, name) extern const KernelTable id;
LADON_KERNEL_ISAS(LADON_ISA_TABLE)
#undef LADON_ISA_TABLE

}  // namespace ladon::cpu::kernels
