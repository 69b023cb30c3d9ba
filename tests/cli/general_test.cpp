// What all subcommands share: help, versions, mistakes, exit statuses; and `ladon info`.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
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

TEST(CliGeneral, ShortVersionAndHelpAsASubcommand) {
  EXPECT_EQ(run_ladon({"-V"}).out, run_ladon({"--version"}).out);
  EXPECT_EQ(run_ladon({"-V"}).status, 0);
  EXPECT_EQ(run_ladon({"help"}).out, run_ladon({"--help"}).out);
  EXPECT_EQ(run_ladon({"help", "plan"}).out, run_ladon({"plan", "--help"}).out);
  EXPECT_TRUE(holds(run_ladon({"help", "plan"}).out, "Usage: ladon plan"));
}

TEST(CliGeneral, HelpFitsEightyColumnsAndNamesDefaults) {
  for (const char* name : {"", "compare", "plan", "run", "convert", "bench", "check", "info"}) {
    std::vector<std::string> words{"help"};
    if (*name != 0) words.emplace_back(name);
    const std::string help = run_ladon(words).out;
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) {
      // As CLI11 would write it: conditions and checks in the name's column.
      for (const char* part : {"Excludes:", "Needs:", "REQUIRED", "TEXT", ":{", "{false}"}) {
        if (std::string(name) == "bench" && std::string(part) == "TEXT") continue;
        EXPECT_FALSE(holds(line, part)) << line;
      }
      EXPECT_LE(line.size(), 80U) << line;
    }
  }
  const std::string plan = run_ladon({"help", "plan"}).out;
  EXPECT_TRUE(
      holds(plan, "\n  --context N           Tokens per sequence, such as 4096 or 128k [8192]\n"))
      << plan;
  EXPECT_TRUE(holds(plan, "(not with --model)")) << plan;
  const std::string run = run_ladon({"help", "run"}).out;
  EXPECT_TRUE(holds(run, "Folder with config.json and safetensors (required)\n")) << run;
  EXPECT_TRUE(holds(run, "Tokens per call (with --cached) [1]\n")) << run;
  for (const char* name : {"help", "completion", "manual"}) {
    EXPECT_EQ(run_ladon({"help", name}).out, run_ladon({"--help"}).out);
  }
}

TEST(CliGeneral, DidYouMean) {
  EXPECT_TRUE(holds(complaint_of({"paln"}, 2), "no subcommand 'paln', did you mean plan?; there"));
  EXPECT_TRUE(holds(complaint_of({"hlep"}, 2), "did you mean help?"));
  EXPECT_TRUE(holds(complaint_of({"compare", "--size", "smal"}, 2), "did you mean small?; there"));
  for (const std::vector<std::string>& words : {std::vector<std::string>{"plan", "--contex", "8k"},
                                                {"plan", "--contex=8k", "--bach", "2"}}) {
    EXPECT_EQ(complaint_of(words, 2),
              "plan: no option '--contex', did you mean --context?; see ladon plan --help");
  }
  EXPECT_TRUE(holds(complaint_of({"plan", "--dtype", "bf61"}, 2), ", did you mean bf16?; there"));
  EXPECT_TRUE(holds(complaint_of({"plan", "--model", "lama-3-8b"}, 2), "did you mean llama-3-8b?"));
  EXPECT_TRUE(
      holds(complaint_of({"check", "--isa", "avx521"}, 2), ", did you mean avx512?; there"));
  EXPECT_FALSE(holds(complaint_of({"xyzzy"}, 2), "did you mean"));
}

TEST(CliGeneral, OtherSpellingsOfDtypes) {
  const auto caches = [](const char* dtype) {
    const nlohmann::json document = document_of({"plan", "--model", "gpt-2", "--dtype", dtype});
    return document["dtype"].get<std::string>();
  };
  for (const char* name : {"fp16", "float16", "F16", "half"}) EXPECT_EQ(caches(name), "f16");
  for (const char* name : {"BF16", "bfloat16"}) EXPECT_EQ(caches(name), "bf16");
  for (const char* name : {"fp32", "float32", "FLOAT"}) EXPECT_EQ(caches(name), "f32");
  for (const char* name : {"fp64", "float64", "double"}) EXPECT_EQ(caches(name), "f64");
  EXPECT_EQ(caches("int8"), "i8");
  for (const char* name : {"fp8", "f8e4m3", "float8_e4m3fn"}) EXPECT_EQ(caches(name), "f8e4m3");
  // Known, and not among the choices.
  EXPECT_TRUE(holds(complaint_of({"compare", "--dtype", "int8"}, 2),
                    "no dtype 'int8'; there are f64, f32, f16, bf16"));
}

