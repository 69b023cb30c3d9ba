// The kernels that `ladon compare` and `ladon bench` are tested on.
#pragma once

#include <string>

#include "ladon/isa.h"

namespace ladon::test {

/// The fastest kernels, even where LADON_ISA says reference.
inline std::string best_isa() {
  std::string best = "baseline";
  for (const IsaInfo& info : list_isas()) {
    if (info.runnable && info.isa != Isa::kReference) best = info.name;
  }
  return best;
}

}  // namespace ladon::test
