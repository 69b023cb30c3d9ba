// MpiCommunicator: ranks are the processes of an MPI program, over its own MPI_Comm.
//
// This header is compiled by programs that use MPI; the library itself does not need it. In CMake
// link ladon::mpi, which exists where find_package(ladon) found an MPI. The program calls
// MPI_Init_thread() with at least MPI_THREAD_FUNNELED, and MPI_Finalize() after the last
// MpiCommunicator is gone.
//
// Messages go through memory of this object, so that after a failure MPI never touches memory that
// the caller has freed. MPI sums nothing, and is never aborted by Ladon. (MPICH reports errors of
// messages to the handler of MPI_COMM_WORLD, which aborts unless a program sets MPI_ERRORS_RETURN.)
#pragma once

// The removed C++ bindings would have to be linked.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

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

class MpiCommunicator final : public Communicator {
 public:
  /// Duplicates the program's communicator: a collective call of MPI, which waits for all of its
  /// ranks. Throws Error (kCommunication) where MPI is not ready.
  explicit MpiCommunicator(MPI_Comm program, const CommunicatorOptions& options = {})
      : Communicator(options) {
    check_ready();
    check(MPI_Comm_dup(program, &comm_), "MPI_Comm_dup");
    set_up();
  }

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // MPI may still use the memory of messages that were never completed: it is not freed.
    if (finalized != 0 || !broken().empty() || !requests_.empty()) {
      static_cast<void>(memory_.release());
      return;
    }
    MPI_Comm_free(&comm_);
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

 protected:
  void start(std::span<const Send> sends, std::span<const Receive> receives) override {
    memory_->incoming.clear();
    memory_->outgoing.clear();
    peers_.clear();
    receives_.assign(receives.begin(), receives.end());
    for (const Receive& receive : receives) {
      std::vector<std::byte>& buffer = memory_->incoming.emplace_back(receive.data.size());
      post(buffer, receive.from, [&](std::byte* data, int count, MPI_Request* request) {
        return MPI_Irecv(data, count, MPI_BYTE, receive.from, kDataTag, comm_, request);
      });
    }
    for (const Send& send : sends) {
      std::vector<std::byte>& buffer =
          memory_->outgoing.emplace_back(send.data.begin(), send.data.end());
      post(buffer, send.to, [&](std::byte* data, int count, MPI_Request* request) {
        return MPI_Isend(data, count, MPI_BYTE, send.to, kDataTag, comm_, request);
      });
    }
  }

