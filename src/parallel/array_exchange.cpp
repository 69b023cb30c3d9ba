#include "parallel/array_exchange.h"

#include <algorithm>
#include <utility>

#include "parallel/host_messages.h"

namespace ladon {

/// Calls body(part, rank, its arrays). Allocates the messages that are sent.
template <class Body>
void ArrayExchange::for_each_part(std::vector<Tensor>& messages, bool are_sent, const Body& body) {
  for (int other = 0; other < call_.size(); ++other) {
    ExchangePart::Arrays all;
    std::vector<std::size_t> counts;
    for (const ExchangePart* part : parts_) {
      const ExchangePart::Arrays arrays = are_sent ? part->outgoing(other) : part->incoming(other);
      counts.push_back(arrays.size());
      all.insert(all.end(), arrays.begin(), arrays.end());
    }
    const MessageLayout layout(all);
    Tensor& message = messages[static_cast<std::size_t>(other)];
    if (message.rank() == 0) message = layout.allocate();
    std::vector<TensorView> views;
    for (std::size_t i = 0; i < all.size(); ++i) views.push_back(layout.array(message, i));
    std::size_t first = 0;
    for (std::size_t i = 0; i < parts_.size(); first += counts[i++]) {
      if (counts[i] != 0) body(*parts_[i], other, std::span(views).subspan(first, counts[i]));
    }
  }
}

void ArrayExchange::begin(std::vector<ExchangePart*> parts) {
  parts_ = std::move(parts);
  parts_.erase(std::remove(parts_.begin(), parts_.end(), nullptr), parts_.end());
  const auto ranks = static_cast<std::size_t>(call_.size());
  outgoing_ = std::vector<Tensor>(ranks);
  incoming_ = std::vector<Tensor>(ranks);
  if (parts_.empty()) return;
  for_each_part(outgoing_, true,
                [](ExchangePart& part, int other, std::span<const TensorView> arrays) {
                  part.pack(other, arrays);
                });
  for_each_part(incoming_, false, [](auto&&...) {});
  begin_exchange(call_, outgoing_, incoming_);
}

void ArrayExchange::finish() {
  if (parts_.empty()) return;
  call_.wait();
  outgoing_.clear();
  for_each_part(incoming_, false,
                [](ExchangePart& part, int other, std::span<const TensorView> arrays) {
                  part.unpack(other, arrays);
                });
  for (ExchangePart* part : parts_) part->complete();
  parts_.clear();
  incoming_.clear();
}

}  // namespace ladon
