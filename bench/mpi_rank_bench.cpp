// The benchmark over ranks, for the processes of an MPI program:
//   mpirun -n 4 build/release/bench/mpi_rank_bench [tokens]
#include <ladon/mpi.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "rank_bench.h"

namespace {

int run(int argc, char** argv) {
  using namespace ladon;
  MpiCommunicator communicator(MPI_COMM_WORLD, {.deadline = std::chrono::minutes(10)});
  bench::RankBenchOptions options;
  if (argc > 1) options.tokens = std::atoll(argv[1]);
  if (options.tokens <= 0 || options.tokens % (2 * communicator.size()) != 0) {
    std::fprintf(stderr, "tokens: got %lld, expected a multiple of %d\n",
                 static_cast<long long>(options.tokens), 2 * communicator.size());
    return 2;
  }
  const Context context(ContextOptions{.num_threads = 1});
  bench::Link link;
  const auto rows = bench::bench_ranks(context, communicator, options, link);
  if (communicator.rank() == 0) {
    std::printf("%d ranks of one thread; measured link: %.1f us, %.2f GB/s\n%s",
                communicator.size(), 1e6 * link.latency, 1e-9 * link.bandwidth,
                bench::rank_table(rows).c_str());
  }
  for (const bench::RankRow& row : rows) {
    if (!row.fault.empty() || row.sent != row.expected) return 1;
  }
  return 0;
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
