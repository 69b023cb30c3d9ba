// Uses an installed Ladon over MPI: it is compiled and linked, and run without mpirun as one rank.
#include <ladon/ladon.h>
#include <ladon/mpi.h>

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  int ranks = 0;
  {
    ladon::MpiCommunicator communicator(MPI_COMM_WORLD);
    ladon::barrier(communicator);
    ranks = communicator.size();
  }
  MPI_Finalize();
  return ranks == 1 ? 0 : 1;
}
