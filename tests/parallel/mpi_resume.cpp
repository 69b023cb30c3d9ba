// Training over MPI that is killed and taken up again. "kill FILE": trains, saves, and one rank is
// killed in the middle of a later step. "resume FILE": another job goes on from the file, and
// compares its weights with those of a run without a break, those that all ranks have between
// ranks, and its loss with that of one process.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string_view>
#include <vector>

#include "ladon/ladon.h"
#include "ladon/mpi.h"

namespace {

constexpr int kSaved = 40;   // steps when it saves
constexpr int kKilled = 60;  // step in which it is killed
constexpr int kSteps = 100;

ladon::MultiHeadAttentionOptions options() {
  return {.embed_dim = 20, .num_heads = 8, .num_kv_heads = 1, .head_dim = 4, .causal = true};
}

bool same_bits(const ladon::ConstTensorView& a, const ladon::ConstTensorView& b) {
  const auto bytes = static_cast<std::size_t>(a.num_elements()) * sizeof(float);
  return std::memcmp(a.data(), b.data(), bytes) == 0;
}

/// One step towards outputs of 0, with clip(norm) between gradients and optimiser. Returns the sum
/// of squares before it.
template <class Layer, class Clip>
double step_of(const ladon::Context& context, Layer& layer, ladon::AdamW& optimiser,
               const Clip& clip, bool dies = false) {
  ladon::Tensor x(ladon::DType::kF32, {1, 7, 20});
  ladon::fill_normal(context, x, 0, 1, 2);
  layer.zero_grad(context);
  const auto forward = layer.forward_training(context, {.query = x});
  if (dies) std::raise(SIGKILL);
  layer.backward(context, forward.out, forward.saved);
  clip(1);
  optimiser.step(context);
  double loss = 0;
  for (std::int64_t i = 0; i < forward.out.num_elements(); ++i) {
    const auto y = static_cast<double>(forward.out.template data_as<float>()[i]);
    loss += y * y;
  }
  return loss;
}

constexpr double kLearningRate = 0.0003;  // stays away from the minimum, where roundings decide

class Training {
 public:
  explicit Training(ladon::MpiCommunicator& ranks)
      : layer_(ranks, options()),
        optimiser_(context_, layer_.parameters(), {.learning_rate = kLearningRate}) {
    layer_.set_whole_parameters(context_, ladon::MultiHeadAttention(options(), 1));
  }

  void save(const char* path) { ladon::save_training(context_, path, layer_, optimiser_); }
  void load(const char* path) { ladon::load_training(context_, path, layer_, optimiser_); }
  double step(bool dies = false) {
    return step_of(
        context_, layer_, optimiser_, [&](double norm) { layer_.clip_gradients(context_, norm); },
        dies);
  }
  bool same_weights(const Training& other) const {
    for (const ladon::Parameter& parameter : layer_.named_parameters()) {
      if (!same_bits(parameter.value, other.layer_.parameter(parameter.name).value)) return false;
    }
    return true;
  }
  /// The weights that every rank has are the same on each.
  bool replicas_are_equal() const {
    for (const char* name : {"k_proj.weight", "v_proj.weight"}) {
      const ladon::Tensor& own = layer_.parameter(name).value;
      const int ranks = layer_.communicator().size();
      ladon::Tensor all(own.dtype(), {ranks, own.size(0), own.size(1)});
      ladon::all_gather(context_, layer_.communicator(), own, all);
      for (int rank = 0; rank < ranks; ++rank) {
        if (!same_bits(all.view().select(0, rank), own)) return false;
      }
    }
    return true;
  }

 private:
  ladon::Context context_{ladon::ContextOptions{.num_threads = 1}};
  ladon::TensorParallelAttention layer_;
  ladon::AdamW optimiser_;
};

/// The largest relative difference from the losses of one process.
double difference(const std::vector<double>& losses) {
  const ladon::Context context(ladon::ContextOptions{.num_threads = 1});
  ladon::MultiHeadAttention layer(options(), 1);
  ladon::AdamW optimiser(context, layer.parameters(), {.learning_rate = kLearningRate});
  double largest = 0;
  for (const double loss : losses) {
    const double alone = step_of(context, layer, optimiser, [&](double norm) {
      ladon::clip_gradients(context, layer.parameters(), norm);
    });
    largest = std::max(largest, std::abs(loss / alone - 1));
  }
  return largest;
}

int run(std::string_view part, const char* path) {
  ladon::MpiCommunicator ranks(MPI_COMM_WORLD);
  Training training(ranks);
  if (part == "kill") {
    for (int step = 0; step < kSteps; ++step) {
      if (step == kSaved) training.save(path);
      training.step(step == kKilled && ranks.rank() == 1);
    }
    std::puts("nothing was killed");
    return 1;
  }
  Training unbroken(ranks);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) losses.push_back(unbroken.step());
  training.load(path);
  const bool differed = !training.same_weights(unbroken);
  bool same_losses = true;
  for (int step = kSaved; step < kSteps; ++step) {
    same_losses = same_losses && training.step() == losses[static_cast<std::size_t>(step)];
  }
  const bool good = differed && same_losses && training.same_weights(unbroken);
  const bool replicas = training.replicas_are_equal();
  const double off = difference(losses);
  const bool follows = off < 1e-4 && losses.back() < losses.front();
  std::printf("rank %d: %s, %s, %s: loss %.6f to %.6f, at most %.1e off one process's\n",
              ranks.rank(), good ? "as without a break" : "other weights",
              replicas ? "replicas equal" : "replicas differ",
              follows ? "losses follow" : "losses differ", losses.front(), losses.back(), off);
  return good && replicas && follows ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  int status = 1;
  try {
    status = run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
