// Streams: a Context's own, the program's, and several at once.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

Context on_stream(cudaStream_t stream, int device_index = 0) {
  return Context(
      ContextOptions{.device = Device::kCuda, .device_index = device_index, .stream = stream});
}

/// A stream of the program's.
class Stream {
 public:
  explicit Stream(unsigned flags) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, flags), cudaSuccess);
  }
  ~Stream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class CudaStreams : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    x_ = normal(DType::kBF16, {2, 300, 4, 64}, 1);
    expected_ = attention(context(), x_, x_, x_, {.causal = true});
    context().synchronize();
  }

  Tensor x_;
  Tensor expected_;
};

TEST_F(CudaStreams, TheProgramsOwn) {
  for (const unsigned flags : {unsigned{cudaStreamDefault}, unsigned{cudaStreamNonBlocking}}) {
    const Stream stream(flags);
    Tensor out;
    {
      const Context borrowed = on_stream(stream);
      out = attention(borrowed, x_, x_, x_, {.causal = true});
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_TRUE(same_bits(out, expected_));
    }
    // The Context has gone, its stream has not.
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  }
}

TEST_F(CudaStreams, TheDefaultStream) {
  const Context borrowed = on_stream(nullptr);
  EXPECT_TRUE(same_bits(attention(borrowed, x_, x_, x_, {.causal = true}), expected_));
}

TEST_F(CudaStreams, TensorsOutliveAStreamOfTheProgram) {
  Tensor out;
  {
    const Stream stream(cudaStreamNonBlocking);
    const Context borrowed = on_stream(stream);
    out = attention(borrowed, x_, x_, x_, {.causal = true});
  }
  EXPECT_TRUE(same_bits(out, expected_));
  EXPECT_TRUE(same_bits(out.clone(), expected_));
}

TEST_F(CudaStreams, ContextsAtOnceFromManyThreads) {
  std::vector<std::thread> threads;
  std::vector<int> same(4);
  for (std::size_t i = 0; i < same.size(); ++i) {
    threads.emplace_back([&, i] {
      const Context own = cuda_context();
      bool all = true;
      for (int turn = 0; turn < 20; ++turn) {
        all = same_bits(attention(own, x_, x_, x_, {.causal = true}), expected_) && all;
      }
      same[i] = all ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, std::vector<int>(4, 1));
}

/// Holds up a stream until it is opened, or for so long that the test fails.
struct Gate {
  std::atomic<bool> open = false;
  static void wait(void* gate) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!static_cast<Gate*>(gate)->open && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
  }
};

TEST_F(CudaStreams, CallsReturnWhenTheyAreEnqueued) {
  const Stream stream(cudaStreamNonBlocking);
  const Context borrowed = on_stream(stream);
  Tensor out(borrowed, x_.dtype(), x_.shape());
  {
    // Behind a gate once before, so that all memory such a call takes is there; pinned memory may
    // have to wait for the device.
    Gate gate;
    ASSERT_EQ(cudaLaunchHostFunc(stream, Gate::wait, &gate), cudaSuccess);
    std::thread opener([&gate] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      gate.open = true;
    });
    attention(borrowed, x_, x_, x_, {.causal = true}, out);
    opener.join();
    borrowed.synchronize();
  }
  Gate gate;
  ASSERT_EQ(cudaLaunchHostFunc(stream, Gate::wait, &gate), cudaSuccess);
  attention(borrowed, x_, x_, x_, {.causal = true}, out);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  gate.open = true;
  borrowed.synchronize();
  EXPECT_TRUE(same_bits(out, expected_));
}

TEST_F(CudaStreams, MemoryThatIsFreedWhileAnotherContextUsesIt) {
  const Stream stream(cudaStreamNonBlocking);
  const Context borrowed = on_stream(stream);
  Tensor out(borrowed, x_.dtype(), x_.shape());
  attention(borrowed, x_, x_, x_, {.causal = true},
            out);  // takes the memory that such a call needs
  borrowed.synchronize();
  Tensor x = x_.clone();
  context().synchronize();
  Gate gate;
  ASSERT_EQ(cudaLaunchHostFunc(stream, Gate::wait, &gate), cudaSuccess);
  attention(borrowed, x, x, x, {.causal = true}, out);
  x = Tensor();
  // What is allocated next must not be the memory that the call behind the gate still reads.
  std::vector<Tensor> others;
  for (int i = 0; i < 8; ++i) {
    others.emplace_back(context(), x_.dtype(), x_.shape());
    fill_uniform(context(), others.back(), 7, 7, 0);
  }
  gate.open = true;
  borrowed.synchronize();
  EXPECT_TRUE(same_bits(out, expected_));
}

TEST_F(CudaStreams, AStreamOfAnotherGpuIsRefused) {
  if (list_devices().devices.size() < 2) GTEST_SKIP() << "skipped: there is one GPU";
  const Stream stream(cudaStreamNonBlocking);  // of the current device, 0
  const std::string message = error_of([&] { on_stream(stream, 1); });
  EXPECT_TRUE(message.starts_with("Context: stream: got ")) << message;
  EXPECT_TRUE(message.ends_with(", expected a stream of cuda:1")) << message;
}

}  // namespace
}  // namespace ladon::test
