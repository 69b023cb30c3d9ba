// Uses an installed Ladon over NCCL: it is compiled and linked; running it takes a GPU.
#include <ladon/ladon.h>
#include <ladon/nccl.h>

int main() {
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  if (ncclCommInitAll(&comm, 1, nullptr) != ncclSuccess) return 1;
  if (cudaStreamCreate(&stream) != cudaSuccess) return 1;
  {
    ladon::NcclCommunicator communicator(comm, stream);
    ladon::barrier(communicator);
  }
  cudaStreamDestroy(stream);
  ncclCommDestroy(comm);
  return 0;
}
