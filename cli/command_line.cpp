#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "command_options.h"
#include "commands.h"
#include "failure.h"
#include "help_format.h"
#include "ladon/isa.h"
#include "ladon/version.h"
#include "layer_size.h"
#include "names.h"
#include "shell_support.h"
#include "units.h"

namespace ladon::cli {
namespace {

constexpr std::int64_t kMostSeconds = 86400;

constexpr const char* kDescription =
    "Attention on this machine: MHA, GQA, MQA and MLA, with KV caches.\n"
    "Start with: ladon compare";
constexpr const char* kFooter =
    "See ladon help SUBCOMMAND for details; ladon completion bash|zsh|fish prints\n"
    "shell completions, ladon manual a man page. With --json, the result is one JSON\n"
    "document on standard output (docs/cli_schema.json). Exit status: 0 success; 1\n"
    "failure, or a failed check; 2 an invalid command line. LADON_ISA forces the\n"
    "kernels, as --isa does.";

/// What parsing leaves behind: the subcommand's work.
using Work = std::function<int()>;

Work info(CLI::App& app) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* sub = app.add_subcommand(
      "info", "Show the version, the CPU and its kernels, and the GPUs, with reasons");
  add_json(sub, options->json);
  return [options] { return run_info(*options); };
}

Work compare(CLI::App& app) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* sub = app.add_subcommand(
      "compare", "Compare MHA, GQA, MQA and MLA layers: speed, memory and errors (one minute)");
  std::string sizes;
  for (const LayerSize& size : layer_sizes()) {
    sizes += (sizes.empty() ? "" : ", ") + std::string(size.name);
  }
  sub->add_option("--size", options->size, "Model whose layer sizes are used: " + sizes)
      ->type_name("NAME")
      ->capture_default_str();
  add_dtype(sub, "--dtype", {DType::kF64, DType::kF32, DType::kF16, DType::kBF16},
            "Type of weights and caches", [options](DType dtype) { options->dtype = dtype; })
      ->default_str(name_of(options->dtype));
  add_count(sub, "--prompt", options->prompt, 1, kMostTokens, "Prompt length, for prefill");
  add_count(sub, "--context", options->context, 1, kMostTokens,
            "Tokens in the cache, for decoding");
  add_count(sub, "--batch", options->batch, 1, kMostTokens, "Number of sequences");
  sub->add_flag("--quick", options->quick, "Measure with fewer repetitions");
  add_plot(sub, options->plot);
  add_machinery(sub, options->machinery);
  add_device(sub, options->machinery);
  add_json(sub, options->json);
  return [options] { return run_compare(*options); };
}

CLI::Option* add_link(CLI::App* sub, std::string& link) {
  return sub
      ->add_option(
          "--link", link,
          "Network between the ranks: memory, nvlink, infiniband, 10gbe, 1gbe, internet, or "
          "LATENCY,BANDWIDTH such as 30us,1.2GB/s")
      ->type_name("LINK")
      ->capture_default_str();
}

Work plan(CLI::App& app) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* sub = app.add_subcommand(
      "plan", "Calculate the memory of a model's KV cache as MHA, GQA, MQA and MLA");
  auto* model = sub->add_option("--model", options->model,
                                "Published model, such as deepseek-v3 [an overview of all]")
                    ->type_name("NAME");
  sub->add_option("--config", options->config,
                  "Hugging Face config.json, its folder, or - for standard input")
      ->type_name("PATH")
      ->excludes(model);
  add_ignored(sub, options->ignored_fields);
  add_count(sub, "--context", options->context, 1, kMostTokens,
            "Tokens per sequence, such as 4096 or 128k");
  add_count(sub, "--batch", options->batch, 1, kMostTokens, "Number of sequences");
  add_dtype(sub, "--dtype",
            {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3},
            "Type of the cache", [options](DType dtype) { options->dtype = dtype; })
      ->default_str(name_of(options->dtype));
  sub->add_option_function<std::string>(
         "--memory",
         [options](const std::string& text) {
           options->memory = parsed("--memory", [&] { return parse_bytes(text); });
           // A number alone is bytes: "80" lacks its unit.
           if (*options->memory < (std::int64_t{1} << 20)) {
             throw UsageError("--memory: got " + format_bytes(*options->memory) +
                              ", expected at least 1 MiB; sizes have a unit, such as 80GiB");
           }
         },
         "Show the context and batch that fit next to the weights, such as 80GiB")
      ->type_name("SIZE");
  sub->add_option_function<std::string>(
         "--weights",
         [options](const std::string& text) {
           options->weights =
               text == "0" ? 0 : parsed("--weights", [&] { return parse_bytes(text); });
         },
         "Size of the weights in memory, such as 5GiB; 0 leaves them out [the published files']")
      ->type_name("SIZE");
  constexpr std::int64_t kMostRanks = 1 << 20;
  CLI::Option* ranks = add_count(sub, "--ranks", options->ranks, 1, kMostRanks,
                                 "Show what each of N ranks would hold and send");
  add_link(sub, options->link)->needs(ranks);
  add_json(sub, options->json);
  return [options] { return run_plan(*options); };
}

