#include "parallel/collective_call.h"

#include <chrono>
#include <cstring>

#include "core/checks.h"
#include "core/fail.h"

namespace ladon {
namespace {

// Also tells ranks of another byte order or format apart.
constexpr std::uint64_t kMarker = 0x4c61'646f'6e00'0001;

/// FNV-1a.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf2'9ce4'8422'2325;
  for (const char character : text) {
    hash = (hash ^ static_cast<unsigned char>(character)) * 0x100'0000'01b3;
  }
  return hash;
}

std::string list_of(const std::vector<int>& ranks) {
  if (ranks.empty()) return "other ranks";  // an engine may not know which
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

/// The first line in which two texts differ: "name: a on rank 0, b on rank 2".
std::string difference(std::string_view first, std::string_view other, int rank) {
  const auto next_line = [](std::string_view& text) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    return line;
  };
  while (!first.empty() || !other.empty()) {
    const std::string_view a = next_line(first);
    const std::string_view b = next_line(other);
    if (a == b) continue;
    const std::size_t name = a.find(": ");
    const bool same_name = name != std::string_view::npos && a.substr(0, name) == b.substr(0, name);
    return std::string(a.empty() ? "nothing" : a) + " on rank 0, " +
           std::string(b.empty()   ? "nothing"
                       : same_name ? b.substr(name + 2)
                                   : b) +
           " on rank " + std::to_string(rank);
  }
  return "nothing that their texts show";
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

void CallSignature::add(std::string_view name, std::string_view value) {
  text_.append(name).append(": ").append(value).append("\n");
}
void CallSignature::add(std::string_view name, std::int64_t value) {
  add(name, std::string_view(std::to_string(value)));
}
void CallSignature::add(std::string_view name, double value) {
  add(name, std::string_view(text_of(value)));
}
void CallSignature::add(std::string_view name, std::span<const std::int64_t> values) {
  std::string text;
  for (const std::int64_t value : values) {
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  }
  add(name, std::string_view("[" + text + "]"));
}
void CallSignature::add(std::string_view name, std::span<const double> values) {
  std::string text;
  for (const double value : values) text += (text.empty() ? "" : ", ") + text_of(value);
  add(name, std::string_view("[" + text + "]"));
}
void CallSignature::add(std::string_view name, const ConstTensorView& view) {
  add(name,
      std::string_view(view.absent() ? std::string("none")
                                     : name_of(view.dtype()) + (" " + view.shape().to_string())));
}

/// What ranks send each other before data moves.
struct CollectiveCall::Record {
  std::uint64_t marker = kMarker;
  std::uint64_t call = 0;
  std::uint64_t hash = 0;
  std::uint32_t refused = 0;
  std::uint32_t text_bytes = 0;
};

CollectiveCall::CollectiveCall(Communicator& communicator, std::string_view operation)
    : communicator_(communicator), operation_(operation) {
  if (communicator_.in_use_.exchange(true)) {
    fail(operation_, "communicator", "got a call while another runs, expected one at a time");
  }
  if (!communicator_.broken_.empty()) {
    communicator_.in_use_ = false;
    fail(ErrorCode::kCommunication, operation_, "communicator",
         "broken by an earlier failure: " + communicator_.broken_);
  }
  ++communicator_.calls_;
}

CollectiveCall::~CollectiveCall() { communicator_.in_use_ = false; }

std::string CollectiveCall::where() const {
  return operation_ + ": call " + std::to_string(communicator_.calls_) + " of rank " +
         std::to_string(rank());
}

void CollectiveCall::break_communicator(const std::string& what) {
  const std::string message = where() + ": " + what;
  give_up(message);
  throw Error(ErrorCode::kCommunication, message);
}

void CollectiveCall::give_up(std::string_view reason) noexcept {
  in_step_ = false;
  if (!communicator_.broken_.empty()) return;
  try {
    communicator_.broken_ = reason.empty() ? "no reason was given" : reason;
  } catch (...) {
    communicator_.broken_ = "out of memory";  // short enough to be stored in place
  }
  communicator_.abort(communicator_.broken_);
}

void CollectiveCall::begin_messages(std::span<const Send> sends, std::span<const Receive> receives,
                                    bool is_control) {
  CommunicatorStatistics& statistics = communicator_.statistics_;
  try {
    communicator_.start(sends, receives);
  } catch (const Error& error) {
    break_communicator(error.what());
  }
  in_step_ = true;
  for (const Send& send : sends) {
    ++(is_control ? statistics.control_messages_sent : statistics.messages_sent);
    (is_control ? statistics.control_bytes_sent : statistics.bytes_sent) +=
        static_cast<std::int64_t>(send.data.size());
  }
  if (is_control) return;
  for (const Receive& receive : receives) {
    statistics.bytes_received += static_cast<std::int64_t>(receive.data.size());
  }
}

void CollectiveCall::begin(std::span<const Send> sends, std::span<const Receive> receives) {
  begin_messages(sends, receives, false);
}

void CollectiveCall::poll() {
  if (!in_step_) return;
  try {
    if (communicator_.poll()) in_step_ = false;
  } catch (const Error& error) {
    break_communicator(error.what());
  }
}

void CollectiveCall::wait() { wait_for(communicator_.statistics_.seconds_waited); }

void CollectiveCall::wait_for(double& seconds_waited) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point began = Clock::now();  // a deadline is real time
  const double waits_since = communicator_.seconds();
  for (bool is_late = false;;) {
    poll();
    if (!in_step_) break;
    // This rank may be the one that was held up: it looks once more after the deadline.
    if (is_late) {
      break_communicator(
          list_of(communicator_.silent_ranks()) + " sent or took nothing within " +
          text_of(std::chrono::duration<double>(communicator_.options_.deadline).count()) + " s");
    }
    is_late = Clock::now() - began > communicator_.options_.deadline;
    if (!is_late) communicator_.pause();
  }
  seconds_waited += communicator_.seconds() - waits_since;
}

std::vector<int> CollectiveCall::others() const {
  std::vector<int> ranks;
  for (int step = 1; step < size(); ++step) ranks.push_back((rank() + step) % size());
  return ranks;
}

std::vector<CollectiveCall::Record> CollectiveCall::exchange_records(const Record& own) {
  std::vector<Record> records(static_cast<std::size_t>(size()));
  std::vector<Send> sends;
  std::vector<Receive> receives;
  records[static_cast<std::size_t>(rank())] = own;
  for (const int other : others()) {
    Record& record = records[static_cast<std::size_t>(other)];
    sends.push_back({other, std::as_bytes(std::span(&own, 1))});
    receives.push_back({other, std::as_writable_bytes(std::span(&record, 1))});
  }
  begin_messages(sends, receives, true);
  wait_for(communicator_.statistics_.control_seconds_waited);
  return records;
}

std::vector<std::string> CollectiveCall::exchange_texts(const std::vector<Record>& records,
                                                        const std::string& own) {
  std::vector<std::string> texts(records.size());
  std::vector<Send> sends;
  std::vector<Receive> receives;
  texts[static_cast<std::size_t>(rank())] = own;
  for (const int other : others()) {
    std::string& text = texts[static_cast<std::size_t>(other)];
    text.resize(records[static_cast<std::size_t>(other)].text_bytes);
    sends.push_back({other, bytes_of(own)});
    receives.push_back({other, std::as_writable_bytes(std::span(text.data(), text.size()))});
  }
  begin_messages(sends, receives, true);
  wait_for(communicator_.statistics_.control_seconds_waited);
  return texts;
}

void CollectiveCall::agree(const CallSignature& signature, const std::string* refusal) {
  const std::string described =
      "call " + std::to_string(communicator_.calls_) + ": " + operation_ + "\n" + signature.text();
  std::string text = refusal == nullptr ? described : *refusal;
  constexpr std::size_t kMostText = 4096;  // enough for a message, whatever a signature holds
  if (text.size() > kMostText) text.resize(kMostText);
  const Record own{.call = communicator_.calls_,
                   .hash = hash_of(described),
                   .refused = refusal == nullptr ? 0U : 1U,
                   .text_bytes = static_cast<std::uint32_t>(text.size())};
  const std::vector<Record> records = exchange_records(own);
  std::vector<int> refusing;
  int different = 0;  // a rank unlike rank 0
  for (int other = 0; other < size(); ++other) {
    const Record& record = records[static_cast<std::size_t>(other)];
    if (record.marker != kMarker) {
      break_communicator("rank " + std::to_string(other) +
                         " does not run this version of Ladon, or has another byte order");
    }
    if (record.refused != 0) refusing.push_back(other);
    if (different == 0 && record.hash != records[0].hash) different = other;
  }
  if (refusing.empty() && different == 0) return;
  const std::vector<std::string> texts = exchange_texts(records, text);
  if (refusal != nullptr) return;  // this rank has its own Error
  if (!refusing.empty()) {
    throw Error(ErrorCode::kCommunication,
                where() + ": " + list_of(refusing) +
                    " refused the call: " + texts[static_cast<std::size_t>(refusing.front())]);
  }
  throw Error(ErrorCode::kCommunication,
              where() + ": ranks disagree: " +
                  difference(texts[0], texts[static_cast<std::size_t>(different)], different));
}

void CollectiveCall::commit() {
  const Record own{.call = communicator_.calls_};
  for (const Record& record : exchange_records(own)) {
    if (record.marker != kMarker || record.call != own.call) {
      break_communicator("got the end of another call, expected that of this one");
    }
  }
}

}  // namespace ladon
