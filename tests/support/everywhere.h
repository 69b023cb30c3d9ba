// expect_right_everywhere(): one Case in every place.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "support/contexts.h"
#include "support/run_case.h"

namespace ladon::test {

/// All places at once, because the truth takes longer than all of them.
inline void expect_right_everywhere(const Case& problem) {
  static const std::vector<Context> contexts = [] {
    std::vector<Context> all;
    for (const Place& place : places()) all.push_back(place.context());
    return all;
  }();
  const CaseData data(problem);
  const Truth truth = truth_of(data);
  for (const Context& context : contexts) EXPECT_EQ(check_case(context, data, truth), "");
}

}  // namespace ladon::test
