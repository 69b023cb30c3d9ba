// ladon check: a self-test of every kernel that this machine can run, or of a GPU's, with a verdict
// to paste into a report.
#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>

#include "commands.h"
#include "json_output.h"
#include "ladon/isa.h"
#include "ladon/version.h"
#include "machine.h"
#include "progress.h"
#include "self_test.h"
#include "text_table.h"
#include "units.h"

namespace ladon::cli {
namespace {

/// The findings of one area on one instruction set, or on a GPU.
struct AreaResult {
  std::string kernels;
  std::string area;
  std::int64_t checks = 0;
  std::vector<Finding> faults{};
  Finding worst{};  // the one nearest to what is allowed, or furthest beyond
};

double closeness(const Finding& finding) {
  return finding.allowed > 0 ? finding.error / finding.allowed : finding.error;
}

AreaResult sum_up(const std::string& kernels, std::string_view area,
                  const std::vector<Finding>& findings) {
  AreaResult result{.kernels = kernels, .area = std::string(area)};
  for (const Finding& finding : findings) {
    if (finding.area != area) continue;
    ++result.checks;
    if (!finding.good()) result.faults.push_back(finding);
    if (result.checks == 1 || closeness(finding) > closeness(result.worst)) result.worst = finding;
  }
  return result;
}

/// None on a GPU, whose kernels have no names.
std::vector<IsaInfo> isas_to_check(const CheckOptions& options) {
  std::vector<IsaInfo> isas;
  if (!options.machinery.device.is_cpu()) return isas;
  for (const IsaInfo& info : list_isas()) {
    const bool wanted = options.machinery.isa ? info.isa == *options.machinery.isa : info.runnable;
    if (wanted && (info.isa != Isa::kReference || options.machinery.isa)) isas.push_back(info);
  }
  return isas;
}

/// Kernels that the library has and no area runs: the self-test has fallen behind.
std::vector<std::string> untested_kernels(const std::vector<IsaInfo>& isas) {
  std::set<std::string> tested;
  for (const SelfTestArea& area : self_test_areas()) {
    std::istringstream names{std::string(area.kernels)};
    for (std::string name; names >> name;) tested.insert(name);
  }
  std::set<std::string> untested;
  for (const IsaInfo& info : isas) {
    for (const std::string& kernel : info.kernels) {
      // "forward_tile_f32": every area runs what it names in each of the float types.
      const std::string name = kernel.substr(0, kernel.rfind('_'));
      if (!tested.contains(name)) untested.insert(kernel);
    }
  }
  return {untested.begin(), untested.end()};
}

std::string verdict_of(const std::vector<AreaResult>& results) {
  std::int64_t checks = 0;
  std::size_t faults = 0;
  for (const AreaResult& result : results) {
    checks += result.checks;
    faults += result.faults.size();
  }
  return faults == 0 ? "PASS: " + format_count(checks) + " checks, all good"
                     : "FAIL: " + std::to_string(faults) + " of " + format_count(checks) +
                           " checks are wrong";
}

void print_report(const std::vector<AreaResult>& results, const std::vector<std::string>& untested,
                  const CheckOptions& options, int threads) {
  std::printf("Ladon %s, built by %s; %s, %d %s; seed %llu\n\n", version(), compiler_name().c_str(),
              device_name(options.machinery.device).c_str(), threads,
              threads == 1 ? "thread" : "threads", static_cast<unsigned long long>(options.seed));
  TextTable table({{"kernels", Align::kLeft},
                   {"area", Align::kLeft},
                   {"checks"},
                   {"wrong"},
                   {"largest error"},
                   {"allowed"},
                   {"where", Align::kLeft, /*brief=*/false}});
  for (const AreaResult& result : results) {
    table.add({result.kernels, result.area, format_count(result.checks),
               std::to_string(result.faults.size()), format_error(result.worst.error),
               format_error(result.worst.allowed), result.worst.what});
  }
  std::fputs(table.text().c_str(), stdout);
  std::printf("\n");
  for (const AreaResult& result : results) {
    for (const Finding& fault : result.faults) {
      std::printf("WRONG: %s, %s, %s: error %s, allowed %s\n", result.kernels.c_str(),
                  result.area.c_str(), fault.what.c_str(), format_error(fault.error).c_str(),
                  format_error(fault.allowed).c_str());
    }
  }
  for (const std::string& kernel : untested) {
    std::printf("not tested: the kernel %s\n", kernel.c_str());
  }
  std::printf("%s\n", verdict_of(results).c_str());
}

Json finding_json(const Finding& finding) {
  return {{"what", finding.what}, {"error", finding.error}, {"allowed", finding.allowed}};
}

void print_document(const std::vector<AreaResult>& results,
                    const std::vector<std::string>& untested, const CheckOptions& options,
                    int threads) {
  Json document = json_document("check");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["device"] = options.machinery.device.to_string();
  document["threads"] = threads;
  document["seed"] = options.seed;
  document["slack"] = options.slack;
  document["results"] = Json::array();
  bool good = true;
  for (const AreaResult& result : results) {
    Json faults = Json::array();
    for (const Finding& fault : result.faults) faults.push_back(finding_json(fault));
    good = good && result.faults.empty();
    document["results"].push_back({{"isa", result.kernels},
                                   {"area", result.area},
                                   {"checks", result.checks},
                                   {"worst", finding_json(result.worst)},
                                   {"faults", faults}});
  }
  document["untested_kernels"] = untested;
  document["good"] = good;
  document["verdict"] = verdict_of(results);
  print_json(document);
}

}  // namespace

int run_check(const CheckOptions& options) {
  const std::vector<IsaInfo> isas = isas_to_check(options);
  std::vector<AreaResult> results;
  int threads = 1;
  {
    Progress progress;
    const std::size_t kernels = isas.size() + (options.machinery.device.is_cpu() ? 0 : 1);
    Steps steps(progress, static_cast<int>(kernels * self_test_areas().size()));
    const auto check = [&](const ContextOptions& context, const std::string& name) {
      threads = Context(context).num_threads();
      SelfTest test(context, options.seed, options.slack);
      for (const SelfTestArea& area : self_test_areas()) {
        steps.begin("checking " + name + ", " + std::string(area.name));
        test.run_area(area.name);
        results.push_back(sum_up(name, area.name, test.findings()));
      }
    };
    ContextOptions context = options.machinery.context_options();
    if (!options.machinery.device.is_cpu()) check(context, options.machinery.device.to_string());
    for (const IsaInfo& info : isas) {
      context.isa = info.isa;
      check(context, info.name);
    }
  }
  const std::vector<std::string> untested = untested_kernels(isas);
  if (options.json) {
    print_document(results, untested, options, threads);
  } else {
    print_report(results, untested, options, threads);
  }
  const bool good = std::all_of(results.begin(), results.end(),
                                [](const AreaResult& result) { return result.faults.empty(); });
  return good ? kExitGood : kExitFailed;
}

}  // namespace ladon::cli
