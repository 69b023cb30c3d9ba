// One call that all ranks make together: they compare what they are about to do, work, and publish
// their results only when all of them have succeeded.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/parallel.h"
#include "ladon/communicator.h"
#include "ladon/error.h"

namespace ladon {

/// What a rank is about to do, as lines of "name: value". All ranks must have the same.
class CallSignature {
 public:
  void add(std::string_view name, std::string_view value);
  void add(std::string_view name, std::int64_t value);
  void add(std::string_view name, double value);
  void add(std::string_view name, std::span<const std::int64_t> values);
  void add(std::string_view name, std::span<const double> values);
  /// Its dtype and shape, or "none".
  void add(std::string_view name, const ConstTensorView& view);

  /// The text() of another one.
  void add_lines(std::string_view lines) { text_ += lines; }

  const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

class CollectiveCall {
 public:
  /// Throws Error where the communicator is broken or in use.
  CollectiveCall(Communicator& communicator, std::string_view operation);
  ~CollectiveCall();
  CollectiveCall(const CollectiveCall&) = delete;
  CollectiveCall& operator=(const CollectiveCall&) = delete;

  int rank() const noexcept { return communicator_.rank(); }
  int size() const noexcept { return communicator_.size(); }
  /// The other ranks, from the next one on: where all ranks send in this order, they do not all
  /// send to the same one at once.
  std::vector<int> others() const;

  /// Compares the ranks' signatures. `refusal` is why this rank does not take part, or null; it
  /// keeps its own Error. All other disagreement throws, the same on all ranks.
  void agree(const CallSignature& signature, const std::string* refusal);
  /// Returns when all ranks have come this far.
  void commit();
  /// This rank cannot go on after the ranks have agreed: ends the call on all ranks.
  void give_up(std::string_view reason) noexcept;

  // The messages of one step; begin(), then wait(). In between, engines that progress only while
  // they are polled do so between the tasks of this thread's loops.
  void begin(std::span<const Send> sends, std::span<const Receive> receives);
  void wait();
  void exchange(std::span<const Send> sends, std::span<const Receive> receives) {
    begin(sends, receives);
    wait();
  }

  /// split(): what only a Communicator can do.
  std::unique_ptr<Communicator> make_group(std::span<const int> group, int color, int key) {
    return communicator_.make_group(group, color, key);
  }

 private:
  struct Record;

  void begin_messages(std::span<const Send> sends, std::span<const Receive> receives,
                      bool is_control);
  void poll();
  void wait_for(double& seconds_waited);
  std::vector<Record> exchange_records(const Record& own);
  std::vector<std::string> exchange_texts(const std::vector<Record>& records,
                                          const std::string& own);
  [[noreturn]] void break_communicator(const std::string& what);
  std::string where() const;

  Communicator& communicator_;
  std::string operation_;
  bool in_step_ = false;
  const SideWork progress_{[this] { poll(); }};
};

/// Runs one call: check(CallSignature&) validates this rank's arguments and describes them, work(
/// CollectiveCall&) communicates and computes into its own memory, publish() writes the results.
template <class Check, class Work, class Publish>
void run_collective(Communicator& communicator, std::string_view operation, const Check& check,
                    const Work& work, const Publish& publish) {
  CollectiveCall call(communicator, operation);
  CallSignature signature;
  std::exception_ptr failure;
  std::string refusal;
  try {
    check(signature);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    refusal = error.what();
  }
  call.agree(signature, failure == nullptr ? nullptr : &refusal);
  if (failure != nullptr) std::rethrow_exception(failure);
  try {
    work(call);
  } catch (const std::exception& error) {
    call.give_up(error.what());
    throw;
  }
  call.commit();
  publish();
}

}  // namespace ladon
