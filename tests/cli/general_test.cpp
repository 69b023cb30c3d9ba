// What all subcommands share: help, versions, mistakes, exit statuses; and `ladon info`.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "cli/run_ladon.h"
#include "ladon/device.h"
#include "ladon/isa.h"
#include "ladon/version.h"

namespace ladon::test {
namespace {

using testing::Test;

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(CliGeneral, HelpNamesEverySubcommand) {
  const Outcome help = run_ladon({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_EQ(help.err, "");
  for (const char* name : {"compare", "plan", "run", "bench", "check", "info"}) {
    EXPECT_TRUE(holds(help.out, std::string("\n  ") + name + " ")) << help.out;
    const Outcome own = run_ladon({name, "--help"});
    EXPECT_EQ(own.status, 0);
    EXPECT_EQ(own.err, "");
    EXPECT_TRUE(holds(own.out, std::string("Usage: ladon ") + name)) << own.out;
    EXPECT_TRUE(holds(own.out, "--json")) << own.out;
  }
  EXPECT_TRUE(holds(help.out, "Exit status")) << help.out;
}

TEST(CliGeneral, Version) {
  const Outcome outcome = run_ladon({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, std::string("ladon ") + version() + "\n");
}

TEST(CliGeneral, MistakesAreStatusTwo) {
  EXPECT_EQ(
      complaint_of(std::vector<std::string>{}, 2),
      "no subcommand; there are compare, plan, run, convert, bench, check, info; see ladon --help");
  EXPECT_EQ(complaint_of({"conpare"}, 2),
            "no subcommand 'conpare'; there are compare, plan, run, convert, bench, check, info");
  EXPECT_EQ(complaint_of({"info", "--nosuch"}, 2),
            "info: The following argument was not expected: --nosuch; see ladon info --help");
  EXPECT_EQ(complaint_of({"--nosuch"}, 2),
            "The following argument was not expected: --nosuch; see ladon --help");
  EXPECT_TRUE(holds(complaint_of({"info", "extra"}, 2), "not expected: extra"));
  EXPECT_EQ(complaint_of({"check", "--threads", "0"}, 2),
            "check: --threads: '0' is no whole number from 1 to 1024");
  EXPECT_EQ(complaint_of({"check", "--threads", "two"}, 2),
            "check: --threads: 'two' is no whole number from 1 to 1024");
  EXPECT_EQ(complaint_of({"check", "--isa", "mmx"}, 2),
            "check: --isa: no kernels 'mmx'; there are reference, baseline, avx2, avx512, "
            "avx512_bf16 or amx");
  EXPECT_TRUE(holds(complaint_of({"plan", "--batch"}, 2), "--batch"));
}

TEST(CliGeneral, TheSchemaKnowsEveryInstructionSet) {
  std::ifstream file(LADON_SOURCE_DIR "/docs/cli_schema.json");
  std::vector<std::string> names;
  for (const Isa isa : kAllIsas) names.emplace_back(name_of(isa));
  EXPECT_EQ(nlohmann::json::parse(file).at("definitions").at("isa").at("enum"),
            nlohmann::json(names));
}

TEST(CliGeneral, ControlCharactersDoNotBreakTheLine) {
  EXPECT_EQ(
      complaint_of({"bad\nname\x1b[31m"}, 2),
      "no subcommand 'bad name [31m'; there are compare, plan, run, convert, bench, check, info");
}

TEST(CliGeneral, AFullDiskBehindStdout) {
  const Outcome outcome = run_ladon(LadonRun{.arguments = {"info"}, .out_path = "/dev/full"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.err, "ladon: cannot write to standard output: No space left on device\n");
}

TEST(CliInfo, SaysWhatTheLibrarySays) {
  const nlohmann::json document = document_of({"info"});
  EXPECT_EQ(document["ladon"], version());
  const std::vector<IsaInfo> isas = list_isas();
  ASSERT_EQ(document["isas"].size(), isas.size());
  const Outcome text = run_ladon({"info"});
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.err, "");
  for (std::size_t i = 0; i < isas.size(); ++i) {
    EXPECT_EQ(document["isas"][i]["name"], isas[i].name);
    EXPECT_EQ(document["isas"][i]["runnable"], isas[i].runnable);
    EXPECT_EQ(document["isas"][i]["chosen"], isas[i].chosen);
    EXPECT_EQ(document["isas"][i]["reason"], isas[i].reason);
    EXPECT_EQ(document["isas"][i]["kernels"], isas[i].kernels);
    EXPECT_TRUE(holds(text.out, isas[i].name)) << text.out;
    EXPECT_TRUE(holds(text.out, isas[i].reason)) << text.out;
  }
}

TEST(CliInfo, ListsGpusOrSaysWhyNone) {
  const DeviceList gpus = list_devices();
  const nlohmann::json document = document_of({"info"});
  const std::string text = run_ladon({"info"}).out;
  ASSERT_EQ(document["gpus"].size(), gpus.devices.size());
  EXPECT_EQ(document.value("no_gpu", ""), gpus.reason);
  if (gpus.devices.empty()) {
    EXPECT_TRUE(holds(text, "GPU      none: " + gpus.reason + "\n")) << text;
  }
  for (std::size_t i = 0; i < gpus.devices.size(); ++i) {
    EXPECT_EQ(document["gpus"][i]["device"], gpus.devices[i].id.to_string());
    EXPECT_EQ(document["gpus"][i]["name"], gpus.devices[i].name);
    EXPECT_TRUE(holds(text, gpus.devices[i].name)) << text;
  }
}

TEST(CliDevice, Mistakes) {
  const std::string devices = "; there are cpu, cuda and cuda:N";
  for (const std::string command : {"check", "compare", "bench"}) {
    EXPECT_EQ(complaint_of({command, "--device", "tpu"}, 2),
              command + ": --device: no device 'tpu'" + devices);
    EXPECT_EQ(complaint_of({command, "--device", "cuda:x"}, 2),
              command + ": --device: 'x' is no whole number from 0 to 1024");
    const std::string both = complaint_of({command, "--device", "cuda", "--isa", "avx2"}, 2);
    EXPECT_TRUE(holds(both, "--isa excludes --device")) << both;
  }
}

TEST(CliDevice, WhereItCannotBeUsedItSaysWhy) {
  const DeviceList gpus = list_devices();
  const std::string index = std::to_string(gpus.devices.size());
  const std::string expected = gpus.devices.empty()
                                   ? "Context: device: got cuda, expected cpu: " + gpus.reason
                                   : "Context: device_index: got " + index + ", expected 0 to " +
                                         std::to_string(gpus.devices.size() - 1);
  for (const std::string command : {"check", "compare", "bench"}) {
    EXPECT_EQ(complaint_of({command, "--device", "cuda:" + index}, 1), expected);
  }
}

TEST(CliInfo, AForcedKernelIsChosen) {
  const Outcome outcome =
      run_ladon(LadonRun{.arguments = {"info"}, .environment = {"LADON_ISA=baseline"}});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_TRUE(holds(outcome.out, "baseline     chosen")) << outcome.out;
  EXPECT_TRUE(holds(
      complaint_of(LadonRun{.arguments = {"info"}, .environment = {"LADON_ISA=mmx"}}, 1), "mmx"));
}

}  // namespace
}  // namespace ladon::test
