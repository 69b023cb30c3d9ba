// Trains a model of two attention layers on associative recall.
//
// recall_model.h has the task and the model. A bag of words cannot fall below ln(pairs).
// (With one layer alone, 2000 steps end at 1.80: a bag of words.)
//
// Exits with 0 where the stated loss is reached on fresh data.
//
//   train_recall [--kind mha|gqa|mqa] [--dtype f32|bf16] [--steps N] [--seed S]
//   train_recall --compare ...     trains in both dtypes from one seed; bf16 must stay close to f32
#include <ladon/ladon.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "recall_model.h"

namespace {

using recall::Model;
using recall::Score;

constexpr recall::Task kTask{};
constexpr std::int64_t kNumHeads = 4;
constexpr double kStatedLoss = 0.1;
// Between a step's f32 and bf16 losses, which fall from 3.2 to 0.00. Seen: 0.003 to 0.016.
constexpr double kLargestDifference = 0.05;
// Between their losses on fresh data, as a factor. Seen: below 1.02, but 1.7 without f32 masters.
constexpr double kLargestRatio = 1.2;
constexpr std::size_t kReportEvery = 50;  // steps

// ---- training -----------------------------------------------------------------------------------

struct Settings {
  std::string kind = "mha";
  ladon::DType dtype = ladon::DType::kF32;
  std::size_t steps = 500;
  std::uint64_t seed = 1;
  bool compare = false;
};

struct Result {
  std::vector<double> losses;  // one for each step
  Score fresh;                 // on data that training has not seen
};

std::int64_t kv_heads_of(const std::string& kind) {
  if (kind == "mha") return kNumHeads;
  if (kind == "gqa") return kNumHeads / 2;
  if (kind == "mqa") return 1;
  throw std::invalid_argument("--kind: got " + kind + ", expected mha, gqa or mqa");
}

Result train(const ladon::Context& context, const Settings& settings) {
  const auto start = std::chrono::steady_clock::now();
  Model model(context, kTask,
              {.embed_dim = recall::kWidth,
               .num_heads = kNumHeads,
               .num_kv_heads = kv_heads_of(settings.kind),
               .causal = true,
               .rope = ladon::RopeOptions{},
               .dtype = settings.dtype},
              settings.seed);
  const std::vector<ladon::Parameter*> parameters = model.parameters();
  constexpr double kRate = 3e-3;
  ladon::AdamW optimiser(context, parameters, {.learning_rate = kRate, .beta2 = 0.98});
  ladon::Random random(settings.seed, 200);
  std::printf("%s, %s layers, %zu steps\n", settings.kind.c_str(), ladon::name_of(settings.dtype),
              settings.steps);
  Result result;
  for (std::size_t step = 0; step < settings.steps; ++step) {
    for (ladon::Parameter* parameter : parameters) {
      parameter->zero_gradient(context);
    }
    const Score score = model.train(context, make_batch(kTask, random));
    ladon::clip_gradients(context, parameters, 1);
    // Up over the first steps, and slowly down to a tenth.
    const double done = static_cast<double>(step) / static_cast<double>(settings.steps);
    const double warm = std::min(1.0, static_cast<double>(step + 1) / 20);
    optimiser.set_learning_rate(kRate * warm * (1 - 0.9 * done));
    optimiser.step(context);
    result.losses.push_back(score.loss);
    if (step % kReportEvery == 0) std::printf("  step %4zu  loss %.4f\n", step, score.loss);
  }
  constexpr int kTests = 16;
  for (int i = 0; i < kTests; ++i) {
    const Score score = model.test(context, make_batch(kTask, random));
    result.fresh.loss += score.loss / kTests;
    result.fresh.accuracy += score.accuracy / kTests;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("  fresh data: loss %.4f, accuracy %.2f %%; %.1f s\n", result.fresh.loss,
              100 * result.fresh.accuracy, seconds.count());
  return result;
}

const char* const kUsage =
    "[--compare] [--kind mha|gqa|mqa] [--dtype f32|bf16] [--steps N] [--seed S]";

Settings parse(std::span<char* const> arguments) {
  Settings settings;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string name = arguments[i];
    if (name == "--compare") {
      settings.compare = true;
      continue;
    }
    if (++i == arguments.size())
      throw std::invalid_argument("got " + name + ", expected " + kUsage);
    const std::string_view value = arguments[i];
    const auto number = [&](auto& to) {
      const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), to);
      if (code != std::errc() || end != value.data() + value.size() || to == 0) {
        throw std::invalid_argument(name + ": got " + arguments[i] + ", expected 1 or more");
      }
    };
    if (name == "--kind") {
      settings.kind = value;
    } else if (name == "--dtype" && (value == "f32" || value == "bf16")) {
      settings.dtype = value == "f32" ? ladon::DType::kF32 : ladon::DType::kBF16;
    } else if (name == "--steps") {
      number(settings.steps);
    } else if (name == "--seed") {
      number(settings.seed);
    } else {
      throw std::invalid_argument("got " + name + " " + arguments[i] + ", expected " + kUsage);
    }
  }
  if (settings.compare && settings.dtype != ladon::DType::kF32) {
    throw std::invalid_argument("--compare: runs both dtypes, expected no --dtype with it");
  }
  return settings;
}

bool reached(const Result& result) { return result.fresh.loss < kStatedLoss; }

/// Trains in f32 and in bf16 from one seed and says whether bf16 stayed close to f32.
bool compare(const ladon::Context& context, Settings settings) {
  settings.dtype = ladon::DType::kF32;
  const Result f32 = train(context, settings);
  settings.dtype = ladon::DType::kBF16;
  const Result bf16 = train(context, settings);

  std::printf("loss   step       f32      bf16  difference\n");
  double largest = 0;
  for (std::size_t step = 0; step < f32.losses.size(); ++step) {
    const double difference = std::fabs(f32.losses[step] - bf16.losses[step]);
    // Written so that a NaN counts as a difference.
    if (!(difference <= largest)) largest = difference;
    if (step % kReportEvery != 0) continue;
    std::printf("  %9zu  %8.4f  %8.4f  %10.4f\n", step, f32.losses[step], bf16.losses[step],
                difference);
  }
  const double ratio = bf16.fresh.loss / f32.fresh.loss;
  std::printf("largest difference of all steps: %.4f (bound %.2f)\n", largest, kLargestDifference);
  std::printf("on fresh data: bf16 / f32 = %.3f (bound %.1f)\n", ratio, kLargestRatio);
  const bool near = largest < kLargestDifference && std::max(ratio, 1 / ratio) < kLargestRatio;
  return near && reached(f32) && reached(bf16);
}

bool run(std::span<char* const> arguments) {
  const Settings settings = parse(arguments);
  std::printf("Chance: a loss of ln %lld = %.2f. A bag of words: ln %lld = %.2f. Wanted: %.2f.\n",
              static_cast<long long>(kTask.num_values),
              std::log(static_cast<double>(kTask.num_values)), static_cast<long long>(kTask.pairs),
              std::log(static_cast<double>(kTask.pairs)), kStatedLoss);
  const ladon::Context context;
  return settings.compare ? compare(context, settings) : reached(train(context, settings));
}

}  // namespace

int main(int argc, char** argv) { return recall::run_program("train_recall", argc, argv, run); }
