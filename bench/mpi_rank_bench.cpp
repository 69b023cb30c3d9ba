// The benchmark over ranks, for the processes of an MPI program:
//   mpirun -n 4 build/release/bench/mpi_rank_bench [times the usual number of tokens]
#include <ladon/mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "rank_bench.h"

namespace {

int run(int argc, char** argv) {
  using namespace ladon;
  MpiCommunicator communicator(MPI_COMM_WORLD, {.deadline = std::chrono::minutes(10)});
  const bench::RankBenchOptions options{.tokens = bench::usual_tokens(communicator.size()) *
                                                  (argc > 1 ? std::max(1, std::atoi(argv[1])) : 1)};
  const Context context(ContextOptions{.num_threads = 1});
  bench::Link link;
  const auto rows = bench::bench_ranks(context, communicator, options, link);
  if (communicator.rank() == 0) {
    std::printf("%d ranks of one thread; measured link: %.1f us, %.2f GB/s\n%s",
                communicator.size(), 1e6 * link.latency, 1e-9 * link.bandwidth,
                bench::rank_table(rows).c_str());
  }
  return bench::all_right(rows) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  int status = 1;
  try {
    status = run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_rank_bench: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