/// What a shell prints.
std::string shell(const std::string& command) {
  std::string text;
  FILE* const pipe = ::popen(command.c_str(), "r");
  for (int letter = 0; pipe != nullptr && (letter = std::fgetc(pipe)) != EOF;) {
    text += static_cast<char>(letter);
  }
  if (pipe != nullptr) ::pclose(pipe);
  return text;
}

TEST(CliGeneral, Completions) {
  const std::string source = "bash -c 'source <(" LADON_PROGRAM " completion bash); COMP_WORDS=(";
  const auto complete = [&](const std::string& words, int place) {
    return shell(source + words + "); COMP_CWORD=" + std::to_string(place) +
                 "; _ladon; echo ${COMPREPLY[@]}'");
  };
  EXPECT_EQ(complete("ladon c", 1), "compare convert check completion\n");
  EXPECT_EQ(complete("ladon completion z", 2), "zsh\n");
  EXPECT_EQ(complete("ladon help p", 2), "plan\n");
  EXPECT_EQ(complete("ladon check --device c", 3), "cpu cuda\n");
  EXPECT_EQ(complete("ladon plan --co", 2), "--config --context\n");
  EXPECT_EQ(complete("ladon plan --dtype b", 3), "bf16\n");
  EXPECT_EQ(complete("ladon plan --dtype f", 3), "f64 f32 f16 f8e4m3\n");
  EXPECT_EQ(complete("ladon run --dtype f", 3), "f64 f32 f16\n");
  EXPECT_EQ(complete("ladon convert --to m", 3), "mha mqa mla\n");
  EXPECT_EQ(complete("ladon check --isa avx512", 3), "avx512 avx512_bf16\n");
  EXPECT_EQ(complete("ladon plan --link i", 3), "\n");  // or a latency and a bandwidth
  EXPECT_TRUE(holds(run_ladon({"completion", "zsh"}).out, "#compdef ladon"));
  EXPECT_TRUE(holds(run_ladon({"completion", "zsh"}).out, "'--memory["));
  EXPECT_TRUE(holds(run_ladon({"completion", "zsh"}).out, "'manual:Print the manual page'"));
  EXPECT_TRUE(holds(run_ladon({"completion", "zsh"}).out, "'1:shell:(bash zsh fish)'"));
  EXPECT_TRUE(
      holds(run_ladon({"completion", "fish"}).out, "_from completion' -f -a 'bash zsh fish'"));
  EXPECT_TRUE(holds(run_ladon({"completion", "fish"}).out, "_from help' -f -a plan -d "));
  EXPECT_TRUE(holds(run_ladon({"completion", "fish"}).out,
                    "__fish_seen_subcommand_from plan' -l memory -d "));
  EXPECT_EQ(complaint_of({"completion", "bach"}, 2),
            "no shell 'bach', did you mean bash?; there are bash, zsh and fish");
  EXPECT_EQ(complaint_of({"completion"}, 2),
            "completion: no shell is named; there are bash, zsh and fish");
  EXPECT_EQ(complaint_of({"completion", "bash", "zsh"}, 2),
            "completion: unexpected argument 'zsh'");
  EXPECT_EQ(complaint_of({"manual", "plan"}, 2), "manual: unexpected argument 'plan'");
}

TEST(CliGeneral, TheManualSaysWhatTheHelpSays) {
  const Outcome manual = run_ladon({"manual"});
  EXPECT_EQ(manual.status, 0);
  EXPECT_TRUE(manual.out.starts_with(".TH LADON 1 "));
  for (const char* part : {".SH PLAN\n", ".SH COMPARE\n",
                           "\n.TP\n\\fB\\-\\-memory\\fR \\fISIZE\\fR\n", ".SH NOTES\n"}) {
    EXPECT_TRUE(holds(manual.out, part)) << part;
  }
}

