// `ladon check`: the verdict, and that no kernel is left out of it.
#include <gtest/gtest.h>

#include <set>

#include "cli/run_ladon.h"
#include "support/runnable_isas.h"

namespace ladon::test {
namespace {

TEST(CliCheck, EveryKernelOfThisMachinePasses) {
  const nlohmann::json document = document_of({"check"});
  EXPECT_TRUE(document["good"].get<bool>()) << document["verdict"];
  EXPECT_EQ(document["device"], "cpu");
  EXPECT_TRUE(document["untested_kernels"].empty()) << document["untested_kernels"];
  std::set<std::string> isas;
  std::set<std::string> areas;
  for (const auto& result : document["results"]) {
    isas.insert(result["isa"]);
    areas.insert(result["area"]);
    EXPECT_GT(result["checks"], 0);
    EXPECT_TRUE(result["faults"].empty());
  }
  const std::set<std::string> expected{"forward", "decode", "backward",  "caches",
                                       "rope",    "layers", "optimisers"};
  EXPECT_EQ(areas, expected);
  for (const Isa isa : runnable_isas()) {
    EXPECT_TRUE(isa == Isa::kReference || isas.contains(name_of(isa))) << name_of(isa);
  }
}

TEST(CliCheck, AVerdictToPaste) {
  const Outcome outcome =
      run_ladon({"check", "--isa", "baseline", "--threads", "1", "--seed", "7"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_NE(outcome.out.find("1 thread; seed 7\n"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("\nPASS: "), std::string::npos) << outcome.out;
}

TEST(CliCheck, WhatIsWrongIsStatusOne) {
  // No error at all is allowed: nearly everything is wrong.
  const nlohmann::json document = document_of({"check", "--isa", "baseline", "--slack", "0"}, 1);
  EXPECT_FALSE(document["good"].get<bool>());
  const Outcome outcome = run_ladon({"check", "--isa", "baseline", "--slack", "0"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.out.find("WRONG: baseline, forward, f32 "), std::string::npos);
  EXPECT_NE(outcome.out.find("\nFAIL: "), std::string::npos);
}

TEST(CliCheck, Mistakes) {
  EXPECT_NE(complaint_of({"check", "--slack", "-1"}, 2).find("--slack"), std::string::npos);
  EXPECT_NE(complaint_of({"check", "--seed", "x"}, 2).find("--seed"), std::string::npos);
}

}  // namespace
}  // namespace ladon::test
