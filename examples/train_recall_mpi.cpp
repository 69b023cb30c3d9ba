// Trains the recall model (recall_model.h) over the processes of an MPI program: the heads of its
// two layers are shared by the ranks, and every rank has the embedding and the head.
//
// Every rank draws the same data from the same seed. Before, each trains the same model alone: the
// two loss curves must stay close, for any number of ranks. They are not equal to the bit, because
// gradients are summed over ranks in another order than over one process's heads.
//
// Exits with 0 where the curves are close and the loss falls below what a bag of words can reach
// (of a run of 300 steps or more; a shorter one must have made some progress).
//
//   mpirun -n 4 --bind-to none train_recall_mpi [steps]
#include <ladon/ladon.h>
#include <ladon/mpi.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "recall_model.h"

namespace {

constexpr recall::Task kTask{};
constexpr std::uint64_t kSeed = 1;
constexpr double kRate = 3e-3;
constexpr double kMaxNorm = 1;
// Between the losses of a step, which fall from 3.2 to 0.0; see docs/parallel.md for what was seen.
constexpr double kLargestDifference = 0.01;
const ladon::MultiHeadAttentionOptions kLayer{.embed_dim = recall::kWidth,
                                              .num_heads = 4,
                                              .num_kv_heads = 2,
                                              .causal = true,
                                              .rope = ladon::RopeOptions{}};

/// Scales all gradients so that their joint norm is at most kMaxNorm: a layer that ranks share
/// knows the norm of its whole gradient, and the rest is the same on every rank.
void clip(const ladon::Context& context, const std::vector<ladon::Parameter*>& replicated,
          const std::vector<ladon::TensorParallelLayer*>& layers) {
  constexpr double kNoLimit = 1e30;
  std::vector<double> norms{ladon::clip_gradients(context, replicated, kNoLimit)};
  for (ladon::TensorParallelLayer* layer : layers) {
    norms.push_back(layer->clip_gradients(context, kNoLimit));
  }
  double squares = 0;
  for (const double norm : norms) squares += norm * norm;
  const double scale = kMaxNorm / std::sqrt(squares);
  if (!(scale < 1)) return;
  ladon::clip_gradients(context, replicated, norms[0] * scale);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i]->clip_gradients(context, norms[i + 1] * scale);
  }
}

/// One loss for each step. `layers` are those of the model that ranks share: none in one process.
std::vector<double> train(const ladon::Context& context, recall::Model& model, std::size_t steps,
                          const std::vector<ladon::TensorParallelLayer*>& layers) {
  const std::vector<ladon::Parameter*> parameters = model.parameters();
  // The embedding and the head come first; without shared layers everything is in one process.
  const std::vector<ladon::Parameter*> replicated(
      parameters.begin(), layers.empty() ? parameters.end() : parameters.begin() + 2);
  ladon::AdamW optimiser(context, parameters, {.learning_rate = kRate, .beta2 = 0.98});
  ladon::Random random(kSeed, 200);
  std::vector<double> losses;
  for (std::size_t step = 0; step < steps; ++step) {
    for (ladon::Parameter* parameter : parameters) parameter->zero_gradient(context);
    losses.push_back(model.train(context, make_batch(kTask, random)).loss);
    clip(context, replicated, layers);
    const double warm = std::min(1.0, static_cast<double>(step + 1) / 20);
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    optimiser.set_learning_rate(kRate * warm * (1 - 0.9 * done));
    optimiser.step(context);
  }
  return losses;
}

bool run(ladon::Communicator& ranks, std::size_t steps) {
  const ladon::Context context(ladon::ContextOptions{.num_threads = 1});
  recall::Model whole(context, kTask, kLayer, kSeed);
  std::vector<std::unique_ptr<ladon::AttentionLayer>> layers;
  std::vector<ladon::TensorParallelLayer*> shared;
  for (std::size_t i = 0; i < 2; ++i) {
    auto layer = std::make_unique<ladon::TensorParallelAttention>(ranks, kLayer);
    layer->set_whole_parameters(context, whole.layer(i));  // this rank's slices
    shared.push_back(layer.get());
    layers.push_back(std::move(layer));
  }
  recall::Model model(whole, std::move(layers));

  const std::vector<double> alone = train(context, whole, steps, {});
  const std::vector<double> together = train(context, model, steps, shared);

  double largest = 0;
  for (std::size_t step = 0; step < steps; ++step) {
    const double difference = std::fabs(alone[step] - together[step]);
    if (!(difference <= largest)) largest = difference;  // NaN too
  }
  if (ranks.rank() == 0) {
    std::printf("loss   step   1 process   %d ranks\n", ranks.size());
    for (std::size_t step = 0; step < steps; ++step) {
      if (step % 50 != 0 && step + 1 != steps) continue;
      std::printf("  %9zu  %10.6f  %8.6f\n", step, alone[step], together[step]);
    }
    std::printf("largest difference of all steps: %.2g (bound %.2f); a bag of words: %.2f\n",
                largest, kLargestDifference, std::log(static_cast<double>(kTask.pairs)));
    std::printf("rank 0 has sent %.1f MB in %zu steps\n",
                static_cast<double>(ranks.statistics().bytes_sent) / 1e6, steps);
  }
  const double wanted = steps >= 300 ? std::log(static_cast<double>(kTask.pairs)) : 0.95 * alone[0];
  return largest < kLargestDifference && together.back() < wanted;
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  try {
    bool good = false;
    {
      ladon::MpiCommunicator ranks(MPI_COMM_WORLD);
      good = run(ranks, argc > 1 ? static_cast<std::size_t>(std::atoi(argv[1])) : 500);
      if (ranks.rank() == 0) std::puts(good ? "reached" : "NOT reached");
    }
    MPI_Finalize();
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_recall_mpi: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 2);  // the other ranks would wait in MPI_Finalize()
    return 2;
  }
}