Work run(CLI::App& app) {
  const std::vector<DType> floats{DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  std::vector<DType> cache_types = floats;
  cache_types.insert(cache_types.end(), {DType::kI8, DType::kF8E4M3});
  auto options = std::make_shared<RunOptions>();
  CLI::App* sub = app.add_subcommand("run", "Run one attention layer of a model on a .npy file");
  sub->add_option("--model", options->model, "Folder with config.json and safetensors")
      ->type_name("FOLDER")
      ->required();
  add_count(sub, "--layer", options->layer, 0, kMostTokens, "Index of the layer, from 0");
  sub->add_option("--input", options->input,
                  "Array [seq, embed] or [batch, seq, embed]; - is standard input")
      ->type_name("FILE.npy")
      ->required();
  sub->add_option("--output", options->output,
                  "Result, with the shape and dtype of the input; - is standard output")
      ->type_name("FILE.npy")
      ->required();
  auto* cached = sub->add_flag("--cached", options->cached,
                               "Use a KV cache, and feed --chunk tokens at a time");
  add_count(sub, "--chunk", options->chunk, 1, kMostTokens, "Tokens per call")->needs(cached);
  add_dtype(sub, "--dtype", floats, "Type of the layer [the input's]",
            [options](DType dtype) { options->dtype = dtype; });
  add_dtype(sub, "--cache-dtype", cache_types, "Type of the cache [the layer's]",
            [options](DType dtype) { options->cache_dtype = dtype; })
      ->needs(cached);
  auto* weights = sub->add_option("--weights", options->weights,
                                  "Draw the attention weights, one panel per head; an .html file "
                                  "is an interactive page")
                      ->type_name("FILE");
  sub->add_option("--tokens", options->tokens, "Labels of the tokens, a JSON array of strings")
      ->type_name("FILE.json")
      ->needs(weights);
  sub->add_option("--heads", options->heads, "Heads to draw, such as 0,3,5-7 [all]")
      ->type_name("LIST")
      ->needs(weights);
  add_count(sub, "--sequence", options->sequence, 0, kMostTokens, "Sequence of the batch to draw")
      ->needs(weights);
  add_ignored(sub, options->ignored_fields);
  add_machinery(sub, options->machinery);
  add_json(sub, options->json);
  return [options] { return run_layer(*options); };
}

Work convert(CLI::App& app) {
  auto options = std::make_shared<ConvertOptions>();
  CLI::App* sub = app.add_subcommand(
      "convert", "Convert a model's attention to MHA, GQA, MQA or MLA, and measure the loss");
  sub->add_option("--model", options->model, "Folder with config.json and safetensors")
      ->type_name("FOLDER")
      ->required();
  sub->add_option("--to", options->to, "Kind of attention: mha, gqa, mqa or mla")
      ->type_name("KIND")
      ->check(CLI::IsMember({"mha", "gqa", "mqa", "mla"}).description(""))
      ->required();
  sub->add_option("--output", options->output, "Folder to create")->type_name("FOLDER");
  add_count(sub, "--kv-heads", options->kv_heads, 1, kMostTokens, "gqa: number of KV heads");
  add_count(sub, "--kv-rank", options->kv_rank, 1, kMostTokens,
            "mla: rank of the latent [exact conversion]");
  sub->add_flag("--unequal-ranks", options->unequal,
                "mla: give layers different ranks, --kv-rank on average");
  const auto set_rope_dim = [options](std::int64_t dim) { options->rope_dim = dim; };
  sub->add_option_function<std::int64_t>("--rope-dim", set_rope_dim,
                                         "mla: dimensions with rope [all]")
      ->type_name("N");
  sub->add_option("--merge", options->merge, "gqa: how heads are merged: pca, mean or first")
      ->type_name("METHOD")
      ->check(CLI::IsMember({"pca", "mean", "first"}).description(""))
      ->capture_default_str();
  auto* inputs =
      sub->add_option(
             "--calibrate", options->calibrate,
             "Recorded inputs of the layers, layer_0.npy and so on [use the weights alone]")
          ->type_name("FOLDER");
  sub->add_flag("!--no-refit", options->refit, "Do not refit the output projections");
  sub->add_flag("--balance", options->balance, "Balance channels, so that int8 caches lose less");
  sub->add_option("--max-error", options->max_error, "Fail if the error of a layer is larger")
      ->type_name("ERROR")
      ->needs(inputs);
  sub->add_option("--sweep", options->sweep,
                  "Measure these numbers of KV heads, or ranks; writes no model")
      ->type_name("N,...")
      ->delimiter(',')
      ->needs(inputs);
  sub->add_option("--rope-dims", options->rope_dims, "mla: rope dimensions of a sweep")
      ->type_name("N,...")
      ->delimiter(',');
  add_plot(sub, options->plot);
  add_ignored(sub, options->ignored_fields);
  add_machinery(sub, options->machinery);
  add_json(sub, options->json);
  return [options] { return run_convert(*options); };
}

Work check(CLI::App& app) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* sub =
      app.add_subcommand("check", "Test every kernel that this machine can run (for bug reports)");
  add_machinery(sub, options->machinery, "all that can run");
  add_device(sub, options->machinery);
  sub->add_option("--seed", options->seed, "Seed of the random problems")
      ->type_name("N")
      ->capture_default_str();
  sub->add_option("--slack", options->slack, "Multiply the allowed errors by this")
      ->type_name("FACTOR")
      ->check(CLI::Validator(CLI::NonNegativeNumber).description(""))
      ->capture_default_str();
  add_json(sub, options->json);
  return [options] { return run_check(*options); };
}

