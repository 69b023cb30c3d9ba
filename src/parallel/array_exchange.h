// Arrays between ranks, several parts of a computation in one message to each rank, and stages of
// work whose inputs and results are in flight while other stages are computed.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "parallel/collective_call.h"
#include "parallel/message_layout.h"

namespace ladon {

/// Some arrays for each rank, and some from each; none where a rank gets or sends nothing. What is
/// sent to a rank has the dtypes and shapes that it expects.
class ExchangePart {
 public:
  using Arrays = std::vector<MessageLayout::Array>;

  virtual ~ExchangePart() = default;
  virtual Arrays outgoing(int other) const = 0;
  virtual Arrays incoming(int other) const = 0;
  /// `arrays` are memory of the host, for outgoing() and with incoming(). Ranks are unpacked in
  /// their order.
  virtual void pack(int other, std::span<const TensorView> arrays) = 0;
  virtual void unpack(int other, std::span<const TensorView> arrays) = 0;
  /// All ranks have been unpacked.
  virtual void complete() {}
};

/// One step of messages.
class ArrayExchange {
 public:
  explicit ArrayExchange(CollectiveCall& call) : call_(call) {}

  /// The parts must stay until finish() returns.
  void begin(std::vector<ExchangePart*> parts);
  /// Waits for the messages, and unpacks them.
  void finish();

 private:
  template <class Body>
  void for_each_part(std::vector<Tensor>& messages, bool are_sent, const Body& body);

  CollectiveCall& call_;
  std::vector<ExchangePart*> parts_;
  std::vector<Tensor> outgoing_;  // one for each rank
  std::vector<Tensor> incoming_;
};

/// Runs make(0), make(1), ..., make(count - 1), one after the other. A stage has inputs() and
/// results(), which are ExchangeParts or null, and compute(). While one is computed, the inputs of
/// the next and the results of the one before are in flight.
template <class Make>
void run_stages(CollectiveCall& call, std::size_t count, const Make& make) {
  decltype(make(count)) before, current, next;
  ArrayExchange exchange(call);
  for (std::size_t step = 0; step < count + 2; ++step) {
    before = std::move(current);
    current = std::move(next);
    next = nullptr;
    if (step < count) next = make(step);
    std::vector<ExchangePart*> parts;
    if (next != nullptr) parts.push_back(next->inputs());
    if (before != nullptr) parts.push_back(before->results());
    exchange.begin(std::move(parts));
    if (current != nullptr) current->compute();
    exchange.finish();
  }
}

}  // namespace ladon
