// Communicator: one rank's end of a group of ranks that compute together, and the collectives above
// it.
//
// A rank is a process (ladon/mpi.h: a program's own MPI_Comm) or a thread of this one
// (make_thread_communicators()). Ladon starts neither. An engine moves bytes from rank to rank;
// everything else is built on that once, for all engines. Engines never sum floating-point numbers:
// their order would differ. Ladon sums, in the order of ranks.
//
// All ranks make the same calls in the same order. Every call first compares what the ranks are
// about to do, before data moves: where they disagree, or one of them refuses its arguments, every
// rank gets an Error that names the call, its number and the ranks concerned, and no result has
// been written on any of them. A rank that stops, dies or fails in the middle of a call ends the
// call on all ranks (kCommunication) within the deadline; the communicator is then broken, and
// later calls say so at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/tensor_view.h"

namespace ladon {

struct CommunicatorOptions {
  /// The longest wait for other ranks: for their arrival at a call, or for one step of it.
  std::chrono::milliseconds deadline{60'000};
};

/// What has gone through one end since reset_statistics().
struct CommunicatorStatistics {
  std::int64_t messages_sent = 0;
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  /// The messages by which ranks agree on a call; not in the numbers above.
  std::int64_t control_messages_sent = 0;
  std::int64_t control_bytes_sent = 0;
  /// For data, and for agreement, by seconds().
  double seconds_waited = 0;
  double control_seconds_waited = 0;
};

/// Bytes for another rank, and from one.
struct Send {
  int to = 0;
  std::span<const std::byte> data{};
};
struct Receive {
  int from = 0;
  std::span<std::byte> data{};
};

/// One rank's end. One thread at a time uses it. The lower half is for engines: messages between
/// two ranks arrive whole and in the order in which they were sent.
class LADON_API Communicator {
 public:
  explicit Communicator(const CommunicatorOptions& options = {});
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  const CommunicatorOptions& options() const noexcept { return options_; }
  const CommunicatorStatistics& statistics() const noexcept { return statistics_; }
  void reset_statistics() noexcept { statistics_ = {}; }
  /// This rank's clock: of an emulated network its own, else that of the machine.
  virtual double seconds() const;
  /// Why nothing goes through this end any more; empty while all is well.
  const std::string& broken() const noexcept { return broken_; }

  /// Ranks of the same color (0 or more) make a communicator, ordered by key and then
  /// by rank. Options stay the same. Every rank must call it.
  std::unique_ptr<Communicator> split(int color, int key);

 protected:
  /// Begins the messages of one step: at most one to and one from each rank. They have been
  /// completed when poll() returns true; only then does the next step begin. The memory must stay
  /// valid until then, and after an exception it may not be touched any more.
  virtual void start(std::span<const Send> sends, std::span<const Receive> receives) = 0;
  virtual bool poll() = 0;
  /// Called between two polls that returned false: lets others run, or waits for news.
  virtual void pause();
  /// The ranks that the step still waits for.
  virtual std::vector<int> silent_ranks() const = 0;
  /// Tells all other ranks, without waiting for them, that this one has failed; their poll() then
  /// throws Error with this text. Never throws.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// split(), when the ranks have agreed on it; `group` are the ranks of the new communicator.
  virtual std::unique_ptr<Communicator> make_group(std::span<const int> group, int color,
                                                   int key) = 0;

 private:
  friend class CollectiveCall;

  CommunicatorOptions options_;
  CommunicatorStatistics statistics_;
  std::uint64_t calls_ = 0;
  std::string broken_;
  std::atomic<bool> in_use_ = false;
};

/// Ends for `count` threads of this process: end i is rank i. For tests, and for one rank on each
/// NUMA node. Each may be destroyed at any time; the others then find it silent.
LADON_API std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int count, const CommunicatorOptions& options = {});

/// Returns when every rank has called it.
LADON_API void barrier(Communicator& communicator);

// Collectives over tensors of any dtype on the Context's device; `all` and `parts` have one entry
// for each rank in their first dimension, then the other tensor's dimensions. Outputs may not
// overlap inputs.

/// all[r] becomes rank r's part. Sends (size - 1) * bytes of part.
LADON_API void all_gather(const Context& context, Communicator& communicator,
                          const ConstTensorView& part, const TensorView& all);

/// received[r] becomes rank r's parts[this rank]. Sends (size - 1) / size * bytes of parts.
LADON_API void all_to_all(const Context& context, Communicator& communicator,
                          const ConstTensorView& parts, const TensorView& received);

/// sum becomes the sum over ranks, in their order, of their parts[this rank]: f32 or f64. Sends
/// (size - 1) / size * bytes of parts.
LADON_API void reduce_scatter(const Context& context, Communicator& communicator,
                              const ConstTensorView& parts, const TensorView& sum);

/// sum becomes the sum over ranks, in their order, of their terms: f32 or f64, the same bits on
/// every rank. Each rank sums a share of the elements, as even as their number allows: it sends
/// bytes of terms - share, then (size - 1) * share.
LADON_API void all_reduce(const Context& context, Communicator& communicator,
                          const ConstTensorView& terms, const TensorView& sum);

}  // namespace ladon
