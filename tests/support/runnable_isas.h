// The instruction sets that tests run on: all that this machine can run; with LADON_ISA set, that
// one alone.
#pragma once

#include <cstdlib>
#include <vector>

#include "ladon/isa.h"

namespace ladon::test {

inline std::vector<Isa> runnable_isas() {
  const char* const forced = std::getenv("LADON_ISA");
  const bool one = forced != nullptr && *forced != '\0';
  std::vector<Isa> isas;
  for (const IsaInfo& info : list_isas()) {
    if (one ? info.chosen : info.runnable) isas.push_back(info.isa);
  }
  return isas;
}

}  // namespace ladon::test
