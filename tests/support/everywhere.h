// expect_right(): one Case on every instruction set.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "support/isas.h"
#include "support/run_case.h"

namespace ladon::test {

/// On every instruction set: the truth takes longer than all of them.
inline void expect_right(const Case& problem) {
  static const std::vector<Context> contexts = [] {
    std::vector<Context> all;
    for (const Isa isa : runnable_isas()) {
      all.emplace_back(ContextOptions{.num_threads = 2, .isa = isa});
    }
    return all;
  }();
  const CaseData data(problem);
  const Truth truth = truth_of(data);
  for (const Context& context : contexts) EXPECT_EQ(check_case(context, data, truth), "");
}

}  // namespace ladon::test
