// ladon compare: MHA, GQA, MQA and MLA layers of one size, run and checked on this machine.
#include <algorithm>
#include <cstdio>
#include <string>

#include "commands.h"
#include "failure.h"
#include "json_output.h"
#include "ladon/version.h"
#include "layer_measure.h"
#include "machine.h"
#include "output_file.h"
#include "plot/canvas.h"
#include "plot/compare_chart.h"
#include "progress.h"
#include "signals.h"
#include "standard_streams.h"
#include "text_table.h"
#include "units.h"

namespace ladon::cli {
namespace {

struct Comparison {
  const CompareOptions& options;
  const LayerSize& size;
  int threads = 1;
  std::string kernels{};
  std::vector<LayerMeasurement> rows{};
};

std::string machine_line(const Comparison& comparison) {
  return device_name(comparison.options.machinery.device) + ", " +
         std::to_string(comparison.threads) +
         (comparison.threads == 1 ? " thread, " : " threads, ") + comparison.kernels +
         " kernels, Ladon " + version();
}

std::string layer_line(const Comparison& comparison) {
  const LayerSize& size = comparison.size;
  return "one layer of " + std::string(size.name) + "'s size in " +
         name_of(comparison.options.dtype) + ": embedding " + format_count(size.embed_dim) + ", " +
         std::to_string(size.num_heads) + " heads of " + std::to_string(size.head_dim);
}

std::string work_line(const CompareOptions& options) {
  std::string line = "prefill of " + format_count(options.prompt) + " tokens, decoding at " +
                     format_count(options.context) + " tokens of context";
  if (options.batch > 1) line += ", " + format_count(options.batch) + " sequences";
  return line;
}

std::string share_text(const MeasuredRate& rate) {
  return format_percent(rate.share()) + (rate.disturbed ? " *" : "");
}

void print_report(const Comparison& comparison) {
  std::printf("%s\n%s\n%s\n\n", machine_line(comparison).c_str(), layer_line(comparison).c_str(),
              work_line(comparison.options).c_str());
  TextTable table({{"layer", Align::kLeft},
                   {"", Align::kLeft, /*brief=*/false},
                   {"prefill tok/s"},
                   {"of ceiling"},
                   {"decode tok/s"},
                   {"of ceiling"},
                   {"cache B/token", Align::kRight, /*brief=*/false},
                   {"less than MHA", Align::kRight, /*brief=*/false},
                   {"largest error"}});
  bool disturbed = false;
  for (const LayerMeasurement& row : comparison.rows) {
    disturbed = disturbed || row.prefill.disturbed || row.decode.disturbed;
    table.add(
        {std::string(row.variant.kind), row.details, format_rate(row.prefill.tokens_per_second),
         share_text(row.prefill), format_rate(row.decode.tokens_per_second), share_text(row.decode),
         format_count(static_cast<std::int64_t>(row.cache_bytes_per_token)),
         row.reduction == 0 ? "" : format_percent(row.reduction),
         format_error(row.error) + (row.good() ? "" : " WRONG")},
        row.good() ? LineStyle::kPlain : LineStyle::kRed);
  }
  std::fputs(table.text().c_str(), stdout);
  const LayerMeasurement& first = comparison.rows.front();
  const bool on_cpu = comparison.options.machinery.device.is_cpu();
  std::printf(
      "\nCeilings, measured in turns with each row (here the first's):\n"
      "%s GFLOP/s of %s, %s GB/s of memory %s.\n"
      "Decoding must read all weights and the cache for each token.\n"
      "Errors: against plain loops in double, relative to the largest output;\n"
      "at most %s allowed.\n",
      format_rate(first.fma_gflops).c_str(), on_cpu ? "multiply-adds" : "a matrix product",
      format_rate(first.read_gbps).c_str(), on_cpu ? "read" : "copied",
      format_error(first.allowed).c_str());
  if (disturbed)
    std::printf("* disturbed: other programs used the CPUs; the figure is unreliable.\n");
}

Json rate_json(const MeasuredRate& rate) {
  return {{"tokens_per_second", rate.tokens_per_second},
          {"ceiling_tokens_per_second", rate.ceiling},
          {"share", rate.share()},
          {"bound", rate.bound},
          {"disturbed", rate.disturbed}};
}

Json document_of(const Comparison& comparison) {
  const CompareOptions& options = comparison.options;
  Json document = json_document("compare");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["device"] = options.machinery.device.to_string();
  document["threads"] = comparison.threads;
  document["isa"] = comparison.kernels;
  document["size"] = comparison.size.name;
  document["dtype"] = name_of(options.dtype);
  document["embed_dim"] = comparison.size.embed_dim;
  document["num_heads"] = comparison.size.num_heads;
  document["head_dim"] = comparison.size.head_dim;
  document["prompt"] = options.prompt;
  document["context"] = options.context;
  document["batch"] = options.batch;
  document["quick"] = options.quick;
  document["layers"] = Json::array();
  bool good = true;
  for (const LayerMeasurement& row : comparison.rows) {
    good = good && row.good();
    document["layers"].push_back({{"kind", row.variant.kind},
                                  {"details", row.details},
                                  {"weights", row.weights},
                                  {"prefill", rate_json(row.prefill)},
                                  {"decode", rate_json(row.decode)},
                                  {"cache_bytes_per_token", row.cache_bytes_per_token},
                                  {"reduction", row.reduction},
                                  {"error", row.error},
                                  {"allowed", row.allowed},
                                  {"fma_gflops", row.fma_gflops},
                                  {"read_gbps", row.read_gbps}});
  }
  document["good"] = good;
  return document;
}

void draw(const Comparison& comparison) {
  const auto canvas =
      draw_compare_chart(comparison.options.plot, comparison.rows,
                         {.title = "Four kinds of attention, " + layer_line(comparison),
                          .machine = machine_line(comparison),
                          .work = work_line(comparison.options)});
  const std::string picture = canvas->bytes();
  const HeldSignals held;
  OutputFile("compare: --plot", output_path(comparison.options.plot), picture).commit();
}

}  // namespace

int run_compare(const CompareOptions& options) {
  const LayerSize& size = layer_size(options.size);
  if (!options.plot.empty()) {
    check_picture_path("compare: --plot", options.plot);
    claim_standard_output("compare", {options.plot}, options.json);
    check_writable("compare: --plot", output_path(options.plot));
  }
  const DeviceId device = options.machinery.device;
  const Context context(options.machinery.context_options());
  require_memory("compare: this", memory_to_measure(size, options), device);
  if (device.is_cpu() && context.isa() == Isa::kReference) {
    throw UsageError("compare: --isa: the reference is what the others are compared with");
  }
  Comparison comparison{options, size, context.num_threads(),
                        device.is_cpu() ? name_of(context.isa()) : device.to_string()};
  {
    Progress progress;
    progress.show("reading memory");
    const bench::ReadBuffer buffer(context);
    const std::vector<LayerVariant> variants = layer_variants(size);
    Steps steps(progress, kStepsOfALayer * static_cast<int>(variants.size()));
    for (const LayerVariant& variant : variants) {
      comparison.rows.push_back(measure_layer(context, buffer, size, variant, options,
                                              [&](const std::string& step) { steps.begin(step); }));
    }
  }
  if (!options.plot.empty()) draw(comparison);
  if (options.json) {
    print_json(document_of(comparison));
  } else {
    print_report(comparison);
    if (!options.plot.empty()) std::printf("wrote %s\n", shown_output(options.plot).c_str());
  }
  const bool good = std::all_of(comparison.rows.begin(), comparison.rows.end(),
                                [](const LayerMeasurement& row) { return row.good(); });
  return good ? kExitGood : kExitFailed;
}

}  // namespace ladon::cli
