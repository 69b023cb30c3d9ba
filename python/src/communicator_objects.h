// Communicators as Python holds them, and the engine whose messages Python objects carry.
//
// Calls run without the GIL, and an engine takes it for each of its functions: while a call waits
// for other ranks, other Python threads run. A call may hold locks of objects.h then; a thread that
// waits for one of these has given up the GIL first, so there is no deadlock.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "keywords.h"
#include "ladon/communicator.h"
#include "ladon/context_parallel.h"

namespace ladon::python {

/// What Python calls Communicator; layers and caches keep the end itself alive.
struct Ranks {
  std::shared_ptr<Communicator> end;
};

/// The end in the argument. Throws TypeError.
const std::shared_ptr<Communicator>& ranks_in(nb::handle argument, const Where& where);

/// The keyword `plan`: an object with the fields of ladon.distributed.ContextPlan.
ContextPlan to_plan(Keywords& keywords);

/// Ranks over an object with the methods of ladon._engines.Engine.
class PythonCommunicator final : public Communicator {
 public:
  /// With the GIL held.
  PythonCommunicator(nb::object engine, const CommunicatorOptions& options);
  ~PythonCommunicator() override;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  nb::handle engine() const { return engine_; }

 protected:
  void start(std::span<const Send> sends, std::span<const Receive> receives) override;
  bool poll() override;
  void pause() override;
  std::vector<int> silent_ranks() const override;
  void abort(std::string_view reason) noexcept override;
  std::unique_ptr<Communicator> make_group(std::span<const int> group, int color, int key) override;

 private:
  /// Calls work() with the GIL. What Python raises becomes an Error.
  template <class Work>
  auto with_engine(const Work& work) const;

  nb::object engine_;
  int rank_ = 0;
  int size_ = 1;
  mutable bool interrupted_ = false;  // by Ctrl-C
  std::string failed_pause_;
  // What the engine writes to, and where it goes then: after a failure the engine may still write.
  std::vector<std::pair<Receive, nb::object>> arriving_;
};

}  // namespace ladon::python
