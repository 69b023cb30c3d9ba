// A rank that is stopped or killed in the middle of a call: mpi_faults PHASE SIGNAL under mpirun.
// The other ranks must say so within their deadline. And mpi_faults single: a program that has not
// asked MPI for threads.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>

#include "ladon/context_parallel.h"
#include "ladon/mpi.h"
#include "ladon/tensor_parallel.h"

namespace {

using namespace ladon;

/// One call of the phase, and then a second one with another Context.
void run_phase(const std::string& phase, Communicator& communicator, const Context& second) {
  const Context first(ContextOptions{.num_threads = 1});
  const int ranks = communicator.size();
  if (phase == "decode") {
    TensorParallelAttention layer(
        communicator, {.embed_dim = 16, .num_heads = ranks, .head_dim = 8, .causal = true});
    KvCache cache = KvCache::contiguous(first, layer.cache_options());
    layer.forward(first, Tensor(DType::kF32, {1, 1200, 16}), cache);
    const Tensor token(DType::kF32, {1, 1, 16});
    layer.forward(first, token, cache);
    layer.forward(second, token, cache);
    return;
  }
  constexpr std::int64_t kTokens = 96;
  const ContextPlan plan = plan_context(ranks, kTokens * ranks, kTokens * ranks);
  const Tensor q(DType::kF32, {1, kTokens, 4, 8});
  Tensor out(DType::kF32, q.shape());
  Tensor lse(DType::kF32, {1, 4, kTokens});
  Tensor dq(DType::kF32, q.shape());
  const auto attend = [&](const Context& context) {
    context_parallel_attention(context, communicator, q, q, q, {}, plan, out, lse);
  };
  attend(first);
  if (phase == "prefill") return attend(second);
  const auto backward = [&](const Context& context) {
    context_parallel_attention_backward(context, communicator, q, q, q, {}, plan,
                                        {.out = out, .lse = lse, .dout = out}, {.dk = dq});
  };
  backward(first);
  backward(second);
}

}  // namespace

int main(int argc, char** argv) {
  const bool single = std::string(argv[1]) == "single";  // below the level that Ladon needs
  int level = 0;
  MPI_Init_thread(&argc, &argv, single ? MPI_THREAD_SINGLE : MPI_THREAD_FUNNELED, &level);
  if (single) {
    try {
      const MpiCommunicator refused(MPI_COMM_WORLD);
    } catch (const Error& error) {
      std::printf("code %d: %s\n", static_cast<int>(error.code()), error.what());
    }
    MPI_Finalize();
    return 0;
  }
  MpiCommunicator communicator(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(2)});
  ContextOptions options{.num_threads = 1};
  if (communicator.rank() == 1) {
    const int signal = std::string(argv[2]) == "stop" ? SIGSTOP : SIGKILL;
    options.check_interrupt = [signal] { std::raise(signal); };
  }
  try {
    run_phase(argv[1], communicator, Context(options));
    std::printf("rank %d: nothing happened\n", communicator.rank());
  } catch (const Error& error) {
    std::printf("rank %d, code %d: %s\n", communicator.rank(), static_cast<int>(error.code()),
                error.what());
    std::fflush(stdout);
  }
  // The others report too; then the job ends, the stopped rank with it.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  MPI_Abort(MPI_COMM_WORLD, 3);
}