Work bench(CLI::App& app) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* sub =
      app.add_subcommand("bench", "Measure attention relative to this machine's limits (minutes)");
  sub->add_flag("--quick", options->quick,
                "Measure with fewer repetitions, and the fastest kernels only (or --isa)");
  sub->add_option(
         "--filter", options->filter,
         "Run only cases whose \"KERNELS CASE\" contains TEXT, such as \"avx2 f32 forward\"")
      ->type_name("TEXT");
  sub->add_option_function<std::string>(
         "--peers",
         [options](const std::string& text) { options->peers = text.empty() ? "python3" : text; },
         "Also measure the PyTorch and ONNX Runtime of this Python [python3]")
      ->type_name("PYTHON")
      ->expected(0, 1);
  add_count(sub, "--peer-limit", options->peer_limit, 1, kMostSeconds,
            "Timeout in seconds for each measurement of a peer");
  CLI::Option* ranks =
      add_count(sub, "--ranks", options->ranks, 1, 64,
                "Measure context-parallel attention over N threads with emulated links instead");
  add_link(sub, options->link)->needs(ranks);
  add_plot(sub, options->plot);
  add_machinery(sub, options->machinery, "all that can run");
  add_device(sub, options->machinery);
  add_json(sub, options->json);
  return [options] { return run_bench(*options); };
}

/// CLI11's messages may have several lines; ours have one.
std::string one_line(std::string text) {
  for (char& letter : text) {
    if (letter == '\n') letter = ' ';
  }
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

std::vector<std::string> names_of_subcommands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands({})) names.push_back(sub->get_name());
  return names;
}

/// Everything that completions and the manual say.
std::vector<SubcommandDescription> described(const CLI::App& app) {
  std::vector<SubcommandDescription> all;
  for (const CLI::App* sub : app.get_subcommands({})) {
    SubcommandDescription& one = all.emplace_back();
    one.name = sub->get_name();
    one.help = sub->get_description();
    for (const CLI::Option* option : sub->get_options()) {
      if (option->get_lnames().empty()) continue;
      const std::string type = option->get_expected_max() == 0 ? "" : option->get_type_name();
      one.options.push_back({"--" + option->get_lnames().front(), type, full_description(*option),
                             type.empty() ? std::vector<std::string>() : choices(*option)});
    }
  }
  return all;
}

