// `ladon run`: a layer of a model folder over files.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/run_fixture.h"
#include "cli/run_ladon.h"
#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "ladon/npy.h"
#include "ladon/random.h"
#include "models/model_folder.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

TEST_F(CliRun, WholeGivesTheLayersBits) {
  const nlohmann::json document = document_of(arguments());
  EXPECT_EQ(document["family"], "llama");
  EXPECT_EQ(document["shape"], (std::vector<std::int64_t>{2, kLength, 20}));
  EXPECT_EQ(document["summary"]["not_finite"], 0);
  EXPECT_FALSE(document.contains("chunk"));
  const Tensor out = read_npy(file("y.npy"));
  EXPECT_EQ(out.dtype(), DType::kF32);
  EXPECT_EQ(difference(out, expected()), 0);
  EXPECT_EQ(files(), (std::vector<std::string>{"x.npy", "y.npy"}));
}

TEST_F(CliRun, CachedAgrees) {
  for (const char* chunk : {"1", "4", "100"}) {
    const nlohmann::json document = document_of(arguments({"--cached", "--chunk", chunk}));
    EXPECT_EQ(document["chunk"], std::stoi(chunk));
    // 2 sequences of 13 tokens; 2 KV heads of 8 numbers, keys and values, in f32.
    EXPECT_EQ(document["cache_bytes"], 2 * kLength * 2 * 2 * 8 * 4);
    EXPECT_LT(difference(read_npy(file("y.npy")), expected()), 1e-5);
  }
  document_of(arguments({"--cached", "--cache-dtype", "bf16", "--threads", "1"}));
  const double error = difference(read_npy(file("y.npy")), expected());
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.1);
}