  bool poll() override {
    check_failures();
    int done = 0;
    statuses_.resize(requests_.size());
    check(
        MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses_.data()),
        "MPI_Testall");
    if (done == 0) return false;
    requests_.clear();
    // Again, now that MPI has made progress: a rank that was stopped past the others' deadline
    // finds their messages here, and behind them that they have given up.
    check_failures();
    check_sizes();
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const std::vector<std::byte>& buffer = memory_->incoming[i];
      if (!buffer.empty()) std::memcpy(receives_[i].data.data(), buffer.data(), buffer.size());
    }
    receives_.clear();
    return true;
  }

  /// Ranks on one machine share its CPUs: a wait must not take one for itself.
  void pause() override {
    if (++pauses_ % 64 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else {
      std::this_thread::yield();
    }
  }

  std::vector<int> silent_ranks() const override {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      int done = 1;
      if (requests_[i] != MPI_REQUEST_NULL) {
        MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE);
      }
      if (done == 0) ranks.push_back(peers_[i]);
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  void abort(std::string_view reason) noexcept override {
    try {
      // Kept for good: it may never be received.
      auto* const text = new std::string(reason.substr(0, kMostReason));
      for (int other = 0; other < size_; ++other) {
        if (other == rank_) continue;
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_Isend(text->data(), static_cast<int>(text->size()), MPI_BYTE, other, kFailureTag, comm_,
                  &request);
        if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
      }
    } catch (...) {
      // Without memory for the reason the others wait until their deadline.
    }
  }

  std::unique_ptr<Communicator> make_group(std::span<const int> /*group*/, int color,
                                           int key) override {
    MPI_Comm made = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, key, &made), "MPI_Comm_split");
    return std::unique_ptr<Communicator>(new MpiCommunicator(Adopt{}, made, options()));
  }

 private:
  static constexpr int kDataTag = 1;
  static constexpr int kFailureTag = 2;
  static constexpr std::size_t kMostReason = 2000;
  // Counts are int: longer messages go in pieces.
  static constexpr std::size_t kPiece = std::size_t{1} << 30;

  struct Memory {
    std::vector<std::vector<std::byte>> incoming;
    std::vector<std::vector<std::byte>> outgoing;
  };
  struct Adopt {};

  MpiCommunicator(Adopt /*tag*/, MPI_Comm own, const CommunicatorOptions& options)
      : Communicator(options), comm_(own) {
    set_up();
  }

  [[noreturn]] static void refuse(const std::string& what) {
    throw Error(ErrorCode::kCommunication, "MpiCommunicator: " + what);
  }
  static void check(int code, const char* function) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(code, text, &length);
    refuse(std::string(function) + ": " + std::string(text, static_cast<std::size_t>(length)));
  }

  static void check_ready() {
    int initialized = 0;
    int finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (initialized == 0)
      refuse("MPI: got one that is not initialised, expected MPI_Init_thread()");
    if (finalized != 0) refuse("MPI: got one that is finalised");
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_FUNNELED) {
      refuse("MPI: got MPI_THREAD_SINGLE, expected MPI_THREAD_FUNNELED or more");
    }
    int is_main = 1;
    MPI_Is_thread_main(&is_main);
    if (level == MPI_THREAD_FUNNELED && is_main == 0) {
      refuse("MPI: got MPI_THREAD_FUNNELED on another thread than MPI's own");
    }
  }

  void set_up() {
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
  }

  template <class Begin>
  void post(std::vector<std::byte>& buffer, int peer, const Begin& begin) {
    for (std::size_t first = 0; first < buffer.size() || first == 0; first += kPiece) {
      const std::size_t count = std::min(kPiece, buffer.size() - first);
      MPI_Request request = MPI_REQUEST_NULL;
      check(begin(buffer.data() + first, static_cast<int>(count), &request), "MPI_Isend or Irecv");
      requests_.push_back(request);
      peers_.push_back(peer);
      expected_.resize(requests_.size());
      expected_.back() = static_cast<int>(count);
    }
  }

  /// Receives come first in requests_, in the order of the pieces.
  void check_sizes() const {
    std::size_t request = 0;
    for (const std::vector<std::byte>& buffer : memory_->incoming) {
      for (std::size_t first = 0; first < buffer.size() || first == 0; first += kPiece, ++request) {
        int count = 0;
        check(MPI_Get_count(&statuses_[request], MPI_BYTE, &count), "MPI_Get_count");
        if (count == expected_[request]) continue;
        refuse("got " + std::to_string(count) + " bytes from rank " +
               std::to_string(peers_[request]) + ", expected " +
               std::to_string(expected_[request]));
      }
    }
  }

  void check_failures() {
    int flag = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, kFailureTag, comm_, &flag, &status), "MPI_Iprobe");
    if (flag == 0) return;
    int count = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
    std::string reason(static_cast<std::size_t>(count), ' ');
    check(MPI_Recv(reason.data(), count, MPI_BYTE, status.MPI_SOURCE, kFailureTag, comm_,
                   MPI_STATUS_IGNORE),
          "MPI_Recv");
    throw Error(ErrorCode::kCommunication,
                "rank " + std::to_string(status.MPI_SOURCE) + " failed: " + reason);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();
  std::vector<Receive> receives_;
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;     // of requests_
  std::vector<int> expected_;  // bytes of requests_
  std::vector<MPI_Status> statuses_;
  unsigned pauses_ = 0;
};

}  // namespace ladon
