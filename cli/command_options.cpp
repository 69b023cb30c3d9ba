#include "command_options.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "ladon/isa.h"
#include "names.h"
#include "units.h"

namespace ladon::cli {
namespace {

std::vector<std::string> dtype_names(const std::vector<DType>& choices) {
  std::vector<std::string> names;
  names.reserve(choices.size());
  for (const DType choice : choices) names.emplace_back(name_of(choice));
  return names;
}

DType parse_dtype(const std::string& option, std::string_view text,
                  const std::vector<DType>& choices) {
  const std::optional<DType> dtype = dtype_from_name(text);
  if (dtype && std::find(choices.begin(), choices.end(), *dtype) != choices.end()) return *dtype;
  const std::vector<std::string> names = dtype_names(choices);
  throw UsageError(option + ": no dtype '" + std::string(text) + "'" +
                   (dtype ? "" : did_you_mean(text, names)) + "; there are " + joined(names));
}

void add_isa(CLI::App* app, std::optional<Isa>& isa, const std::string& help) {
  app->add_option_function<std::string>(
         "--isa",
         [&isa](const std::string& text) {
           isa = isa_from_name(text);
           if (!isa) {
             std::vector<std::string> names;
             for (const Isa each : kAllIsas) names.emplace_back(name_of(each));
             throw UsageError("--isa: no kernels '" + text + "'" + did_you_mean(text, names) +
                              "; there are " + isa_names());
           }
         },
         help)
      ->type_name("NAME");
}

DeviceId parse_device(const std::string& text) {
  if (text == "cpu") return {};
  if (text == "cuda") return Device::kCuda;
  const std::string prefix = "cuda:";
  if (!text.starts_with(prefix)) {
    throw UsageError("--device: no device '" + text + "'; there are cpu, cuda and cuda:N");
  }
  constexpr std::int64_t kMostDevices = 1024;
  return {Device::kCuda, static_cast<int>(parsed("--device", [&] {
            return parse_count(text.substr(prefix.size()), 0, kMostDevices);
          }))};
}

}  // namespace

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

CLI::Option* add_count(CLI::App* app, const std::string& name, std::int64_t& value,
                       std::int64_t least, std::int64_t most, const std::string& help) {
  return app
      ->add_option_function<std::string>(
          name,
          [=, &value](const std::string& text) {
            value = parsed(name, [&] { return parse_count(text, least, most); });
          },
          help)
      ->type_name("N")
      ->default_str(value < least ? "" : std::to_string(value));
}

CLI::Option* add_dtype(CLI::App* app, const std::string& name, const std::vector<DType>& choices,
                       const std::string& help, const std::function<void(DType)>& assign) {
  return app
      ->add_option_function<std::string>(
          name, [=](const std::string& text) { assign(parse_dtype(name, text, choices)); },
          help + ": " + joined(dtype_names(choices)))
      ->type_name("DTYPE");
}

void add_machinery(CLI::App* app, Machinery& machinery, const std::string& default_kernels) {
  add_isa(app, machinery.isa, "Kernels to use: " + isa_names() + " [" + default_kernels + "]");
  app->add_option_function<std::string>(
         "--threads",
         [&machinery](const std::string& text) {
           machinery.threads = static_cast<int>(
               parsed("--threads", [&] { return parse_count(text, 1, kMaxThreads); }));
         },
         "Number of threads [all CPUs of this process]")
      ->type_name("N");
}

void add_device(CLI::App* app, Machinery& machinery) {
  app->add_option_function<std::string>(
         "--device",
         [&machinery](const std::string& text) { machinery.device = parse_device(text); },
         "Device to run on: cpu, cuda or cuda:N [cpu]")
      ->type_name("NAME")
      ->excludes("--isa");
}

void add_json(CLI::App* app, bool& json) {
  app->add_flag("--json", json, "Print the result as JSON");
}

void add_plot(CLI::App* app, std::string& path) {
  app->add_option("--plot", path, "Draw the result as SVG, PNG or PDF")->type_name("FILE");
}

void add_ignored(CLI::App* app, std::vector<std::string>& fields) {
  app->add_option("--ignore-field", fields, "Ignore an unknown field of the config (repeatable)")
      ->type_name("NAME")
      ->take_all();
}

}  // namespace ladon::cli
