// Ends for threads of one process: messages are queues of bytes behind one mutex.

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "core/fail.h"
#include "ladon/communicator.h"

namespace ladon {
namespace {

using Message = std::vector<std::byte>;

/// What the ends of one communicator share.
struct Group {
  explicit Group(int count)
      : size(count), queues(static_cast<std::size_t>(count) * static_cast<std::size_t>(count)) {}

  std::deque<Message>& queue(int from, int to) {
    return queues[static_cast<std::size_t>(from) * static_cast<std::size_t>(size) +
                  static_cast<std::size_t>(to)];
  }

  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t changes = 0;
  std::vector<std::deque<Message>> queues;  // [from][to]
  std::vector<std::pair<int, std::string>> failures;
  // By number of the split and color; every member finds the same one.
  std::map<std::pair<std::uint64_t, int>, std::shared_ptr<Group>> splits;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank, const CommunicatorOptions& options)
      : Communicator(options), group_(std::move(group)), rank_(rank) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return group_->size; }

 protected:
  void start(std::span<const Send> sends, std::span<const Receive> receives) override {
    const std::lock_guard lock(group_->mutex);
    for (const Send& send : sends) {
      group_->queue(rank_, send.to).emplace_back(send.data.begin(), send.data.end());
    }
    waiting_.assign(receives.begin(), receives.end());
    ++group_->changes;
    group_->changed.notify_all();
  }

  bool poll() override {
    const std::lock_guard lock(group_->mutex);
    seen_ = group_->changes;
    for (const auto& [rank, reason] : group_->failures) {
      if (rank == rank_) continue;
      waiting_.clear();
      throw Error(ErrorCode::kCommunication, "rank " + std::to_string(rank) + " failed: " + reason);
    }
    const auto arrived = [&](const Receive& receive) {
      std::deque<Message>& queue = group_->queue(receive.from, rank_);
      if (queue.empty()) return false;
      const Message message = std::move(queue.front());
      queue.pop_front();
      if (message.size() != receive.data.size()) {
        throw Error(ErrorCode::kCommunication, "got " + std::to_string(message.size()) +
                                                   " bytes from rank " +
                                                   std::to_string(receive.from) + ", expected " +
                                                   std::to_string(receive.data.size()));
      }
      if (!message.empty()) std::memcpy(receive.data.data(), message.data(), message.size());
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), arrived), waiting_.end());
    return waiting_.empty();
  }

  void pause() override {
    std::unique_lock lock(group_->mutex);
    group_->changed.wait_for(lock, std::chrono::milliseconds(5),
                             [&] { return group_->changes != seen_; });
  }

  std::vector<int> silent_ranks() const override {
    std::vector<int> ranks;
    for (const Receive& receive : waiting_) ranks.push_back(receive.from);
    return ranks;
  }

  void abort(std::string_view reason) noexcept override {
    try {
      const std::lock_guard lock(group_->mutex);
      group_->failures.emplace_back(rank_, reason);
      ++group_->changes;
      group_->changed.notify_all();
    } catch (...) {
      // Without memory for the reason the others wait until their deadline.
    }
  }

  std::unique_ptr<Communicator> make_group(std::span<const int> ranks, int color,
                                           int /*key*/) override {
    const std::lock_guard lock(group_->mutex);
    std::shared_ptr<Group>& made = group_->splits[{splits_++, color}];
    if (made == nullptr) made = std::make_shared<Group>(static_cast<int>(ranks.size()));
    const auto own = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return std::make_unique<ThreadCommunicator>(made, static_cast<int>(own), options());
  }

 private:
  const std::shared_ptr<Group> group_;
  const int rank_;
  std::vector<Receive> waiting_;
  std::uint64_t seen_ = 0;
  std::uint64_t splits_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int count, const CommunicatorOptions& options) {
  constexpr int kMostRanks = 4096;
  if (count < 1 || count > kMostRanks) {
    fail("make_thread_communicators", "count",
         "got " + std::to_string(count) + ", expected 1 to " + std::to_string(kMostRanks));
  }
  const auto group = std::make_shared<Group>(count);
  std::vector<std::unique_ptr<Communicator>> ends;
  for (int rank = 0; rank < count; ++rank) {
    ends.push_back(std::make_unique<ThreadCommunicator>(group, rank, options));
  }
  return ends;
}

}  // namespace ladon
