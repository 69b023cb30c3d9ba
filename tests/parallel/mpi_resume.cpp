// Training over MPI that is killed and taken up again. "kill FILE": trains, saves, and one rank is
// killed in the middle of a later step. "resume FILE": another job goes on from the file, and
// compares its weights with those of a run without a break.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string_view>

#include "ladon/ladon.h"
#include "ladon/mpi.h"

namespace {

constexpr int kSaved = 4;   // steps when it saves
constexpr int kKilled = 6;  // step in which it is killed
constexpr int kSteps = 9;

class Training {
 public:
  explicit Training(ladon::MpiCommunicator& ranks)
      : context_(ladon::ContextOptions{.num_threads = 1}),
        layer_(ranks, options()),
        optimiser_(context_, layer_.parameters(), {.learning_rate = 0.01}),
        x_(ladon::DType::kF32, {1, 7, 20}) {
    layer_.set_whole_parameters(context_, ladon::MultiHeadAttention(options(), 1));
    ladon::fill_normal(context_, x_, 0, 1, 2);
  }

  void save(const char* path) { ladon::save_training(context_, path, layer_, optimiser_); }
  void load(const char* path) { ladon::load_training(context_, path, layer_, optimiser_); }
  void step(bool dies = false) {
    layer_.zero_grad(context_);
    const auto forward = layer_.forward_training(context_, {.query = x_});
    if (dies) std::raise(SIGKILL);
    layer_.backward(context_, forward.out, forward.saved);
    layer_.clip_gradients(context_, 1);
    optimiser_.step(context_);
  }
  bool same_weights(const Training& other) const {
    for (const ladon::Parameter& parameter : layer_.named_parameters()) {
      const ladon::Tensor& theirs = other.layer_.parameter(parameter.name).value;
      const auto bytes = static_cast<std::size_t>(parameter.num_elements()) * sizeof(float);
      if (std::memcmp(parameter.value.data(), theirs.data(), bytes) != 0) return false;
    }
    return true;
  }

 private:
  static ladon::MultiHeadAttentionOptions options() {
    return {.embed_dim = 20, .num_heads = 6, .num_kv_heads = 1, .head_dim = 4, .causal = true};
  }

  ladon::Context context_;
  ladon::TensorParallelAttention layer_;
  ladon::AdamW optimiser_;
  ladon::Tensor x_;
};

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
  for (int step = 0; step < kSteps; ++step) unbroken.step();
  training.load(path);
  const bool differed = !training.same_weights(unbroken);
  for (int step = kSaved; step < kSteps; ++step) training.step();
  const bool good = differed && training.same_weights(unbroken);
  std::printf("rank %d: %s\n", ranks.rank(), good ? "as without a break" : "other weights");
  return good ? 0 : 1;
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
