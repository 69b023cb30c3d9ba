// `ladon compare`: tables, documents and pictures; no test looks at a time.
#include <gtest/gtest.h>
#include <signal.h>

#include <sstream>

#include "cli/best_isa.h"
#include "cli/run_ladon.h"
#include "io/io_support.h"

namespace ladon::test {
namespace {

std::vector<std::string> tiny(const std::vector<std::string>& more = {}) {
  std::vector<std::string> all{"compare", "--size",    "tiny", "--quick", "--prompt",
                               "40",      "--context", "100",  "--isa",   best_isa()};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(CliCompare, FourLayersCheckedAndMeasured) {
  const nlohmann::json document = document_of(tiny({"--dtype", "f32", "--batch", "2"}));
  EXPECT_TRUE(document["good"].get<bool>());
  EXPECT_EQ(document["isa"], best_isa());
  const char* const kinds[] = {"MHA", "GQA", "MQA", "MLA"};
  // 4 heads of 16, 2 KV heads, 1 KV head, and a latent of 32 with a rope key of 8; 4 bytes each.
  const int bytes[] = {4 * 4 * 32, 4 * 2 * 32, 4 * 32, 4 * 40};
  ASSERT_EQ(document["layers"].size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    const nlohmann::json& layer = document["layers"][i];
    EXPECT_EQ(layer["kind"], kinds[i]);
    EXPECT_EQ(layer["cache_bytes_per_token"], bytes[i]);
    EXPECT_DOUBLE_EQ(layer["reduction"].get<double>(), 1 - bytes[i] / 512.0);
    EXPECT_GT(layer["prefill"]["tokens_per_second"], 0);
    EXPECT_GT(layer["decode"]["share"], 0);
    EXPECT_LE(layer["error"], layer["allowed"]);
  }
  // q, k, v and out: 64 x 64 each in MHA; with a rank of 0, MLA's query is one matrix.
  EXPECT_EQ(document["layers"][0]["weights"], 4 * 64 * 64);
  EXPECT_EQ(document["layers"][3]["weights"], 64 * 4 * 24 + 64 * 40 + 32 + 32 * 4 * 32 + 64 * 64);
}

TEST(CliCompare, TheTableAndThePictures) {
  const TempFolder temp;
  const Outcome outcome = run_ladon(tiny({"--plot", (temp / "c.svg").string()}));
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  for (const char* part : {"prefill tok/s", "decode tok/s", "cache B/token", "less than MHA",
                           "largest error", "\nMHA ", "\nGQA ", "\nMQA ", "\nMLA ", "GB/s"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
  EXPECT_EQ(temp.files(), std::vector<std::string>{"c.svg"});
  if (kWithCairo) {
    EXPECT_EQ(run_ladon(tiny({"--plot", (temp / "c.png").string()})).status, 0);
    EXPECT_EQ(temp.files(), (std::vector<std::string>{"c.png", "c.svg"}));
    EXPECT_TRUE(read_bytes(temp / "c.png").starts_with("\x89PNG\r\n\x1a\n"));
  }
  const std::string svg = read_bytes(temp / "c.svg");
  for (const char* words : {"Prefill", "Decoding", "KV cache", "tokens per second",
                            "bytes per token", "MLA: latent 32 + 8", "ceiling"}) {
    EXPECT_NE(svg.find(words), std::string::npos) << words;
  }
}

TEST(CliCompare, TheTableFitsEightyColumns) {
  const Outcome outcome = run_ladon(LadonRun{.arguments = tiny({}), .environment = {"COLUMNS=80"}});
  EXPECT_EQ(outcome.status, 0);
  ASSERT_NE(outcome.out.find("\nlayer "), std::string::npos) << outcome.out;
  std::istringstream lines(outcome.out.substr(outcome.out.find("\nlayer ") + 1));
  int count = 0;
  for (std::string line; std::getline(lines, line) && !line.empty(); ++count) {
    EXPECT_LE(line.size(), 80U) << line;
  }
  EXPECT_EQ(count, 5);
}

TEST(CliCompare, Mistakes) {
  const TempFolder temp;
  const auto expect = [&](const std::vector<std::string>& more, int status, const char* part) {
    std::vector<std::string> all{"compare"};
    all.insert(all.end(), more.begin(), more.end());
    const std::string complaint = complaint_of(all, status);
    EXPECT_NE(complaint.find(part), std::string::npos) << complaint;
    EXPECT_TRUE(temp.files().empty());
  };
  expect({"--size", "huge"}, 2, "--size: no size 'huge'; there are tiny, small, llama-3-8b");
  expect({"--plot", (temp / "c.gif").string()}, 2, kPictureNames);
  expect({"--plot", (temp / "no" / "c.svg").string()}, 1, "--plot: cannot write ");
  expect({"--plot", "/proc/c.svg"}, 1, "/proc/c.svg");
  expect({"--isa", "reference"}, 2, "the reference is what the others are compared with");
  expect({"--prompt", "0"}, 2, "--prompt: '0' is not a whole number");
  // 16 KiB of cache for each of 2^40 tokens, and more for the rest.
  expect({"--context", "1048576m"}, 1, "compare: this needs about 16 PiB of memory; ");
  expect({"--context", "1048576m", "--batch", "1048576m"}, 1, "needs more than 4 EiB of memory; ");
}

TEST(CliCompare, AFullDiskOrAnInterruptLeavesNothing) {
  const TempFolder temp;
  const std::string plot = (temp / "c.svg").string();
  const std::string complaint =
      complaint_of(LadonRun{.arguments = tiny({"--plot", plot}), .file_size_limit = 1000}, 1);
  EXPECT_EQ(complaint, "compare: --plot: cannot write " + plot + ": File too large");
  EXPECT_TRUE(temp.files().empty());

  const Outcome outcome = run_ladon(
      LadonRun{.arguments = tiny({"--plot", plot}), .signal_after = 400, .signal = SIGTERM});
  EXPECT_EQ(outcome.signal, SIGTERM);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "ladon: interrupted\n");
  EXPECT_TRUE(temp.files().empty());
}

}  // namespace
}  // namespace ladon::test
