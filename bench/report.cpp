#include "report.h"

#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "ladon/version.h"

namespace ladon::bench {
namespace {

using Json = nlohmann::ordered_json;

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return "unknown";
}

std::string utc_date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", &parts)};
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

const char* unit_of(Bound bound) { return bound == Bound::kCompute ? "GFLOP/s" : "GB/s"; }

Json row_json(const Row& row) {
  const bool compute = row.bound == Bound::kCompute;
  Json json;
  json["name"] = row.name;
  json["isa"] = row.isa;
  json["threads"] = row.threads;
  json["share"] = row.share();
  if (row.target) json["target"] = *row.target;
  json["median_ms"] = row.timing.median_ms;
  json["p10_ms"] = row.timing.p10_ms;
  json["disturbed"] = row.disturbed;
  json["repetitions"] = row.timing.repetitions;
  json[compute ? "gflops" : "gbps"] = row.timing.rate / 1e9;
  json[compute ? "ceiling_gflops" : "ceiling_gbps"] = row.ceiling.rate / 1e9;
  return json;
}

std::filesystem::path folder_of(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

}  // namespace

Machine describe_machine(int threads) {
  return {cpu_model(), threads, utc_date(), compiler(), version()};
}

void print_head(const Machine& machine) {
  std::printf("%s, %d %s, %s, Ladon %s, %s\n", machine.cpu.c_str(), machine.threads,
              machine.threads == 1 ? "thread" : "threads", machine.date.c_str(),
              machine.version.c_str(), machine.compiler.c_str());
  std::printf(
      "Ceilings: FMA, or memory read, measured in turns with the case. K and V count once.\n\n");
  std::printf("%-9s %-44s %10s %10s %9s %-8s %8s %7s\n", "ISA", "case", "median ms", "p10 ms",
              "rate", "", "ceiling", "share");
}

void print_row(const Row& row) {
  std::printf("%-9s %-44s %10.2f %10.2f %9.1f %-8s %8.1f %6.1f%%", row.isa.c_str(),
              row.name.c_str(), row.timing.median_ms, row.timing.p10_ms, row.timing.rate / 1e9,
              unit_of(row.bound), row.ceiling.rate / 1e9, 100 * row.share());
  if (row.target) std::printf("  target %.0f%%", 100 * *row.target);
  if (row.disturbed) {
    std::printf("  disturbed: the CPUs are busy");
  } else if (row.target) {
    std::printf(row.share() >= *row.target ? ": met" : ": missed");
  }
  std::printf("\n");
  std::fflush(stdout);
}

void print_fault(const std::string& isa, const std::string& name, const std::string& fault) {
  std::printf("%-9s %-44s WRONG: %s\n", isa.c_str(), name.c_str(), fault.c_str());
  std::fflush(stdout);
}

void print_scaling(const Scaling& scaling) {
  std::printf("\n%s %s: %d threads are %.2f times as fast as 1 (the FMA loop: %.2f times)%s\n",
              scaling.isa.c_str(), scaling.name.c_str(), scaling.threads, scaling.speedup,
              scaling.ceiling_speedup, scaling.disturbed ? "; disturbed" : "");
}

void check_json_path(const std::string& path) {
  const std::filesystem::path folder = folder_of(path);
  if (std::filesystem::is_directory(path)) {
    throw std::runtime_error("--json: " + path + " is a folder");
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw std::runtime_error("--json: cannot write in " + folder.string());
  }
}

void write_json(const std::string& path, const Machine& machine, bool quick,
                const std::vector<Row>& rows, const std::optional<Scaling>& scaling) {
  Json json;
  json["machine"] = {{"cpu", machine.cpu},
                     {"threads", machine.threads},
                     {"date", machine.date},
                     {"compiler", machine.compiler},
                     {"ladon", machine.version}};
  json["quick"] = quick;
  json["rows"] = Json::array();
  for (const Row& row : rows) json["rows"].push_back(row_json(row));
  if (scaling) {
    json["scaling"] = {{"name", scaling->name},
                       {"isa", scaling->isa},
                       {"threads", scaling->threads},
                       {"speedup", scaling->speedup},
                       {"ceiling_speedup", scaling->ceiling_speedup},
                       {"disturbed", scaling->disturbed}};
  }

  const std::string temporary = path + ".tmp" + std::to_string(getpid());
  std::ofstream file(temporary);
  file << json.dump(2) << '\n';
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::remove(temporary.c_str());
    throw std::runtime_error("--json: cannot write " + path);
  }
}

}  // namespace ladon::bench
