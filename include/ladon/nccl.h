// NcclCommunicator: ranks are GPUs, over a program's own ncclComm_t and a CUDA stream.
//
// This header is compiled by programs that use NCCL (2.18 or newer); the library itself does not
// need it. In CMake link ladon::nccl, which exists where find_package(ladon) found NCCL. The
// program makes its communicator as NCCL describes: one ncclUniqueId, which a separate channel
// brings to all ranks, and ncclCommInitRank() with one GPU for each rank.
//
// Messages are staged in pinned memory and in memory of the GPU, and go by ncclSend() and
// ncclRecv() in one group for each step. NCCL sums nothing here: it would do so in an order of its
// own. NCCL can only move data, so a rank that fails cannot tell the others why: they end at their
// deadline, or by the error that NCCL reports.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ladon/communicator.h"
#include "ladon/error.h"

namespace ladon {

class NcclCommunicator : public Communicator {
 public:
  /// Splits a separate communicator off the program's, which then stays usable whatever happens
  /// here: a collective call of NCCL, which waits for all of its ranks. The stream belongs to the
  /// communicator's GPU and must outlive this object; messages run on it, in order with other work.
  NcclCommunicator(ncclComm_t program, cudaStream_t stream, const CommunicatorOptions& options = {})
      : Communicator(options), stream_(stream) {
    if (program == nullptr) refuse("comm: got none, expected an initialised ncclComm_t");
    int rank = 0;
    check(ncclCommUserRank(program, &rank), "ncclCommUserRank");
    set_up(split_off(program, 0, rank, options));
  }

