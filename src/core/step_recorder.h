// StepRecorder: gathers what operations enqueue, and enqueues it at once. A Graph's inside.
#pragma once

#include "ladon/graph.h"

namespace ladon {

class StepRecorder {
 public:
  virtual ~StepRecorder() = default;
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  /// Between the two, operations of the backend are gathered.
  virtual void begin() = 0;
  virtual void end() = 0;
  virtual GraphStatistics statistics() const noexcept = 0;

 protected:
  StepRecorder() = default;
};

}  // namespace ladon
