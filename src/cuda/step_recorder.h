// CudaStepRecorder: runs the steps of a Graph by two Recordings in turn, so that the host prepares
// a step while the device runs the one before.
#pragma once

#include <memory>

#include "core/step_recorder.h"
#include "cuda/memory.h"
#include "cuda/recording.h"

namespace ladon::cuda {

class CudaStepRecorder final : public StepRecorder {
 public:
  explicit CudaStepRecorder(const std::shared_ptr<CudaMemory>& memory)
      : memory_(memory),
        recordings_{{memory->device().index, memory}, {memory->device().index, memory}} {}

  void begin() override {
    Recording& next = recordings_[runs_ % 2];
    memory_->begin_recording(next);
    try {
      next.begin();
    } catch (...) {
      memory_->end_recording();
      throw;
    }
  }
  void end() override {
    // Enqueued before calls of other threads are again.
    const End end{*memory_};
    recordings_[runs_++ % 2].run(memory_->stream());
  }
  GraphStatistics statistics() const noexcept override {
    GraphStatistics last = recordings_[(runs_ + 1) % 2].statistics();
    last.num_built += recordings_[runs_ % 2].statistics().num_built;
    return last;
  }

 private:
  struct End {
    CudaMemory& memory;
    ~End() { memory.end_recording(); }
  };

  const std::shared_ptr<CudaMemory> memory_;
  Recording recordings_[2];
  std::size_t runs_ = 0;
};

}  // namespace ladon::cuda