  ~NcclCommunicator() override {
    // After a failure the GPU may still use the memory of messages: it is not freed.
    if (comm_ == nullptr || !broken().empty() || phase_ != Phase::kIdle) {
      if (comm_ != nullptr) ncclCommAbort(comm_);
      return;
    }
    const OnDevice guard(device_);
    ncclCommDestroy(comm_);
    cudaStreamSynchronize(stream_);
    memory_.free();
    cudaEventDestroy(arrived_);
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

 protected:
  void start(std::span<const Send> sends, std::span<const Receive> receives) override {
    const OnDevice guard(device_);
    const std::size_t outgoing = total_bytes(sends);
    incoming_ = total_bytes(receives);
    memory_.grow(outgoing + incoming_);
    receives_.assign(receives.begin(), receives.end());
    peers_.clear();
    if (outgoing + incoming_ == 0) {  // empty messages are not sent: both sides know their sizes
      phase_ = Phase::kDone;
      return;
    }
    // What arrives comes first in both memories, then what leaves.
    std::size_t first = incoming_;
    for (const Send& send : sends) {
      if (send.data.empty()) continue;
      std::memcpy(memory_.host + first, send.data.data(), send.data.size());
      first += padded(send.data.size());
    }
    if (outgoing > 0) {
      check(cudaMemcpyAsync(memory_.device + incoming_, memory_.host + incoming_, outgoing,
                            cudaMemcpyHostToDevice, stream_),
            "cudaMemcpyAsync");
    }
    phase_ = Phase::kLaunching;
    check(ncclGroupStart(), "ncclGroupStart");
    // The group is closed even where a call inside fails; the first failure is the one to report.
    ncclResult_t result = post(receives, 0, [&](std::byte* data, const Receive& receive) {
      return ncclRecv(data, receive.data.size(), ncclUint8, receive.from, comm_, stream_);
    });
    if (result == ncclSuccess) {
      result = post(sends, incoming_, [&](std::byte* data, const Send& send) {
        return ncclSend(data, send.data.size(), ncclUint8, send.to, comm_, stream_);
      });
    }
    const ncclResult_t end = ncclGroupEnd();
    check(result, "ncclSend or ncclRecv");
    check(end, "ncclGroupEnd");
  }

  bool poll() override {
    if (phase_ == Phase::kDone) phase_ = Phase::kIdle;
    if (phase_ == Phase::kIdle) return true;
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
    check(state, "the communicator");
    const OnDevice guard(device_);
    if (phase_ == Phase::kLaunching) {
      if (state == ncclInProgress) return false;
      if (incoming_ > 0) {
        check(cudaMemcpyAsync(memory_.host, memory_.device, incoming_, cudaMemcpyDeviceToHost,
                              stream_),
              "cudaMemcpyAsync");
      }
      check(cudaEventRecord(arrived_, stream_), "cudaEventRecord");
      phase_ = Phase::kRunning;
    }
    const cudaError_t code = cudaEventQuery(arrived_);
    if (code == cudaErrorNotReady) return false;
    check(code, "cudaEventQuery");
    std::size_t first = 0;
    for (const Receive& receive : receives_) {
      if (receive.data.empty()) continue;
      std::memcpy(receive.data.data(), memory_.host + first, receive.data.size());
      first += padded(receive.data.size());
    }
    phase_ = Phase::kIdle;
    return true;
  }

  void pause() override { std::this_thread::sleep_for(std::chrono::microseconds(10)); }

  /// NCCL does not tell which message of a group is late: all ranks of the step.
  std::vector<int> silent_ranks() const override {
    std::vector<int> ranks = peers_;
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  void abort(std::string_view /*reason*/) noexcept override {
    if (comm_ == nullptr) return;
    ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  std::unique_ptr<Communicator> make_group(std::span<const int> /*group*/, int color,
                                           int key) override {
    return std::unique_ptr<Communicator>(
        new NcclCommunicator(Adopt{}, split_off(comm_, color, key, options()), stream_, options()));
  }

 private:
  enum class Phase { kIdle, kDone, kLaunching, kRunning };

  struct Adopt {};

  /// Makes a GPU current, and the one from before again.
  class OnDevice {
   public:
    explicit OnDevice(int device) {
      cudaGetDevice(&before_);
      if (before_ != device) cudaSetDevice(device);
      device_ = device;
    }
    ~OnDevice() {
      if (before_ != device_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

   private:
    int before_ = 0;
    int device_ = 0;
  };

  /// The messages of one step, on both sides of the bus.
  struct Memory {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    std::size_t bytes = 0;

    void grow(std::size_t wanted) {
      if (wanted <= bytes) return;
      free();
      wanted = std::max(wanted, std::size_t{1} << 16);
      void* memory = nullptr;
      check(cudaMallocHost(&memory, wanted), "cudaMallocHost");
      host = static_cast<std::byte*>(memory);
      check(cudaMalloc(&memory, wanted), "cudaMalloc");
      device = static_cast<std::byte*>(memory);
      bytes = wanted;
    }
    void free() noexcept {
      cudaFreeHost(host);
      cudaFree(device);
      *this = {};
    }
  };

  NcclCommunicator(Adopt /*tag*/, ncclComm_t own, cudaStream_t stream,
                   const CommunicatorOptions& options)
      : Communicator(options), stream_(stream) {
    set_up(own);
  }

  void set_up(ncclComm_t own) {
    comm_ = own;
    check(ncclCommUserRank(comm_, &rank_), "ncclCommUserRank");
    check(ncclCommCount(comm_, &size_), "ncclCommCount");
    check(ncclCommCuDevice(comm_, &device_), "ncclCommCuDevice");
    const OnDevice guard(device_);
    check(cudaEventCreateWithFlags(&arrived_, cudaEventDisableTiming), "cudaEventCreate");
  }

  [[noreturn]] static void refuse(const std::string& what) {
    throw Error(ErrorCode::kCommunication, "NcclCommunicator: " + what);
  }
  static void check(ncclResult_t code, const char* function) {
    if (code == ncclSuccess || code == ncclInProgress) return;
    refuse(std::string(function) + ": " + ncclGetErrorString(code));
  }
  static void check(cudaError_t code, const char* function) {
    if (code == cudaSuccess) return;
    refuse(std::string(function) + ": " + cudaGetErrorString(code));
  }

  // Where a message begins: NCCL is fastest from boundaries of 16 bytes.
  static std::size_t padded(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

  template <class Message>
  static std::size_t total_bytes(std::span<const Message> messages) {
    std::size_t total = 0;
    for (const Message& message : messages) total += padded(message.data.size());
    return total;
  }

  static int peer_of(const Send& send) { return send.to; }
  static int peer_of(const Receive& receive) { return receive.from; }

  template <class Message, class Begin>
  ncclResult_t post(std::span<const Message> messages, std::size_t first, const Begin& begin) {
    for (const Message& message : messages) {
      if (message.data.empty()) continue;
      peers_.push_back(peer_of(message));
      const ncclResult_t result = begin(memory_.device + first, message);
      if (result != ncclSuccess && result != ncclInProgress) return result;
      first += padded(message.data.size());
    }
    return ncclSuccess;
  }

  /// Calls of the new communicator do not block: a connection to a rank that is gone ends at the
  /// deadline too.
  static ncclComm_t split_off(ncclComm_t parent, int color, int key,
                              const CommunicatorOptions& options) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    // A split that goes on after the deadline still writes here.
    auto made = std::make_unique<ncclComm_t>(nullptr);
    ncclResult_t state = ncclCommSplit(parent, color, key, made.get(), &config);
    const auto began = std::chrono::steady_clock::now();
    const auto in_progress = [&](ncclComm_t comm) {
      check(state, "ncclCommSplit");
      check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
      return state == ncclInProgress;
    };
    while (in_progress(parent) || *made == nullptr || in_progress(*made)) {
      if (std::chrono::steady_clock::now() - began > options.deadline) {
        static_cast<void>(made.release());
        refuse("ncclCommSplit: not all ranks came within the deadline");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    check(state, "ncclCommSplit");
    return *made;
  }

  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t arrived_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  int device_ = 0;
  Memory memory_;
  Phase phase_ = Phase::kIdle;
  std::size_t incoming_ = 0;
  std::vector<Receive> receives_;
  std::vector<int> peers_;  // of the step
};

}  // namespace ladon
