// `ladon bench`: its cases, table, document and picture; no test looks at a time.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <set>
#include <sstream>

#include "benchmark.h"
#include "cached_layer.h"
#include "cases.h"
#include "cli/best_isa.h"
#include "cli/run_ladon.h"
#include "growth.h"
#include "io/io_support.h"
#include "ladon/multi_head_attention.h"

namespace ladon::test {
namespace {

using bench::Case;
using nlohmann::json;

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(CliBenchCases, EveryTargetHasItsCase) {
  constexpr std::array kIsas{Isa::kBaseline, Isa::kAvx2, Isa::kAvx512};
  const std::vector<Case> cases = bench::list_cases(kIsas, Isa::kAvx512);
  std::set<std::string> names;
  for (const Case& one : cases) EXPECT_TRUE(names.insert(one.full_name()).second) << one.name();
  for (const bench::Target& target : bench::best_targets()) {
    const auto found = std::find_if(cases.begin(), cases.end(), [&](const Case& one) {
      return one.isa == Isa::kAvx512 && one.name() == target.name;
    });
    ASSERT_NE(found, cases.end()) << target.name;
    ASSERT_TRUE(found->target.has_value()) << target.name;
    EXPECT_EQ(found->limit, target.limit) << target.name;
    EXPECT_EQ(found->peer_shape() != nullptr, target.pytorch_ratio > 0) << target.name;
  }
  // AVX2's own target where there is something faster, else the best one's.
  const auto share_of_avx2 = [](std::span<const Isa> isas, Isa fastest) {
    for (const Case& one : bench::list_cases(isas, fastest)) {
      if (one.full_name() == "avx2 f32 forward B1 H8 S2048 D128 full") return one.target->share;
    }
    return 0.0;
  };
  EXPECT_DOUBLE_EQ(share_of_avx2(kIsas, Isa::kAvx512), 0.75);
  constexpr std::array kOlder{Isa::kBaseline, Isa::kAvx2};
  EXPECT_DOUBLE_EQ(share_of_avx2(kOlder, Isa::kAvx2), 0.85);
}

TEST(CliBenchCases, WhatIsCounted) {
  const bench::Shape full{};
  EXPECT_DOUBLE_EQ(full.flops(), 4.0 * 8 * 2048 * 2048 * 128);
  const bench::Shape causal_backward{.pass = bench::Pass::kBackward, .causal = true};
  EXPECT_DOUBLE_EQ(causal_backward.flops(), 2.5 * 2.0 * 8 * 2048 * 2048 * 128);
  const bench::Shape latent{.dtype = DType::kBF16,
                            .source = bench::Source::kLatent,
                            .storage = DType::kBF16,
                            .query_len = 1,
                            .kv_len = 8192,
                            .num_heads = 16,
                            .num_kv_heads = 1,
                            .head_dim = 576,
                            .value_dim = 512};
  EXPECT_DOUBLE_EQ(latent.flops(), 2.0 * (576 + 512) * 16 * 8192);
  EXPECT_DOUBLE_EQ(latent.kv_bytes(), 2.0 * 576 * 8192);
}

TEST(CliBench, OneCase) {
  const std::string name = "f32 decode B1 H32/8 S8192 D128, paged i8";
  const json document = document_of({"bench", "--quick", "--filter", name});
  ASSERT_EQ(document["rows"].size(), 1U);
  const json& row = document["rows"][0];
  EXPECT_EQ(row["name"], name);
  EXPECT_EQ(row["isa"], best_isa());
  EXPECT_EQ(row["ceiling"], "memory");
  EXPECT_TRUE(row.contains("gbps"));
  EXPECT_TRUE(row["ratio"].empty());
  EXPECT_TRUE(document["faults"].empty());
}

TEST(CliBench, ATerminalOfEightyColumns) {
  const std::string name = "f32 decode B1 H32/8 S8192 D128, paged i8";
  const Outcome outcome = run_ladon(
      LadonRun{.arguments = {"bench", "--quick", "--filter", name}, .environment = {"COLUMNS=80"}});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_TRUE(holds(outcome.out, "\n1 measurement: about 2 s\n")) << outcome.out;
  EXPECT_TRUE(holds(outcome.out, "\n" + best_isa() + " kernels\n" + name + " ")) << outcome.out;
  const std::size_t table = outcome.out.find("\ncase ");
  ASSERT_NE(table, std::string::npos) << outcome.out;
  std::istringstream lines(outcome.out.substr(table + 1));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
}

TEST(CliBenchCases, QuickMeasuresTheFastestKernels) {
  bench::BenchmarkOptions quick{.quick = true};
  const int fastest = bench::count_cases(quick);
  EXPECT_LE(bench::expected_seconds(quick), 200);  // of 300, because machines are shared
  quick.isa = isa_from_name(best_isa());
  EXPECT_EQ(bench::count_cases(quick), fastest);
  const int all = bench::count_cases({});
  EXPECT_EQ(all > fastest, best_isa() != "baseline");
}

TEST(CliBench, ATargetAndOneThatNeedsAmx) {
  const json document = document_of({"bench", "--quick", "--filter", "MLA decode"});
  ASSERT_EQ(document["rows"].size(), 2U);
  const json& many = document["rows"][0];
  EXPECT_TRUE(many.contains("gflops"));
  // The one that is of AMX applies where that is the ceiling, and is explained elsewhere.
  EXPECT_EQ(many.contains("target"), many["ceiling"] == "AMX");
  EXPECT_EQ(many.contains("target_note"), many["ceiling"] != "AMX");
  const json& few = document["rows"][1];
  EXPECT_EQ(few["ceiling"], "memory");
  EXPECT_EQ(few["target"], 0.75);
  EXPECT_TRUE(few.contains("gbps"));
}

TEST(CliBenchCases, ExponentsAndNeighbours) {
  const std::vector<double> lengths{512, 1024, 2048};
  const std::vector<double> squares{3 * 0.25, 3, 3 * 4};
  EXPECT_NEAR(bench::fitted_exponent(lengths, squares), 2, 1e-12);
  const std::vector<double> bent{1, 2, 6};  // between 1 and log2(3): the middle does not matter
  EXPECT_NEAR(bench::fitted_exponent(lengths, bent), std::log2(6.0) / 2, 1e-12);
  for (const bench::Series& series : bench::list_series(Isa::kAvx2, false)) {
    EXPECT_EQ(series.lengths.size(), 4U);
    EXPECT_FALSE(holds(series.name(), " S")) << series.name();
  }
  for (const bench::Neighbourhood& one : bench::list_neighbourhoods(Isa::kAvx2, false)) {
    std::set<std::string> names{one.center.name()};
    for (const Case& other : one.others) EXPECT_TRUE(names.insert(other.name()).second);
    EXPECT_EQ(names.size(), 5U);
  }
  // The quick ones are some of them.
  for (const bench::Series& series : bench::list_series(Isa::kAvx2, true)) {
    EXPECT_EQ(series.lengths.size(), 3U);
  }
  for (const bench::Neighbourhood& one : bench::list_neighbourhoods(Isa::kAvx2, true)) {
    EXPECT_EQ(one.others.size(), 2U);
  }
}

TEST(CliBench, AnExponentAndNeighbours) {
  const std::string forward = best_isa() + " f32 forward B1 H8 ";
  const json grown =
      document_of({"bench", "--quick", "--filter", "exponent " + forward + "D128 full"});
  EXPECT_TRUE(grown["rows"].empty());
  ASSERT_EQ(grown["exponents"].size(), 1U);
  const json& exponent = grown["exponents"][0];
  EXPECT_EQ(exponent["name"], forward + "D128 full");
  EXPECT_EQ(exponent["expected"], 2);
  EXPECT_EQ(exponent["points"].size(), 3U);
  const Outcome outcome =
      run_ladon({"bench", "--quick", "--filter", "neighbours of " + forward + "S2048 D128 full"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_TRUE(holds(outcome.out, "\nNeighbouring shapes\n")) << outcome.out;
  for (const char* shape : {"S2100 D128 ", "S2048 D136 "}) {
    EXPECT_TRUE(holds(outcome.out, std::string("f32 forward B1 H8 ") + shape)) << outcome.out;
  }
}

TEST(CliBench, ThePicture) {
  const TempFolder temp;
  const std::string name = "f32 decode B1 H32/8 S8192 D128, paged i8";
  const std::vector<std::string> pictures =
      kWithCairo ? std::vector<std::string>{"b.png", "b.svg"} : std::vector<std::string>{"b.svg"};
  for (const std::string& file : pictures) {
    const Outcome outcome =
        run_ladon({"bench", "--quick", "--filter", name, "--plot", (temp / file).string()});
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.err, "");
    EXPECT_TRUE(holds(outcome.out, "wrote " + (temp / file).string())) << outcome.out;
  }
  EXPECT_EQ(temp.files(), pictures);
  if (kWithCairo) {
    EXPECT_TRUE(read_bytes(temp / "b.png").starts_with("\x89PNG\r\n\x1a\n"));
  }
  const std::string svg = read_bytes(temp / "b.svg");
  for (const std::string& words :
       {name, std::string("share of the ceiling (%)"), std::string("ceiling: memory"),
        std::string("target share"), best_isa(), std::string("100 %")}) {
    EXPECT_TRUE(holds(svg, words)) << words;
  }
  EXPECT_FALSE(holds(svg, "PyTorch"));
}

TEST(CliBench, Mistakes) {
  const TempFolder temp;
  EXPECT_TRUE(
      holds(complaint_of({"bench", "--plot", (temp / "b.gif").string()}, 2), "bench: --plot: "));
  EXPECT_TRUE(holds(complaint_of({"bench", "--plot", (temp / "no" / "b.svg").string()}, 1),
                    "bench: --plot: cannot write "));
  EXPECT_TRUE(temp.files().empty());
  EXPECT_EQ(complaint_of({"bench", "--filter", "nosuch"}, 2),
            "bench: --filter: no case contains 'nosuch'");
  EXPECT_EQ(complaint_of({"bench", "--isa", "reference"}, 2),
            "bench: --isa: the reference is not benchmarked");
}

TEST(CachedLayer, ErrorsOf16BitLayersAreAgainstWhatIsNotRounded) {
  // The reference against itself: what is left is the rounding to 16 bits, which a truth that was
  // rounded as well would hide.
  const Context reference(ContextOptions{.num_threads = 1, .isa = Isa::kReference});
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const MultiHeadAttentionOptions options{
        .embed_dim = 32, .num_heads = 4, .num_kv_heads = 2, .causal = true, .dtype = dtype};
    bench::CachedLayer layer(reference, std::make_unique<MultiHeadAttention>(options, 1),
                             {.batch = 1, .prompt = 6, .context = 9});
    const double prompt = layer.prompt_error(reference);
    layer.fill_cache(reference);
    const double token = layer.token_error(reference);
    for (const double error : {prompt, token}) {
      if (dtype == DType::kF32) {
        EXPECT_EQ(error, 0);
      } else {
        EXPECT_GT(error, 0.1 * epsilon_of(dtype));
      }
      EXPECT_LE(error, bench::layer_tolerance(dtype));
    }
  }
}

TEST(CliBench, Ranks) {
  const Outcome run = run_ladon({"bench", "--ranks", "2", "--link", "10gbe", "--quick"});
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_NE(run.out.find("2 ranks over an emulated 10gbe (30 us, 1.2 GB/s)"), std::string::npos);
  for (const char* const scheme : {"all-gather", "Ulysses", "ring"}) {
    EXPECT_NE(run.out.find(scheme), std::string::npos) << run.out;
  }
  EXPECT_EQ(run.out.find("UNEQUAL"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("WRONG"), std::string::npos) << run.out;
  EXPECT_EQ(complaint_of({"bench", "--ranks", "2", "--filter", "decode"}, 2),
            "bench: --ranks: combines only with --link, --quick, --isa and --json");
  EXPECT_EQ(complaint_of({"bench", "--ranks", "2", "--link", "tin-cans"}, 2).find("--link: got"),
            0U);
}

TEST(CliBench, RanksAsJson) {
  const json document =
      document_of({"bench", "--ranks", "2", "--link", "3us,50GB/s", "--quick"}, 0, "bench_ranks");
  const json& ranks = document["ranks"];
  EXPECT_EQ(ranks["count"], 2);
  EXPECT_EQ(ranks["latency"], 3e-6);
  EXPECT_EQ(ranks["bandwidth"], 50e9);
  ASSERT_EQ(ranks["rows"].size(), 6U);  // three schemes, both passes
  for (const json& row : ranks["rows"]) {
    EXPECT_EQ(row["sent_bytes"], row["formula_bytes"]) << row;
    EXPECT_FALSE(row.contains("fault")) << row;
    EXPECT_GT(row["predicted_ms"], 0) << row;
    EXPECT_GE(row["imbalance"], 1) << row;
  }
  // All-gather: 1024 tokens of 8 KV heads, 2 * 64 elements of 4 bytes. Each rank's early quarter
  // goes to the other one, and the last rank's late quarter to the first.
  EXPECT_EQ(ranks["rows"][0]["sent_bytes"], 3 * 256 * 8 * 2 * 64 * 4);
}

}  // namespace
}  // namespace ladon::test
