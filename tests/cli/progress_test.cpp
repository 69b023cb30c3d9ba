// How long a run still takes, as its progress line says.
#include "progress.h"

#include <gtest/gtest.h>

namespace ladon::cli {
namespace {

TEST(CliProgress, StepsWithAnExpectation) {
  RemainingTime remaining(4, 40);
  EXPECT_EQ(remaining.begin("f32 forward").substr(0, 13), "1 of 4, about");
  // Steps that took no time at all bring what was expected down, little by little.
  EXPECT_EQ(RemainingTime(4, 399).begin("x"), "1 of 4, about 7 min left: x");
  EXPECT_EQ(remaining.begin("x").substr(0, 13), "2 of 4, about");
}

TEST(CliProgress, AShareOfTheWork) {
  EXPECT_EQ(TimeLeft::text(30, 0.25), ", about 90 s left");
  EXPECT_EQ(TimeLeft::text(300, 0.5), ", about 5 min left");
  EXPECT_EQ(TimeLeft::text(30, 1), ", about 0 s left");
  EXPECT_EQ(TimeLeft::text(0.5, 0.5), "");  // too early to say
  EXPECT_EQ(TimeLeft::text(30, 0), "");
  EXPECT_EQ(TimeLeft().after(0.5), "");
}

}  // namespace
}  // namespace ladon::cli
