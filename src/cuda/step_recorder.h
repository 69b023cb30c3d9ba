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
    next.begin();
    memory_->begin_recording(next);
  }
  void end() override {
    memory_->end_recording();
    const Release release{*memory_};
    recordings_[runs_++ % 2].run(memory_->stream());
  }
  GraphStatistics statistics() const noexcept override {
    GraphStatistics last = recordings_[(runs_ + 1) % 2].statistics();
    last.num_built += recordings_[runs_ % 2].statistics().num_built;
    return last;
  }

 private:
  struct Release {
    CudaMemory& memory;
    ~Release() { memory.release_frees(); }
  };

  const std::shared_ptr<CudaMemory> memory_;
  Recording recordings_[2];
  std::size_t runs_ = 0;
};

}  // namespace ladon::cuda
