// ladon info: which library, which machine, which kernels, which GPUs, and why those.
#include <cstdio>
#include <string>

#include "commands.h"
#include "json_output.h"
#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/isa.h"
#include "ladon/version.h"
#include "machine.h"
#include "terminal.h"
#include "text_table.h"
#include "units.h"

namespace ladon::cli {
namespace {

std::string state_of(const IsaInfo& info) {
  if (info.chosen) return "chosen";
  return info.runnable ? "can run" : "refused";
}

void print_devices(const DeviceList& gpus) {
  if (gpus.devices.empty()) std::printf("GPU      none: %s\n", gpus.reason.c_str());
  for (const DeviceInfo& gpu : gpus.devices) {
    std::printf("GPU      %s: %s, compute capability %s, %d multiprocessors, %s of %s free\n",
                gpu.id.to_string().c_str(), gpu.name.c_str(), gpu.capability.c_str(),
                gpu.num_multiprocessors,
                format_bytes(static_cast<std::int64_t>(gpu.free_bytes)).c_str(),
                format_bytes(static_cast<std::int64_t>(gpu.memory_bytes)).c_str());
  }
}

void print_text(const std::vector<IsaInfo>& isas, const DeviceList& gpus, int threads) {
  std::printf("Ladon %s, built by %s\n", version(), compiler_name().c_str());
  std::printf("CPU      %s\n", cpu_name().c_str());
  std::printf("threads  %d\n", threads);
  std::printf("memory   %s available\n", format_bytes(available_memory()).c_str());
  print_devices(gpus);
  std::printf("\n");
  TextTable table({{"kernels", Align::kLeft}, {"", Align::kLeft}, {"why", Align::kLeft}});
  for (const IsaInfo& info : isas) table.add({info.name, state_of(info), info.reason});
  std::fputs(table.text().c_str(), stdout);
  std::printf("\n");
  for (const IsaInfo& info : isas) {
    if (!info.chosen || info.kernels.empty()) continue;
    std::string names;
    for (const std::string& kernel : info.kernels) names += kernel + " ";
    const auto width = static_cast<std::size_t>(terminal_width().value_or(80));
    std::printf("kernels of %s:\n  %s\n", info.name.c_str(),
                wrap_words(names, 2, 2, width).c_str());
  }
}

Json document_of(const std::vector<IsaInfo>& isas, const DeviceList& gpus, int threads) {
  Json document = json_document("info");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["threads"] = threads;
  document["available_memory"] = available_memory();
  document["gpus"] = Json::array();
  for (const DeviceInfo& gpu : gpus.devices) {
    document["gpus"].push_back({{"device", gpu.id.to_string()},
                                {"name", gpu.name},
                                {"capability", gpu.capability},
                                {"memory", gpu.memory_bytes},
                                {"free_memory", gpu.free_bytes},
                                {"multiprocessors", gpu.num_multiprocessors}});
  }
  if (gpus.devices.empty()) document["no_gpu"] = gpus.reason;
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
  const DeviceList gpus = list_devices();
  const int threads = Context().num_threads();
  if (options.json) {
    print_json(document_of(isas, gpus, threads));
  } else {
    print_text(isas, gpus, threads);
  }
  return kExitGood;
}

}  // namespace ladon::cli
