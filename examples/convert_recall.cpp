// Trains a small model, converts its attention to smaller caches, and shows what is left of its
// accuracy: for each method without training, and after a few steps of it (healing).
//
// Exits with 0 where mean pooling with half of the cache keeps less than 80 % of the answers, and
// in short sequences (up to 6 pairs) principal components keep 99 % with that half and MLA with a
// quarter. Longer ones need more without healing: MLA must keep 99 % with half of the cache, and
// principal components twice what mean pooling does.
//
//   convert_recall [--pairs N] [--steps N] [--heal N] [--seed S] [--sequential] [--plot FILE.svg]
//
// With --sequential the second layer is calibrated on what it sees behind the converted first one.
#include <ladon/ladon.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recall_model.h"

namespace {

using ladon::Tensor;
using recall::Model;
using recall::Score;
using recall::Task;
using Layer = std::unique_ptr<ladon::AttentionLayer>;

constexpr std::int64_t kNumHeads = 4;
constexpr int kCalibrationBatches = 4;
constexpr int kTestBatches = 16;

struct Settings {
  std::int64_t pairs = 24;  // 72 positions
  std::int64_t steps = 2500;
  std::int64_t heal = 30;
  std::uint64_t seed = 1;
  bool sequential = false;  // the second layer is calibrated behind the converted first one
  std::string plot{};
};

// ---- training and testing -----------------------------------------------------------------------

void train(const ladon::Context& context, const Task& task, Model& model, ladon::Random& random,
           std::int64_t steps, double rate, bool report) {
  const std::vector<ladon::Parameter*> parameters = model.parameters();
  for (ladon::Parameter* parameter : parameters) parameter->make_gradient(context);
  ladon::AdamW optimiser(context, parameters, {.learning_rate = rate, .beta2 = 0.98});
  for (std::int64_t step = 0; step < steps; ++step) {
    for (ladon::Parameter* parameter : parameters) parameter->zero_gradient(context);
    const Score score = model.train(context, recall::make_batch(task, random));
    ladon::clip_gradients(context, parameters, 1);
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    const double warm = std::min(1.0, static_cast<double>(step + 1) / 20);
    optimiser.set_learning_rate(rate * warm * (1 - 0.9 * done));
    optimiser.step(context);
    if (report && step % 100 == 0) {
      std::printf("  step %4lld  loss %.4f\n", static_cast<long long>(step), score.loss);
      std::fflush(stdout);
    }
  }
}

Score test(const ladon::Context& context, const Task& task, const Model& model,
           std::uint64_t seed) {
  ladon::Random random(seed, 300);
  Score mean;
  for (int i = 0; i < kTestBatches; ++i) {
    const Score score = model.test(context, recall::make_batch(task, random));
    mean.loss += score.loss / kTestBatches;
    mean.accuracy += score.accuracy / kTestBatches;
  }
  return mean;
}

// ---- conversions --------------------------------------------------------------------------------

/// What a method makes of a layer, given inputs of it.
struct Method {
  std::string name;
  std::int64_t cache;  // elements of a token
  std::string curve;   // in the plot; empty: not drawn
  bool refit = false;
  std::function<Layer(const ladon::MultiHeadAttention&, const ladon::Calibration&)> convert;
};

Method gqa(const ladon::Context& context, const std::string& name, std::int64_t kv_heads,
           const std::string& curve, const ladon::GqaConversion& how, bool calibrated, bool refit) {
  ladon::GqaConversion conversion = how;
  conversion.num_kv_heads = kv_heads;
  return {name, 2 * kv_heads * recall::kWidth / kNumHeads, curve, refit,
          [&context, conversion, calibrated](const ladon::MultiHeadAttention& layer,
                                             const ladon::Calibration& calibration) {
            auto made =
                ladon::to_gqa(context, layer, conversion, calibrated ? &calibration : nullptr);
            return Layer(std::make_unique<ladon::MultiHeadAttention>(std::move(made.layer)));
          }};
}

Method mla(const ladon::Context& context, std::int64_t rank, std::int64_t rope,
           ladon::RopeChoice choice, bool refit) {
  const bool chosen = choice == ladon::RopeChoice::kScoreError;
  return {"MLA " + std::to_string(rank) + "+" + std::to_string(rope) +
              (chosen ? ", pairs chosen, refit" : ", each frequency"),
          rank + rope, chosen ? "MLA" : "", refit,
          [&context, rank, rope, choice](const ladon::MultiHeadAttention& layer,
                                         const ladon::Calibration& calibration) {
            auto made =
                ladon::to_mla(context, layer, {.kv_rank = rank, .rope_dim = rope, .choice = choice},
                              &calibration);
            return Layer(std::make_unique<ladon::LatentAttention>(std::move(made.layer)));
          }};
}

std::vector<Method> methods(const ladon::Context& context) {
  using ladon::HeadGrouping;
  using ladon::HeadMerge;
  using ladon::RopeChoice;
  const ladon::GqaConversion mean{.merge = HeadMerge::kMean,
                                  .grouping = HeadGrouping::kConsecutive};
  const ladon::GqaConversion plain{.grouping = HeadGrouping::kConsecutive};
  std::vector<Method> all;
  for (const std::int64_t heads : {2, 1}) {
    const std::string kind = heads == 1 ? "MQA" : "GQA " + std::to_string(heads);
    all.push_back(gqa(context, kind + ", mean pooling", heads, "mean pooling", mean, true, false));
    all.push_back(gqa(context, kind + ", PCA, weights alone", heads, "", plain, false, false));
    all.push_back(gqa(context, kind + ", PCA, calibrated", heads, "", plain, true, false));
    all.push_back(
        gqa(context, kind + ", PCA, best groups, refit", heads, "GQA by PCA", {}, true, true));
  }
  for (const auto& [rank, rope] : {std::pair{48, 16}, {24, 8}, {16, 8}}) {
    all.push_back(mla(context, rank, rope, RopeChoice::kEachFrequency, false));
    all.push_back(mla(context, rank, rope, RopeChoice::kScoreError, true));
  }
  return all;
}

/// The inputs of a layer in some batches that training and testing do not use.
std::vector<Tensor> inputs_of(const ladon::Context& context, const Task& task, const Model& model,
                              std::size_t layer, std::uint64_t seed) {
  ladon::Random random(seed, 400);
  std::vector<Tensor> inputs;
  inputs.reserve(kCalibrationBatches);
  for (int i = 0; i < kCalibrationBatches; ++i) {
    inputs.push_back(model.layer_input(context, recall::make_batch(task, random), layer));
  }
  return inputs;
}

struct Result {
  std::string name, curve;
  std::int64_t cache = 0;
  double errors[2] = {};    // of the layers
  Score before{}, after{};  // healing
};

Result run(const ladon::Context& context, const Task& task, const Model& model,
           const Method& method, const Settings& settings) {
  Result result{.name = method.name, .curve = method.curve, .cache = method.cache};
  const auto source = [&](std::size_t n) -> const ladon::MultiHeadAttention& {
    return dynamic_cast<const ladon::MultiHeadAttention&>(model.layer(n));
  };
  std::vector<Layer> copies;
  for (std::size_t n = 0; n < 2; ++n) {
    copies.push_back(std::make_unique<ladon::MultiHeadAttention>(source(n)));
  }
  Model converted(model, std::move(copies));
  for (std::size_t n = 0; n < 2; ++n) {
    const ladon::MultiHeadAttention& layer = source(n);
    const std::vector<Tensor> inputs =
        inputs_of(context, task, settings.sequential ? converted : model, n, settings.seed);
    ladon::Calibration calibration(recall::kWidth);
    for (const Tensor& x : inputs) calibration.add(context, x);
    Layer smaller = method.convert(layer, calibration);
    if (method.refit) {
      ladon::OutputFit fit(layer, *smaller);
      for (const Tensor& x : inputs) fit.add(context, x);
      fit.apply(context, *smaller);
    }
    const std::vector<Tensor> held_out = inputs_of(context, task, model, n, settings.seed + 1000);
    result.errors[n] =
        ladon::compare_layers(context, layer, *smaller, held_out.front()).output_error;
    converted.set_layer(n, std::move(smaller));
  }
  result.before = test(context, task, converted, settings.seed);
  result.after = result.before;
  if (settings.heal > 0) {
    ladon::Random random(settings.seed, 500);
    train(context, task, converted, random, settings.heal, 5e-4, false);
    result.after = test(context, task, converted, settings.seed);
  }
  return result;
}

// ---- the plot -----------------------------------------------------------------------------------

/// Accuracy over cache, a line for each method.
std::string draw(const std::vector<Result>& results, std::int64_t full_cache) {
  const char* const colors[] = {"#1f6fb4", "#d95f0e", "#2c8c4a"};
  const auto x_of = [&](std::int64_t cache) {
    return 60 + 420 * static_cast<double>(cache) / static_cast<double>(full_cache);
  };
  const auto y_of = [](double accuracy) { return 50 + 250 * (1 - accuracy); };
  std::map<std::string, std::string> curves;
  for (const Result& result : results) {
    if (result.curve.empty()) continue;
    const std::string at =
        std::to_string(x_of(result.cache)) + "," + std::to_string(y_of(result.before.accuracy));
    curves[result.curve] += at + " ";
  }
  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"640\" height=\"360\" "
      "font-family=\"sans-serif\" font-size=\"12\"><rect width=\"640\" height=\"360\" "
      "fill=\"white\"/><text x=\"60\" y=\"30\" font-size=\"15\">Accuracy over cache, without "
      "training</text><rect x=\"60\" y=\"50\" width=\"420\" height=\"250\" fill=\"none\" "
      "stroke=\"grey\"/><text x=\"20\" y=\"54\">100 %</text><text x=\"30\" y=\"304\">0 %</text>"
      "<text x=\"230\" y=\"340\">elements of a token in the cache</text>";
  for (const std::int64_t cache : {full_cache / 4, full_cache / 2, full_cache}) {
    svg += "<text x=\"" + std::to_string(x_of(cache) - 8) + "\" y=\"318\">" +
           std::to_string(cache) + "</text>";
  }
  int n = 0;
  for (const auto& [name, list] : curves) {
    const std::string color = colors[n % 3];
    svg.append("<polyline fill=\"none\" stroke-width=\"2\" stroke=\"").append(color);
    svg.append("\" points=\"").append(list).append("\"/><text x=\"492\" y=\"");
    svg.append(std::to_string(70 + 20 * n)).append("\" fill=\"").append(color).append("\">");
    svg.append(name).append("</text>");
    ++n;
  }
  return svg + "</svg>\n";
}

// ---- the program --------------------------------------------------------------------------------

Settings parse(std::span<char* const> arguments) {
  Settings settings;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string name = arguments[i];
    if (name == "--sequential") {
      settings.sequential = true;
      continue;
    }
    if (++i == arguments.size()) throw std::invalid_argument("got " + name + " without a value");
    const std::string_view value = arguments[i];
    const auto number = [&](auto& to, std::int64_t least) {
      std::int64_t read = 0;
      const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), read);
      if (code != std::errc() || end != value.data() + value.size() || read < least) {
        throw std::invalid_argument(name + ": got " + arguments[i] + ", expected " +
                                    std::to_string(least) + " or more");
      }
      to = static_cast<std::remove_reference_t<decltype(to)>>(read);
    };
    if (name == "--pairs") {
      number(settings.pairs, 1);
    } else if (name == "--steps") {
      number(settings.steps, 1);
    } else if (name == "--heal") {
      number(settings.heal, 0);
    } else if (name == "--seed") {
      number(settings.seed, 1);
    } else if (name == "--plot") {
      settings.plot = value;
    } else {
      throw std::invalid_argument("got " + name +
                                  ", expected --pairs, --steps, --heal, --seed, --sequential or "
                                  "--plot");
    }
  }
  return settings;
}

