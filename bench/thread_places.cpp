#include "thread_places.h"

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "pinning.h"

namespace ladon::bench {

ThreadPlaces::ThreadPlaces(std::vector<int> cpus) : cpus_(std::move(cpus)) {}

void ThreadPlaces::pin_new_threads() {
  std::set<int> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    threads.insert(std::stoi(entry.path().filename().string()));
  }
  std::size_t next = pinned_.empty() ? 0 : 1;
  for (const int thread : threads) {
    if (cpus_.empty() || !pinned_.insert(thread).second) continue;
    pin_thread(thread, cpus_[next++ % cpus_.size()]);
  }
}

Work after_a_pause(std::function<void()> call) {
  Work work;
  work.run_elsewhere = [call = std::move(call)]() -> std::optional<double> {
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  return work;
}

}  // namespace ladon::bench
