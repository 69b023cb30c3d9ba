// Ends for threads of one process: messages are queues of bytes behind one mutex. With an emulated
// network each message carries the time of its arrival.

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "ladon/communicator.h"
#include "parallel/emulated_network.h"

namespace ladon {
namespace {

struct Message {
  std::vector<std::byte> data;
  // In an emulated network, by the sender's clock.
  double departure = 0;
  double arrival = 0;
};

// The records of agreement; see CollectiveCall.
constexpr std::size_t kAgreementBytes = 32;

/// A rank's way into an emulated network, for all of its communicators.
struct Port {
  explicit Port(const EmulatedLink& wire) : link(wire) {}

  double now() const {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec) + skipped;
  }
  void send(Message& message) {
    message.departure = now();
    free_at = std::max(free_at, message.departure) + link.latency +
              static_cast<double>(message.data.size()) / link.bandwidth;
    message.arrival = free_at;
  }
  void wait_for(const Message& message) {
    const double before = now();
    if (message.arrival <= before) return;
    skipped += message.arrival - before;
    if (message.data.size() <= kAgreementBytes) return;
    on_links += message.arrival - std::max(before, message.departure);
  }

  /// Runs what a network card does: its time is that of the link, not the rank's.
  template <class Body>
  void without_time(const Body& body) {
    const double before = now();
    body();
    skipped -= now() - before;
  }

  const EmulatedLink link;
  double skipped = 0;   // by waiting, less what without_time() took
  double on_links = 0;  // of it, while data was on its way
  double free_at = 0;
};

struct Group;

/// A communicator that some ranks are about to make.
struct Split {
  std::shared_ptr<Group> made;
  std::size_t members = 0;  // that have it
};

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
  std::map<std::pair<std::uint64_t, int>, Split> splits;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank, const CommunicatorOptions& options,
                     std::shared_ptr<Port> port = {})
      : Communicator(options), group_(std::move(group)), rank_(rank), port_(std::move(port)) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return group_->size; }
  const Port* port() const noexcept { return port_.get(); }
  double seconds() const override {
    return port_ == nullptr ? Communicator::seconds() : port_->now();
  }

 protected:
  // Bytes are copied outside the lock: the others poll meanwhile.
  void start(std::span<const Send> sends, std::span<const Receive> receives) override {
    std::vector<Message> messages;
    move_bytes([&] {
      for (const Send& send : sends) {
        messages.push_back({.data = {send.data.begin(), send.data.end()}});
      }
    });
    const std::lock_guard lock(group_->mutex);
    for (std::size_t i = 0; i < sends.size(); ++i) {
      if (port_ != nullptr) port_->send(messages[i]);
      group_->queue(rank_, sends[i].to).push_back(std::move(messages[i]));
    }
    waiting_.assign(receives.begin(), receives.end());
    ++group_->changes;
    group_->changed.notify_all();
  }

  bool poll() override {
    std::vector<std::pair<Receive, Message>> arrived = take_arrived();
    for (const auto& [receive, message] : arrived) {
      if (message.data.size() == receive.data.size()) continue;
      throw Error(ErrorCode::kCommunication, "got " + std::to_string(message.data.size()) +
                                                 " bytes from rank " +
                                                 std::to_string(receive.from) + ", expected " +
                                                 std::to_string(receive.data.size()));
    }
    move_bytes([&] {
      for (const auto& [receive, message] : arrived) {
        if (message.data.empty()) continue;
        std::memcpy(receive.data.data(), message.data.data(), message.data.size());
      }
      arrived.clear();
    });
    return waiting_.empty();
  }

  void pause() override {
    std::unique_lock lock(group_->mutex);
    if (skip_to_arrival()) return;
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
    const std::pair<std::uint64_t, int> name{splits_++, color};
    Split& split = group_->splits[name];
    if (split.made == nullptr) split.made = std::make_shared<Group>(static_cast<int>(ranks.size()));
    const std::shared_ptr<Group> made = split.made;
    if (++split.members == ranks.size()) group_->splits.erase(name);
    const auto own = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return std::make_unique<ThreadCommunicator>(made, static_cast<int>(own), options(), port_);
  }

 private:
  template <class Body>
  void move_bytes(const Body& body) {
    if (port_ == nullptr) return body();
    port_->without_time(body);
  }

  /// Takes the messages that are here, and leaves the others in waiting_.
  std::vector<std::pair<Receive, Message>> take_arrived() {
    std::vector<std::pair<Receive, Message>> taken;
    const std::lock_guard lock(group_->mutex);
    seen_ = group_->changes;
    for (const auto& [rank, reason] : group_->failures) {
      if (rank == rank_) continue;
      waiting_.clear();
      throw Error(ErrorCode::kCommunication, "rank " + std::to_string(rank) + " failed: " + reason);
    }
    const double now = seconds();
    const auto is_here = [&](const Receive& receive) {
      std::deque<Message>& queue = group_->queue(receive.from, rank_);
      if (queue.empty() || queue.front().arrival > now) return false;
      taken.emplace_back(receive, std::move(queue.front()));
      queue.pop_front();
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_here), waiting_.end());
    return taken;
  }

  /// Sets an emulated clock forward to the next message that is on its way.
  bool skip_to_arrival() {
    if (port_ == nullptr) return false;
    const Message* next = nullptr;
    for (const Receive& receive : waiting_) {
      const std::deque<Message>& queue = group_->queue(receive.from, rank_);
      if (queue.empty()) continue;
      if (next == nullptr || queue.front().arrival < next->arrival) next = &queue.front();
    }
    if (next == nullptr) return false;
    port_->wait_for(*next);
    return true;
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
  const std::shared_ptr<Port> port_;  // null: no network is emulated
  std::vector<Receive> waiting_;
  std::uint64_t seen_ = 0;
  std::uint64_t splits_ = 0;
};

std::vector<std::unique_ptr<Communicator>> make_ends(std::string_view operation, int count,
                                                     const CommunicatorOptions& options,
                                                     const EmulatedLink* link) {
  constexpr int kMostRanks = 4096;
  if (count < 1 || count > kMostRanks) {
    fail(operation, "count",
         "got " + std::to_string(count) + ", expected 1 to " + std::to_string(kMostRanks));
  }
  const auto group = std::make_shared<Group>(count);
  std::vector<std::unique_ptr<Communicator>> ends;
  ends.reserve(static_cast<std::size_t>(count));
  for (int rank = 0; rank < count; ++rank) {
    ends.push_back(std::make_unique<ThreadCommunicator>(
        group, rank, options, link == nullptr ? nullptr : std::make_shared<Port>(*link)));
  }
  return ends;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int count, const CommunicatorOptions& options) {
  return make_ends("make_thread_communicators", count, options, nullptr);
}

std::vector<std::unique_ptr<Communicator>> make_emulated_communicators(
    int count, const EmulatedLink& link, const CommunicatorOptions& options) {
  constexpr std::string_view kOperation = "make_emulated_communicators";
  if (!(link.latency >= 0)) {
    fail(kOperation, "latency", "got " + text_of(link.latency) + " s, expected 0 or more");
  }
  if (!(link.bandwidth > 0)) {
    fail(kOperation, "bandwidth",
         "got " + text_of(link.bandwidth) + " bytes/s, expected more than 0");
  }
  return make_ends(kOperation, count, options, &link);
}

double link_seconds_waited(const Communicator& end) {
  const auto* const thread = dynamic_cast<const ThreadCommunicator*>(&end);
  return thread == nullptr || thread->port() == nullptr ? 0 : thread->port()->on_links;
}

}  // namespace ladon
