// Scratch memory for the kernels of one operation: a separate part for each worker.
#pragma once

#include <cstddef>

#include "core/arena.h"
#include "core/backend.h"
#include "core/integer.h"
#include "cpu/kernel_table.h"

namespace ladon::cpu {

class WorkerScratch {
 public:
  /// Allocates `bytes` per worker.
  WorkerScratch(Host& host, std::size_t bytes)
      : stride_(round_up(bytes, kScratchAlignment)),
        workspace_(
            host.scratch,
            saturating_product(static_cast<std::size_t>(host.workers.num_threads()), stride_)) {}

  Scratch of(int worker) const noexcept {
    return {workspace_.data() + static_cast<std::size_t>(worker) * stride_, stride_};
  }

  /// For a driver's own layout, of which the bytes were counted by layout_bytes().
  Arena arena_of(int worker) const noexcept { return {of(worker).data, stride_, DeviceId{}}; }

 private:
  std::size_t stride_;
  Workspace workspace_;
};

}  // namespace ladon::cpu
