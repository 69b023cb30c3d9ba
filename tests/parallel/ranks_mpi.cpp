// The tests' main() under mpirun: every process runs all tests, and those meet in their
// collectives.
#include <gtest/gtest.h>

#include <cstdio>
#include <exception>
#include <string>
#include <thread>

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

namespace {

/// Where MPI is not ready, a communicator cannot be made; 0 if that is said.
int check_refusal(const std::string& expected) {
  const std::string message = ladon::test::error_of(
      [] { const ladon::MpiCommunicator made(MPI_COMM_WORLD); }, ladon::ErrorCode::kCommunication);
  if (message.find(expected) != std::string::npos) return 0;
  std::printf("got \"%s\", expected \"%s\"\n", message.c_str(), expected.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int failed = check_refusal("MPI: got one that is not initialised, expected MPI_Init_thread()");
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  if (level == MPI_THREAD_FUNNELED) {
    std::thread([&failed] {
      failed += check_refusal("MPI: got MPI_THREAD_FUNNELED on another thread than MPI's own");
    }).join();
  }
  // For MPICH, which reports errors of a message here and not to the handler of its communicator.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  failed += RUN_ALL_TESTS();
  MPI_Finalize();
  failed += check_refusal("MPI: got one that is finalised");
  return failed;
}
