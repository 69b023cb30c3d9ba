// Tests that run once for each instruction set that this machine can run.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ladon/context.h"
#include "ladon/isa.h"

namespace ladon::test {

inline std::vector<Isa> runnable_isas() {
  std::vector<Isa> isas;
  for (const IsaInfo& info : list_isas()) {
    if (info.runnable) isas.push_back(info.isa);
  }
  return isas;
}

inline std::string isa_test_name(const testing::TestParamInfo<Isa>& info) {
  return name_of(info.param);
}

class IsaTest : public testing::TestWithParam<Isa> {
 protected:
  // Two threads, so that sharing out the work is tested too.
  Context context_{ContextOptions{.num_threads = 2, .isa = GetParam()}};
};

#define LADON_FOR_EACH_ISA(Suite)                                                             \
  INSTANTIATE_TEST_SUITE_P(EachIsa, Suite, testing::ValuesIn(::ladon::test::runnable_isas()), \
                           ::ladon::test::isa_test_name)

}  // namespace ladon::test
