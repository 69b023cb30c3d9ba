#include "parallel/pretended_nccl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

using ladon::test::NcclGroup;

/// One message of a group call.
struct Operation {
  bool is_send = false;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  int peer = 0;
};

thread_local std::vector<Operation> group_calls;
thread_local ncclComm_t group_comm = nullptr;
thread_local cudaStream_t group_stream = nullptr;

ncclResult_t add(bool is_send, void* data, std::size_t bytes, int peer, ncclComm_t comm,
                 cudaStream_t stream) {
  if (peer < 0 || peer >= comm->group->size) return ncclInvalidArgument;
  group_calls.push_back({is_send, static_cast<std::byte*>(data), bytes, peer});
  group_comm = comm;
  group_stream = stream;
  return ncclSuccess;
}

/// Sends what is to be sent, once, and takes what has arrived; whether nothing is left.
bool exchange(NcclGroup& group, int rank, std::vector<Operation>& left) {
  const std::lock_guard lock(group.mutex);
  const auto done = [&](const Operation& call) {
    if (call.is_send) {
      group.messages[{rank, call.peer}].emplace_back(call.data, call.data + call.bytes);
      return true;
    }
    auto& queue = group.messages[{call.peer, rank}];
    if (queue.empty()) return false;
    std::memcpy(call.data, queue.front().data(), std::min(call.bytes, queue.front().size()));
    queue.pop_front();
    return true;
  };
  left.erase(std::remove_if(left.begin(), left.end(), done), left.end());
  return left.empty();
}

/// Makes the communicator of a split once all ranks have come.
bool finish_split(ncclComm& parent) {
  const std::lock_guard lock(parent.group->mutex);
  NcclGroup::Split& split = parent.group->splits[parent.splits];
  if (static_cast<int>(split.ranks.size()) < parent.group->size) return false;
  std::vector<std::pair<std::pair<int, int>, int>> members;
  for (const auto& entry : split.ranks) {
    if (entry.first.first == parent.color) members.push_back(entry);
  }
  std::sort(members.begin(), members.end());
  auto& group = split.groups[parent.color];
  if (group == nullptr) group = std::make_shared<NcclGroup>(static_cast<int>(members.size()));
  const auto own = std::find_if(members.begin(), members.end(),
                                [&](const auto& entry) { return entry.second == parent.rank; });
  *parent.split_into =
      new ncclComm{.group = group, .rank = static_cast<int>(own - members.begin())};
  (*parent.split_into)->in_progress = 2;
  parent.split_into = nullptr;
  return true;
}

/// What is allocated belongs to the pretended GPU, as with a real one: a communicator that failed
/// leaves there what copies may still use.
template <class T>
class Owned {
 public:
  T* add(T* object) {
    const std::lock_guard lock(mutex_);
    objects_.insert(object);
    return object;
  }
  T* remove(T* object) {
    const std::lock_guard lock(mutex_);
    objects_.erase(object);
    return object;
  }

 private:
  std::mutex mutex_;
  std::set<T*> objects_;
};
auto& memory_of_gpu = *new Owned<void>;
auto& events_of_gpu = *new Owned<CUevent_st>;

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int /*device*/) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*code*/) { return "pretended"; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = memory_of_gpu.add(std::malloc(bytes));
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFree(void* memory) {
  std::free(memory_of_gpu.remove(memory));
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  stream->work.emplace_back([=] {
    std::memcpy(to, from, bytes);
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = events_of_gpu.add(new CUevent_st);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete events_of_gpu.remove(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = stream;
  event->done = false;
  stream->work.emplace_back([event] { return event->done = true; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  event->stream->run();
  return event->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream->run();
  return cudaSuccess;
}

const char* ncclGetErrorString(ncclResult_t /*code*/) { return "pretended"; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->group->size;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t /*comm*/, int* device) {
  *device = 0;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  *comm->aborted = true;
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidArgument;
  const std::lock_guard lock(comm->group->mutex);
  comm->color = color;
  comm->split_into = made;
  comm->group->splits[++comm->splits].ranks.push_back({{color, key}, comm->rank});
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const bool busy = comm->in_progress > 0 && comm->in_progress-- > 0;
  *state =
      busy || (comm->split_into != nullptr && !finish_split(*comm)) ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* data, size_t bytes, ncclDataType_t /*type*/, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(true, const_cast<void*>(data), bytes, peer, comm, stream);
}
ncclResult_t ncclRecv(void* data, size_t bytes, ncclDataType_t /*type*/, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(false, data, bytes, peer, comm, stream);
}
ncclResult_t ncclGroupStart() {
  group_calls.clear();
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  group_comm->in_progress = 3;
  group_stream->work.emplace_back(
      [group = group_comm->group, rank = group_comm->rank, aborted = group_comm->aborted,
       left = group_calls]() mutable { return *aborted || exchange(*group, rank, left); });
  return ncclInProgress;
}
}
