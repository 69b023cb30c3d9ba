// The tests' main() under mpirun: every process runs all tests, and those meet in their
// collectives.
#include <gtest/gtest.h>

#include <cstdio>
#include <exception>

#include "ladon/mpi.h"
#include "parallel/ranks.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

}  // namespace

std::vector<int> rank_counts() { return {world_size()}; }

bool runs_here(int count, int rank) {
  int own = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &own);
  return count == world_size() && rank == own;
}

RankErrors run_ranks(int count, const std::function<void(Communicator&)>& work,
                     std::chrono::milliseconds deadline) {
  RankErrors errors(static_cast<std::size_t>(count));
  if (count != world_size()) return errors;
  MpiCommunicator communicator(MPI_COMM_WORLD, {.deadline = deadline});
  try {
    work(communicator);
  } catch (const std::exception& error) {
    errors[static_cast<std::size_t>(communicator.rank())] = error.what();
  }
  return errors;
}

}  // namespace ladon::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string before = ladon::test::error_of(
      [] { const ladon::MpiCommunicator early(MPI_COMM_WORLD); }, ladon::ErrorCode::kCommunication);
  if (before.find("not initialised") == std::string::npos) {
    std::puts("MPI that is not initialised was not refused");
    return 1;
  }
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  // For MPICH, which reports errors of a message here and not to the handler of its communicator.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
