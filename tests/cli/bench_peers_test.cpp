// `ladon bench --peers`: with interpreters of our own that answer well, badly, or not at all. What
// a peer does never ends the benchmark.
#include <gtest/gtest.h>

#include "cli/run_ladon.h"
#include "io/io_support.h"

namespace ladon::test {
namespace {

using nlohmann::json;

const std::string kCase = "f32 forward B8 H12 S128 D64 full";

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class CliBenchPeers : public testing::Test {
 protected:
  /// An "interpreter" for both peers: what pytorch does at each step; onnxruntime is always good.
  /// Its fourth argument is the peer's name, after -I (nothing from the current directory is
  /// imported), -c and the worker's text.
  std::string interpreter(const std::string& at_start, const std::string& at_prepare,
                          const std::string& at_run) {
    const std::filesystem::path path = temp_ / ("python" + std::to_string(++made_));
    write_bytes(path,
                "#!/bin/sh\n"
                "good_start() { echo '{\"version\": \"1.2.3\"}'; }\n"
                "good_prepare() { echo '{\"ready\": \"fake\"}'; }\n"
                "good_run() { echo '{\"seconds\": 1000}'; }\n"
                "bad_start() { " +
                    at_start +
                    "; }\n"
                    "bad_prepare() { " +
                    at_prepare +
                    "; }\n"
                    "bad_run() { " +
                    at_run +
                    "; }\n"
                    "[ \"$1\" = -I ] || exit 9\n"
                    "kind=good; [ \"$4\" = pytorch ] && kind=bad\n"
                    "${kind}_start\n"
                    "while read -r line; do case $line in\n"
                    "  *'\"prepare\"'*) ${kind}_prepare ;;\n"
                    "  *'\"run\"'*) ${kind}_run ;;\n"
                    "  *) good_prepare ;;\n"
                    "esac; done\n");
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path.string();
  }

  static std::vector<std::string> arguments(const std::string& python) {
    return {"bench", "--quick", "--filter", kCase, "--peers", python, "--peer-limit", "2"};
  }

  /// Runs with such an interpreter and expects that pytorch is left out for this reason, while
  /// onnxruntime is measured.
  void expect_left_out(const std::string& python, const std::string& why, bool from_the_start) {
    const json document = document_of(arguments(python));
    ASSERT_EQ(document["rows"].size(), 1U);
    const json& row = document["rows"][0];
    EXPECT_FALSE(row["ratio"].contains("pytorch"));
    EXPECT_EQ(row["not_measured"]["pytorch"], why);
    EXPECT_TRUE(row["ratio"].contains("onnxruntime"));
    EXPECT_EQ(document["peers"][0]["problem"], why);
    EXPECT_EQ(document["peers"][0].contains("version"), !from_the_start);
  }

  TempFolder temp_;
  int made_ = 0;
};

TEST_F(CliBenchPeers, RatiosNextToEachCase) {
  const std::string python = interpreter("good_start", "good_prepare", "echo '{\"seconds\": 500}'");
  const json document = document_of(arguments(python));
  ASSERT_EQ(document["rows"].size(), 1U);
  const json& row = document["rows"][0];
  // They said how long they took; Ladon's own time is in the row.
  EXPECT_EQ(row["peer_median_ms"]["pytorch"], 500e3);
  EXPECT_EQ(row["peer_median_ms"]["onnxruntime"], 1000e3);
  const double own = row["median_ms"].get<double>();
  EXPECT_DOUBLE_EQ(row["ratio"]["pytorch"].get<double>(), 500e3 / own);
  EXPECT_DOUBLE_EQ(row["ratio"]["onnxruntime"].get<double>(), 1000e3 / own);
  EXPECT_EQ(row["ratio_target"]["pytorch"], 1.3);
  EXPECT_EQ(document["peers"], json::parse(R"([{"name": "pytorch", "version": "1.2.3"},
                            {"name": "onnxruntime", "version": "1.2.3"}])"));
  std::vector<std::string> with_plot = arguments(python);
  with_plot.insert(with_plot.end(), {"--plot", (temp_ / "b.svg").string()});
  const Outcome outcome = run_ladon(with_plot);
  const std::string svg = read_bytes(temp_ / "b.svg");
  for (const char* words : {">PyTorch<", ">ONNX Runtime<", " (1.3)<", "pytorch 1.2.3"}) {
    EXPECT_TRUE(holds(svg, words)) << words;
  }
  EXPECT_TRUE(holds(outcome.out, "pytorch 1.2.3 is measured alongside Ladon\n")) << outcome.out;
  EXPECT_TRUE(holds(outcome.out, "x (target 1.3x")) << outcome.out;
}

TEST_F(CliBenchPeers, AnUnsupportedCaseIsNoFailure) {
  const json document = document_of(arguments(
      interpreter("good_start", "echo '{\"unsupported\": \"no such thing\"}'", "good_run")));
  const json& row = document["rows"][0];
  EXPECT_EQ(row["not_measured"]["pytorch"], "no such thing");
  EXPECT_FALSE(document["peers"][0].contains("problem"));
}

TEST_F(CliBenchPeers, NoInterpreter) {
  const std::string missing = (temp_ / "nosuch").string();
  const json document = document_of(arguments(missing));
  EXPECT_EQ(document["peers"][0]["problem"],
            "cannot start " + missing + ": No such file or directory");
  EXPECT_TRUE(document["rows"][0]["ratio"].empty());
}

TEST_F(CliBenchPeers, NoPackage) {
  expect_left_out(
      interpreter("echo '{\"problem\": \"No module named torch\"}'", "good_prepare", "good_run"),
      "No module named torch", true);
}

TEST_F(CliBenchPeers, DiesAtTheStart) {
  expect_left_out(interpreter("exit 3", "good_prepare", "good_run"), "it ended with status 3",
                  true);
}

TEST_F(CliBenchPeers, DiesWhileItRuns) {
  const std::string python = interpreter("good_start", "good_prepare", "kill -9 $$");
  expect_left_out(python, "it was ended by signal 9", false);
  const Outcome outcome = run_ladon(arguments(python));
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_TRUE(holds(outcome.out, "\npytorch is left out from here on: it was ended by signal 9\n"))
      << outcome.out;
  EXPECT_TRUE(holds(outcome.out, "  pytorch -  onnxruntime ")) << outcome.out;
}

TEST_F(CliBenchPeers, Hangs) {
  expect_left_out(interpreter("good_start", "good_prepare", "sleep 600"),
                  "no answer within 2 seconds", false);
}

TEST_F(CliBenchPeers, Garbage) {
  expect_left_out(interpreter("echo hello", "good_prepare", "good_run"),
                  "its answer is not understood: hello", true);
  expect_left_out(interpreter("good_start", "echo '[1, 2]'", "good_run"),
                  "its answer is not understood: [1, 2]", false);
  expect_left_out(interpreter("good_start", "good_prepare", "echo '{\"seconds\": -1}'"),
                  "its answer is not understood: {\"seconds\": -1}", false);
  expect_left_out(interpreter("good_start", "good_prepare", "yes | tr -d '\\n'"),
                  "its answer has no end", false);
}

TEST_F(CliBenchPeers, TheRealWorkerSaysWhatItHas) {
  const json document =
      document_of({"bench", "--quick", "--filter", kCase, "--peers", "--peer-limit", "300"});
  ASSERT_EQ(document["peers"].size(), 2U);
  for (const json& peer : document["peers"]) {
    const std::string name = peer["name"];
    const bool measured = document["rows"][0]["ratio"].contains(name);
    EXPECT_EQ(measured, !peer.contains("problem")) << peer.dump();
  }
}

TEST_F(CliBenchPeers, Mistakes) {
  EXPECT_EQ(complaint_of({"bench", "--peers", "--peer-limit", "0"}, 2),
            "bench: --peer-limit: '0' is not a whole number from 1 to 86400");
}

}  // namespace
}  // namespace ladon::test
