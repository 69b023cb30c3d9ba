#include "options.h"

#include <charconv>
#include <string_view>

namespace ladon::bench {
namespace {

constexpr int kMostThreads = 4096;

Isa parse_isa(std::string_view name) {
  const std::optional<Isa> isa = isa_from_name(name);
  if (!isa) {
    throw UsageError("--isa: unknown instruction set '" + std::string(name) +
                     "'; expected baseline, avx2 or avx512");
  }
  if (*isa == Isa::kReference) throw UsageError("--isa: the reference is not benchmarked");
  for (const IsaInfo& info : list_isas()) {
    if (info.isa == *isa && !info.runnable) {
      throw UsageError("--isa: cannot run " + info.name + " here: " + info.reason);
    }
  }
  return *isa;
}

int parse_threads(std::string_view text) {
  int threads = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  if (error != std::errc{} || end != text.data() + text.size() || threads < 1 ||
      threads > kMostThreads) {
    throw UsageError("--threads: '" + std::string(text) + "' is no number from 1 to " +
                     std::to_string(kMostThreads));
  }
  return threads;
}

}  // namespace

const char* const kUsage =
    "usage: ladon_bench [options]\n"
    "\n"
    "Times attention() and attention_backward() beside this machine's own limits.\n"
    "\n"
    "  --quick             fewer repetitions\n"
    "  --isa NAME          one instruction set: baseline, avx2 or avx512\n"
    "  --filter SUBSTRING  only cases whose \"ISA case\" holds this, such as \"avx2 f32 forward\"\n"
    "  --threads N         threads to use; without it, all that this process may use\n"
    "  --json FILE         also write the results there\n"
    "  --help              this text\n";

Options parse_options(int argc, const char* const* argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    const auto value = [&]() -> std::string_view {
      if (i + 1 >= argc || *argv[i + 1] == '\0') {
        throw UsageError(std::string(option) + ": wants a value");
      }
      return argv[++i];
    };
    if (option == "--quick") {
      options.quick = true;
    } else if (option == "--help" || option == "-h") {
      options.help = true;
    } else if (option == "--isa") {
      options.isa = parse_isa(value());
    } else if (option == "--filter") {
      options.filter = value();
    } else if (option == "--threads") {
      options.threads = parse_threads(value());
    } else if (option == "--json") {
      options.json = value();
    } else {
      throw UsageError("unknown option '" + std::string(option) + "'; see --help");
    }
  }
  return options;
}

}  // namespace ladon::bench
