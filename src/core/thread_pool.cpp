// One list of jobs under one mutex. Indices are handed out under the mutex too: a job has at most
// as many as there are threads (parallel_for hands out its tasks by its own atomic), so it is
// taken a handful of times for each parallel region.
#include "core/thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace ladon {
namespace {

/// One call of run(). Lives on its caller's stack, which is safe because the caller leaves only
/// when `unfinished` is 0, and no thread touches a job after bringing that to 0 under the mutex.
struct Job {
  int count;
  void (*body)(void* state, int index);
  void* state;
  int next = 0;  // the first index that has not been taken
  int unfinished;
  std::condition_variable done = {};
  Job* following = nullptr;
};

/// Blocks all signals of this thread and of those it starts meanwhile: a signal belongs to the host
/// program's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    blocked_ = pthread_sigmask(SIG_SETMASK, &all, &before_) == 0;
  }
  ~SignalsBlocked() {
    if (blocked_) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
  bool blocked_ = false;
};

}  // namespace

class ThreadPool::Shared {
 public:
  void run(int helpers, int count, void (*body)(void* state, int index), void* state) {
    Job job{.count = count, .body = body, .state = state, .unfinished = count};
    std::unique_lock<std::mutex> lock(mutex_);
    start(helpers);
    append(job);
    const int wanted = count - 1;
    if (wanted >= static_cast<int>(threads_.size())) {
      wake_.notify_all();
    } else {
      for (int i = 0; i < wanted; ++i) wake_.notify_one();
    }
    while (job.next < job.count) run_one(job, lock);
    job.done.wait(lock, [&] { return job.unfinished == 0; });
  }

  void stop_and_join() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  // Needs the mutex. Asks once: a system that refuses a thread now is short of them, and asking
  // again in every call would cost more than it brings.
  void start(int helpers) noexcept {
    if (started_) return;
    started_ = true;
    const SignalsBlocked blocked;
    try {
      threads_.reserve(static_cast<std::size_t>(helpers));
      for (int i = 0; i < helpers; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::exception&) {
      // The callers do the work with the threads that there are.
    }
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || first_ != nullptr; });
      if (first_ == nullptr) return;
      run_one(*first_, lock);
    }
  }

  /// Takes the job's next index and runs it. Needs the mutex, which it lets go meanwhile.
  void run_one(Job& job, std::unique_lock<std::mutex>& lock) {
    const int index = job.next++;
    if (job.next == job.count) remove(job);
    lock.unlock();
    job.body(job.state, index);
    lock.lock();
    // Notified with the mutex held: the caller, and the job with it, may be gone once it is free.
    if (--job.unfinished == 0) job.done.notify_one();
  }

  void append(Job& job) noexcept {
    Job** link = &first_;
    while (*link != nullptr) link = &(*link)->following;
    *link = &job;
  }

  void remove(Job& job) noexcept {
    Job** link = &first_;
    while (*link != &job) link = &(*link)->following;
    *link = job.following;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Job* first_ = nullptr;  // the jobs that have indices to take, oldest first
  std::vector<std::thread> threads_;
  bool started_ = false;
  bool stopping_ = false;
};

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads), process_(getpid()), shared_(std::make_unique<Shared>()) {}

ThreadPool::~ThreadPool() {
  if (getpid() == process_) {
    shared_->stop_and_join();
  } else {
    // In a forked child the threads do not exist: joining them, or destroying a condition variable
    // on which they seem to wait, would hang. Leaking the copy is all that can be done.
    static_cast<void>(shared_.release());
  }
}

void ThreadPool::run(int count, void (*body)(void* state, int index), void* state) {
  if (count <= 1 || num_threads_ <= 1 || getpid() != process_) {
    for (int index = 0; index < count; ++index) body(state, index);
    return;
  }
  shared_->run(num_threads_ - 1, count, body, state);
}

}  // namespace ladon
