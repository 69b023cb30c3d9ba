// ladon info: which library, which machine, which kernels, and why those.
#include <cstdio>
#include <string>

#include "commands.h"
#include "json_output.h"
#include "ladon/context.h"
#include "ladon/isa.h"
#include "ladon/version.h"
#include "machine.h"
#include "text_table.h"
#include "units.h"

namespace ladon::cli {
namespace {

std::string state_of(const IsaInfo& info) {
  if (info.chosen) return "chosen";
  return info.runnable ? "can run" : "refused";
}

void print_text(const std::vector<IsaInfo>& isas, int threads) {
  std::printf("Ladon %s, built by %s\n", version(), compiler_name().c_str());
  std::printf("CPU      %s\n", cpu_name().c_str());
  std::printf("threads  %d\n", threads);
  std::printf("memory   %s available\n\n", format_bytes(available_memory()).c_str());
  TextTable table({{"kernels", Align::kLeft}, {"", Align::kLeft}, {"why", Align::kLeft}});
  for (const IsaInfo& info : isas) table.add({info.name, state_of(info), info.reason});
  std::fputs(table.text().c_str(), stdout);
  std::printf("\n");
  for (const IsaInfo& info : isas) {
    if (!info.chosen || info.kernels.empty()) continue;
    std::string names;
    for (const std::string& kernel : info.kernels) names += " " + kernel;
    std::printf("%s holds:%s\n", info.name.c_str(), names.c_str());
  }
}

Json document_of(const std::vector<IsaInfo>& isas, int threads) {
  Json document = json_document("info");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["threads"] = threads;
  document["available_memory"] = available_memory();
  document["isas"] = Json::array();
  for (const IsaInfo& info : isas) {
    document["isas"].push_back({{"name", info.name},
                                {"runnable", info.runnable},
                                {"chosen", info.chosen},
                                {"reason", info.reason},
                                {"kernels", info.kernels}});
  }
  return document;
}

}  // namespace

int run_info(const InfoOptions& options) {
  const std::vector<IsaInfo> isas = list_isas();
  const int threads = Context().num_threads();
  if (options.json) {
    print_json(document_of(isas, threads));
  } else {
    print_text(isas, threads);
  }
  return kExitGood;
}

}  // namespace ladon::cli