/// About the first of the words that the command does not know.
std::string unexpected(const CLI::App& app, const std::vector<std::string>& words) {
  const auto option = std::find_if(words.begin(), words.end(),
                                   [](const std::string& word) { return word.starts_with('-'); });
  if (option == words.end()) return "unexpected argument '" + words.front() + "'";
  const std::string given = option->substr(0, option->find('='));
  std::vector<std::string> names;
  for (const CLI::Option* known : app.get_options()) {
    for (const std::string& name : known->get_lnames()) names.push_back("--" + name);
  }
  return "no option '" + given + "'" + did_you_mean(given, names);
}

/// The subcommand that was given, or the app itself.
const CLI::App& chosen(const CLI::App& app) {
  const std::vector<CLI::App*> subcommands = app.get_subcommands();
  return subcommands.empty() ? app : *subcommands.front();
}

Work print_text(std::string text) {
  return [text = std::move(text)] {
    std::fputs(text.c_str(), stdout);
    return kExitGood;
  };
}

}  // namespace

std::function<int()> parse_command_line(int argc, const char* const* argv) {
  CLI::App app(kDescription, "ladon");
  app.footer(kFooter);
  app.set_version_flag("-V,--version", std::string("ladon ") + version());
  app.require_subcommand(0, 1);
  app.formatter(std::make_shared<HelpFormatter>());  // subcommands inherit it

  const std::vector<std::pair<std::string, Work>> works{
      {"compare", compare(app)}, {"plan", plan(app)},   {"run", run(app)},
      {"convert", convert(app)}, {"bench", bench(app)}, {"check", check(app)},
      {"info", info(app)}};

  const auto is_known = [&](const std::string& name) {
    return std::any_of(works.begin(), works.end(),
                       [&](const auto& work) { return work.first == name; });
  };
  // "ladon help plan" is "ladon plan --help".
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (!words.empty() && words.front() == "help") {
    words.front() = "--help";
    // Of what is not a subcommand with options, the general help tells.
    const bool general =
        words.size() < 2 || words[1] == "help" || words[1] == "completion" || words[1] == "manual";
    if (!general) std::swap(words[0], words[1]);
  }
  const std::string first = words.empty() ? "" : words.front();
  const std::size_t most = first == "completion" ? 2 : 1;
  if ((first == "completion" || first == "manual") && words.size() > most) {
    throw UsageError(first + ": unexpected argument '" + words[most] + "'");
  }
  if (first == "completion") {
    return print_text(completion_script(words.size() == 2 ? words[1] : "", described(app)));
  }
  if (first == "manual") return print_text(manual_page(kDescription, kFooter, described(app)));
  if (!first.empty() && first[0] != '-' && !is_known(first)) {
    const std::vector<std::string> names = names_of_subcommands(app);
    std::vector<std::string> meant = names;
    meant.insert(meant.end(), {"help", "completion", "manual"});
    throw UsageError("no subcommand '" + first + "'" + did_you_mean(first, meant) + "; there are " +
                     joined(names));
  }
  try {
    std::reverse(words.begin(), words.end());  // as CLI11 wants them
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    const CLI::App& asked = chosen(app);
    return print_text(&asked == &app ? app.help() : asked.help("ladon"));
  } catch (const CLI::CallForVersion& version_text) {
    return print_text(std::string(version_text.what()) + "\n");
  } catch (const CLI::ParseError& error) {
    const std::string name = chosen(app).get_name();
    const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
    throw UsageError((name == "ladon" ? "" : name + ": ") +
                     (unknown.empty() ? one_line(error.what()) : unexpected(chosen(app), unknown)) +
                     "; see ladon " + (name == "ladon" ? "" : name + " ") + "--help");
  } catch (const UsageError& error) {
    throw UsageError(chosen(app).get_name() + ": " + error.what());
  }
  for (const auto& [name, work] : works) {
    if (app.got_subcommand(name)) return work;
  }
  throw UsageError("no subcommand; there are " + joined(names_of_subcommands(app)) +
                   "; see ladon --help");
}

}  // namespace ladon::cli