TEST_F(CliRun, OneSequenceAndOtherDtypes) {
  save_input({5, 20}, DType::kF64);
  const Outcome outcome = run_ladon(arguments());
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_NE(outcome.out.find("[5, 20], whole"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("in f64"), std::string::npos) << outcome.out;
  const Tensor out = read_npy(file("y.npy"));
  EXPECT_EQ(out.dtype(), DType::kF64);
  EXPECT_EQ(out.shape(), (Dims{5, 20}));
  // The output keeps the input's dtype, whatever the layer computes in.
  document_of(arguments({"--dtype", "bf16"}));
  EXPECT_EQ(read_npy(file("y.npy")).dtype(), DType::kF64);
  save_input({0, 20}, DType::kF32);
  document_of(arguments());
  EXPECT_EQ(read_npy(file("y.npy")).shape(), (Dims{0, 20}));
}

TEST_F(CliRun, ALatentLayer) {
  write_case("deepseek_v3");
  save_input({2, kLength, family_case("deepseek_v3").embed_dim}, DType::kF32);
  const nlohmann::json document = document_of(arguments({"--weights", file("w.svg")}));
  EXPECT_EQ(document["layer_type"], "LatentAttention");
  EXPECT_EQ(difference(read_npy(file("y.npy")), expected()), 0);
  document_of(arguments({"--cached"}));
  EXPECT_LT(difference(read_npy(file("y.npy")), expected()), 1e-5);
}

TEST_F(CliRun, BadFilesAndShapes) {
  const auto expect = [&](const std::vector<std::string>& more, int status,
                          const std::string& part) {
    const std::string complaint = complaint_of(arguments(more), status);
    EXPECT_NE(complaint.find(part), std::string::npos) << complaint;
    EXPECT_EQ(files(), (std::vector<std::string>{"x.npy"}));
  };
  save_input({3, 21}, DType::kF32);
  expect({}, 1, "holds [3, 21] of f32, expected floats [seq, 20] or [batch, seq, 20]");
  save_input({20}, DType::kF32);
  expect({}, 1, "holds [20] of f32");
  save_input({3, 20}, DType::kI32);
  expect({}, 1, "holds [3, 20] of i32");
  write_bytes(file("x.npy"), "no array");
  expect({}, 1, "x.npy");
  save_input({3, 20}, DType::kF32);
  std::filesystem::resize_file(file("x.npy"), 200);
  expect({}, 1, "x.npy");
  save_input({3, 20}, DType::kF32);
  expect({"--weights", file("w.jpg")}, 2,
         kWithCairo ? "ends in .svg, .png, .pdf or .html" : "ends in .svg or .html (this build");
  expect({"--weights", file("w.svg"), "--heads", "1,9"}, 2,
         "--heads: got '1,9', expected numbers and ranges from 0 to 5, such as 0,3,5-7");
  expect({"--weights", file("w.svg"), "--heads", "3-1"}, 2, "--heads: got '3-1'");
  expect({"--heads", "1"}, 2, "--weights");
  write_bytes(temp_ / "texts.json", R"(["a","b"])");
  const std::string texts = (temp_ / "texts.json").string();
  expect({"--weights", file("w.svg"), "--tokens", texts}, 1,
         "has 2 texts, expected one for each of 3 tokens");
  write_bytes(temp_ / "texts.json", "[1]");
  expect({"--weights", file("w.svg"), "--tokens", texts}, 1,
         "is not what was expected: a JSON array of strings");
  expect({"--weights", file("none/w.svg")}, 1, "--weights: cannot write ");
  expect({"--weights", file("w.svg"), "--sequence", "1"}, 2, "no sequence 1");
  expect({"--sequence", "1"}, 2, "--weights");
  expect({"--chunk", "2"}, 2, "--cached");
  expect({"--dtype", "i8"}, 2, "no dtype 'i8'");
}

TEST_F(CliRun, OutputsThatCannotBothBeWrittenAreRefusedFirst) {
  write_bytes(temp_ / "model" / "model.safetensors", "no weights: nothing is computed");
  const auto refuse = [&](const std::string& output, const std::string& weights) {
    return complaint_of({"run", "--model", model(), "--input", file("x.npy"), "--output", output,
                         "--weights", weights},
                        1);
  };
  EXPECT_EQ(refuse(file("a.svg"), file("a.svg")),
            "run: --weights: cannot write " + file("a.svg") + ": --output writes the same file");
  EXPECT_NE(refuse(file("a.svg"), (temp_ / "files" / ".." / "files" / "a.svg").string())
                .find("--output writes the same file"),
            std::string::npos);
  EXPECT_EQ(files(), (std::vector<std::string>{"x.npy"}));
}

TEST_F(CliRun, PicturesKeepPermissionsAndLeftoversAreRemoved) {
  write_bytes(file("w.svg"), "older");
  std::filesystem::permissions(
      file("w.svg"), std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  // Of runs that were killed: no process has such a number.
  write_bytes(file("w.svg.tmp-999999999-0"), "left");
  write_bytes(file("y.npy.tmp-999999999-3"), "left");
  // Of others: no process, or this one.
  write_bytes(file("w.svg.tmp-mine"), "kept");
  const std::string own = "y.npy.tmp-" + std::to_string(::getpid()) + "-77";
  write_bytes(file(own), "kept");
  document_of(arguments({"--weights", file("w.svg")}));
  EXPECT_EQ(files(), (std::vector<std::string>{"w.svg", "w.svg.tmp-mine", "x.npy", "y.npy", own}));
  EXPECT_EQ(std::filesystem::status(file("w.svg")).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

TEST_F(CliRun, BadModels) {
  const auto complaint = [&](const std::vector<std::string>& all, int status) {
    std::vector<std::string> with{"run"};
    with.insert(with.end(), all.begin(), all.end());
    return complaint_of(with, status);
  };
  const std::string x = file("x.npy");
  const std::string y = file("y.npy");
  EXPECT_NE(complaint({"--model", model(), "--input", x}, 2).find("--output is required"),
            std::string::npos);
  EXPECT_NE(complaint({"--model", model(), "--layer", "2", "--input", x, "--output", y}, 2)
                .find("--layer: got 2, expected 0 to 1"),
            std::string::npos);
  EXPECT_NE(
      complaint({"--model", "/nonexistent", "--input", x, "--output", y}, 1).find("/nonexistent"),
      std::string::npos);
  EXPECT_NE(complaint({"--model", model(), "--input", file("none.npy"), "--output", y}, 1)
                .find("none.npy: No such file or directory"),
            std::string::npos);
  EXPECT_NE(complaint({"--model", model(), "--input", x, "--output", temp_.path().string()}, 1)
                .find("--output: cannot write "),
            std::string::npos);
  std::filesystem::remove(temp_ / "model" / "model.safetensors");
  EXPECT_NE(complaint({"--model", model(), "--input", x, "--output", y}, 1).find("model"),
            std::string::npos);
  EXPECT_EQ(files(), (std::vector<std::string>{"x.npy"}));
}

TEST_F(CliRun, ALayerThatIsNotCausalHasNoCache) {
  write_case("bert");
  const std::string complaint = complaint_of(arguments({"--cached"}), 2);
  EXPECT_NE(complaint.find("the layers of bert are not causal"), std::string::npos) << complaint;
}

TEST_F(CliRun, ImpossibleSizesAreRefusedFirst) {
  // 4 * 2^20 * 2^20 weights of 4 bytes: 16 TiB. There are no tensors to read.
  write_bytes(temp_ / "model" / "config.json", R"({"model_type":"llama","hidden_size":1048576,
    "num_attention_heads":4096,"head_dim":256,"num_hidden_layers":2})");
  const std::string complaint = complaint_of(arguments(), 1);
  EXPECT_NE(complaint.find("run: this layer and input needs about 16 TiB of memory; "),
            std::string::npos)
      << complaint;
}

TEST_F(CliRun, AnImpossiblePictureIsRefusedFirst) {
  // 6 heads * 2^20 * 2^20 weights of 4 bytes, and a copy: 48 TiB.
  save_input({1 << 20, 20}, DType::kF16);
  const std::string complaint = complaint_of(arguments({"--weights", file("w.svg")}), 1);
  EXPECT_NE(complaint.find("a picture of so many tokens needs about 48 TiB of memory; "),
            std::string::npos)
      << complaint;
  EXPECT_EQ(files(), (std::vector<std::string>{"x.npy"}));
}

TEST_F(CliRun, LinksStayAndTheirTargetsAreWritten) {
  std::filesystem::create_directory(temp_ / "elsewhere");
  std::filesystem::create_symlink(temp_ / "elsewhere" / "y.npy", file("y.npy"));
  std::filesystem::create_symlink("../elsewhere/w.svg", file("w.svg"));
  document_of(arguments({"--weights", file("w.svg")}));
  EXPECT_TRUE(std::filesystem::is_symlink(file("y.npy")));
  EXPECT_TRUE(std::filesystem::is_symlink(file("w.svg")));
  EXPECT_EQ(difference(read_npy(temp_ / "elsewhere" / "y.npy"), expected()), 0);
  EXPECT_TRUE(read_bytes(temp_ / "elsewhere" / "w.svg").starts_with("<svg "));
  EXPECT_EQ(files(), (std::vector<std::string>{"w.svg", "x.npy", "y.npy"}));
}

TEST_F(CliRun, StandardInputAndOutput) {
  std::vector<std::string> all{"run", "--model", model(), "--layer", "1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), all.begin(), all.end());
    return more;
  };
  for (const char* name : {"-", "/dev/stdout"}) {
    // Through a pipe, and into a file that the shell has opened.
    const Outcome piped = run_ladon(
        LadonRun{.arguments = with({"--input", "-", "--output", name}), .in_path = file("x.npy")});
    EXPECT_EQ(piped.status, 0) << piped.err;
    EXPECT_NE(piped.err.find("wrote to standard output"), std::string::npos) << piped.err;
    write_bytes(file("y.npy"), piped.out);
    EXPECT_EQ(difference(read_npy(file("y.npy")), expected()), 0);
    const Outcome redirected =
        run_ladon(LadonRun{.arguments = with({"--input", file("x.npy"), "--output", name}),
                           .out_path = file("z.npy")});
    EXPECT_EQ(redirected.status, 0) << redirected.err;
    EXPECT_EQ(read_bytes(file("z.npy")), piped.out);
    std::filesystem::remove(file("z.npy"));
  }
  EXPECT_TRUE(std::filesystem::is_symlink("/dev/stdout"));
  const Outcome picture =
      run_ladon(with({"--input", file("x.npy"), "--output", file("y.npy"), "--weights", "-"}));
  EXPECT_TRUE(picture.out.starts_with("<svg ") && picture.out.ends_with("</svg>\n"));
  const std::string x = file("x.npy");
  EXPECT_EQ(complaint_of(with({"--input", x, "--output", "-", "--weights", "-"}), 2),
            "run: standard output cannot take two files");
  EXPECT_EQ(complaint_of(with({"--input", x, "--output", "-", "--json"}), 2),
            "run: standard output cannot take both a file and --json");
  write_bytes(file("x.npy"), "no array");
  const std::string complaint = complaint_of(
      LadonRun{.arguments = with({"--input", "-", "--output", file("y.npy")}), .in_path = x}, 1);
  EXPECT_TRUE(complaint.starts_with("read_npy: standard input: ")) << complaint;
}

TEST_F(CliRun, ADeviceIsNotReplaced) {
  std::vector<std::string> all = arguments();
  all.back() = "/dev/null";
  EXPECT_EQ(run_ladon(all).status, 0);
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  all.back() = "/dev/full";
  const std::string complaint = complaint_of(all, 1);
  EXPECT_NE(complaint.find("No space left on device"), std::string::npos) << complaint;
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
}

TEST_F(CliRun, AFullDiskLeavesNothing) {
  write_bytes(file("y.npy"), "older");
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{}, {"--weights", file("w.svg")}}) {
    const std::string complaint =
        complaint_of(LadonRun{.arguments = arguments(more), .file_size_limit = 1000}, 1);
    EXPECT_NE(complaint.find("File too large"), std::string::npos) << complaint;
    EXPECT_EQ(files(), (std::vector<std::string>{"x.npy", "y.npy"}));
    EXPECT_EQ(read_bytes(file("y.npy")), "older");
  }
}

TEST_F(CliRun, AnInterruptLeavesNothing) {
  // Long enough to be in the middle: 60,000 calls.
  save_input({60000, 20}, DType::kF32);
  const Outcome outcome = run_ladon(LadonRun{.arguments = arguments({"--cached", "--threads", "1"}),
                                             .signal_after = 400,
                                             .signal = SIGINT});
  EXPECT_EQ(outcome.signal, SIGINT);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "ladon: interrupted\n");
  EXPECT_EQ(files(), (std::vector<std::string>{"x.npy"}));
}

}  // namespace
}  // namespace ladon::test
