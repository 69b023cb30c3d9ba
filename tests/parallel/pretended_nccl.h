// NCCL and the CUDA runtime as far as ladon/nccl.h uses them, pretended on the host: ranks are
// threads, a stream is a queue of work that cudaEventQuery() runs as far as it gets, and calls of a
// communicator stay in progress for a while, as those of NCCL do that do not block. Include it
// before any other header of theirs.
#pragma once

// The real ones may be linked as well.
#define cudaEventCreateWithFlags pretended_cudaEventCreateWithFlags
#define cudaEventDestroy pretended_cudaEventDestroy
#define cudaEventQuery pretended_cudaEventQuery
#define cudaEventRecord pretended_cudaEventRecord
#define cudaFree pretended_cudaFree
#define cudaFreeHost pretended_cudaFreeHost
#define cudaGetDevice pretended_cudaGetDevice
#define cudaGetErrorString pretended_cudaGetErrorString
#define cudaMalloc pretended_cudaMalloc
#define cudaMallocHost pretended_cudaMallocHost
#define cudaMemcpyAsync pretended_cudaMemcpyAsync
#define cudaSetDevice pretended_cudaSetDevice
#define cudaStreamSynchronize pretended_cudaStreamSynchronize
#define ncclCommAbort pretended_ncclCommAbort
#define ncclCommCount pretended_ncclCommCount
#define ncclCommCuDevice pretended_ncclCommCuDevice
#define ncclCommDestroy pretended_ncclCommDestroy
#define ncclCommGetAsyncError pretended_ncclCommGetAsyncError
#define ncclCommSplit pretended_ncclCommSplit
#define ncclCommUserRank pretended_ncclCommUserRank
#define ncclGetErrorString pretended_ncclGetErrorString
#define ncclGroupEnd pretended_ncclGroupEnd
#define ncclGroupStart pretended_ncclGroupStart
#define ncclRecv pretended_ncclRecv
#define ncclSend pretended_ncclSend

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

/// Work in order: a function returns false while it cannot go on.
struct CUstream_st {
  std::deque<std::function<bool()>> work;

  void run() {
    while (!work.empty() && work.front()()) work.pop_front();
  }
};

struct CUevent_st {
  CUstream_st* stream = nullptr;
  bool done = false;
};

namespace ladon::test {

/// What the ranks of a pretended communicator share.
struct NcclGroup {
  explicit NcclGroup(int count) : size(count) {}

  int size;
  std::mutex mutex;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> messages;  // from, to
  /// Splits by their number: color, key and rank of those that have come; the groups by color.
  struct Split {
    std::vector<std::pair<std::pair<int, int>, int>> ranks;
    std::map<int, std::shared_ptr<NcclGroup>> groups;
  };
  std::map<int, Split> splits;
};

}  // namespace ladon::test

struct ncclComm {
  std::shared_ptr<ladon::test::NcclGroup> group;
  int rank = 0;
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  int in_progress = 0;  // so many times ncclCommGetAsyncError() says so
  int splits = 0;
  int color = 0;
  ncclComm_t* split_into = nullptr;
};