bool run(std::span<char* const> arguments) {
  const Settings settings = parse(arguments);
  const ladon::Context context;
  // As many keys again as a sequence has, so that which are there is not known.
  const Task task{.num_keys = std::max<std::int64_t>(16, 4 * settings.pairs / 3),
                  .num_values = std::max<std::int64_t>(16, 4 * settings.pairs / 3),
                  .pairs = settings.pairs};
  Model model(context, task,
              {.embed_dim = recall::kWidth,
               .num_heads = kNumHeads,
               .causal = true,
               .rope = ladon::RopeOptions{}},
              settings.seed);
  std::printf("Training MHA on %lld positions, %lld steps\n", static_cast<long long>(task.length()),
              static_cast<long long>(settings.steps));
  ladon::Random random(settings.seed, 200);
  train(context, task, model, random, settings.steps, 3e-3, true);
  const Score whole = test(context, task, model, settings.seed);
  const std::int64_t full = ladon::cache_elements(model.layer(0));
  std::printf("%-34s cache %3lld  loss %.4f  accuracy %.2f %%\n", "MHA",
              static_cast<long long>(full), whole.loss, 100 * whole.accuracy);

  std::vector<Result> results;
  for (const Method& method : methods(context)) {
    const Result result = run(context, task, model, method, settings);
    std::printf("%-34s cache %3lld  layer errors %.3f %.3f  loss %.4f  accuracy %6.2f %%",
                result.name.c_str(), static_cast<long long>(result.cache), result.errors[0],
                result.errors[1], result.before.loss, 100 * result.before.accuracy);
    if (settings.heal > 0) {
      std::printf("  healed %6.2f %%", 100 * result.after.accuracy);
    }
    std::printf("\n");
    std::fflush(stdout);
    results.push_back(result);
  }
  if (!settings.plot.empty()) {
    std::ofstream file(settings.plot);
    file << draw(results, full);
    file.close();
    if (!file) throw std::runtime_error("cannot write " + settings.plot);
  }
  const auto accuracy = [&](std::string_view name) {
    const auto found = std::find_if(results.begin(), results.end(),
                                    [&](const Result& result) { return result.name == name; });
    return found->before.accuracy;
  };
  const double mean = accuracy("GQA 2, mean pooling");
  const double pca = accuracy("GQA 2, PCA, best groups, refit");
  const bool short_sequences = settings.pairs <= 6;
  const double latent = accuracy(short_sequences ? "MLA 24+8, pairs chosen, refit"
                                                 : "MLA 48+16, pairs chosen, refit");
  return mean < 0.8 && latent >= 0.99 && (short_sequences ? pca >= 0.99 : pca > 2 * mean);
}

}  // namespace

int main(int argc, char** argv) { return recall::run_program("convert_recall", argc, argv, run); }