TEST(CliTables, FitEightyColumns) {
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"plan", "--model", "deepseek-v3", "--memory", "800GiB",
                                 "--context", "128k", "--batch", "8"},
        {"plan", "--memory", "80GiB"}}) {
    std::size_t longest = 0;
    for (const char* columns : {"COLUMNS=80", "COLUMNS=200"}) {
      const Outcome outcome = run_ladon(LadonRun{.arguments = command, .environment = {columns}});
      std::istringstream lines(outcome.out);
      longest = 0;
      bool in_table = false;
      for (std::string line; std::getline(lines, line); in_table = in_table && !line.empty()) {
        if (holds(line, "bytes/token")) in_table = true;
        if (in_table) longest = std::max(longest, line.size());
      }
      EXPECT_GT(longest, 40U) << outcome.out;
      if (std::string(columns) == "COLUMNS=80") {
        EXPECT_LE(longest, 80U) << outcome.out;
      }
    }
  }
}

TEST(CliTables, NotesFitEightyColumns) {
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"plan", "--model", "gemma-2-9b", "--context", "32k", "--memory",
                                 "24GiB"},
        {"plan", "--model", "llama-3-8b", "--ranks", "4"},
        {"plan", "--model", "deepseek-v3", "--ranks", "8", "--link", "infiniband"},
        {"check", "--isa", "baseline"},
        {"compare", "--size", "tiny", "--quick"}}) {
    const Outcome outcome =
        run_ladon(LadonRun{.arguments = command, .environment = {"COLUMNS=80"}});
    std::istringstream lines(outcome.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
  }
}

TEST(CliTables, ColoursOnATerminalUnlessRefused) {
  const std::string run = "script -qec '" LADON_PROGRAM " plan --model gpt-2' /dev/null";
  EXPECT_TRUE(holds(shell("env -u NO_COLOR TERM=xterm " + run), "\033[1mMHA"));
  EXPECT_FALSE(holds(shell("NO_COLOR=1 TERM=xterm " + run), "\033["));
  EXPECT_FALSE(holds(shell("env -u NO_COLOR TERM=dumb " + run), "\033["));
  EXPECT_FALSE(holds(run_ladon({"plan", "--model", "gpt-2"}).out, "\033["));
}

TEST(CliTables, RemainingTimeOnATerminal) {
  // Some seconds: nothing is said in the first.
  const std::string text =
      shell("TERM=xterm script -qec '" LADON_PROGRAM " check --isa baseline' /dev/null");
  EXPECT_TRUE(holds(text, " s left ...")) << text;
}

TEST(CliGeneral, MistakesAreStatusTwo) {
  EXPECT_EQ(
      complaint_of(std::vector<std::string>{}, 2),
      "no subcommand; there are compare, plan, run, convert, bench, check, info; see ladon --help");
  EXPECT_EQ(
      complaint_of({"conpare"}, 2),
      "no subcommand 'conpare', did you mean compare?; there are compare, plan, run, convert, "
      "bench, check, info");
  EXPECT_EQ(complaint_of({"info", "--nosuch"}, 2),
            "info: no option '--nosuch'; see ladon info --help");
  EXPECT_EQ(complaint_of({"--nosuch"}, 2), "no option '--nosuch'; see ladon --help");
  EXPECT_EQ(complaint_of({"info", "extra"}, 2),
            "info: unexpected argument 'extra'; see ladon info --help");
  EXPECT_EQ(complaint_of({"check", "--threads", "0"}, 2),
            "check: --threads: '0' is not a whole number from 1 to 1024");
  EXPECT_EQ(complaint_of({"check", "--threads", "two"}, 2),
            "check: --threads: 'two' is not a whole number from 1 to 1024");
  EXPECT_EQ(complaint_of({"check", "--isa", "mmx"}, 2),
            "check: --isa: no kernels 'mmx', did you mean amx?; there are reference, baseline, "
            "avx2, avx512, "
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
              command + ": --device: 'x' is not a whole number from 0 to 1024");
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
