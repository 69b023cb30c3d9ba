// Tests that run once for each instruction set that this machine can run.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "ladon/context.h"
#include "ladon/isa.h"
#include "support/runnable_isas.h"

namespace ladon::test {

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
