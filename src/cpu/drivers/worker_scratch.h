// Scratch memory for the kernels of one operation: a separate part for each worker.
#pragma once

#include <cstddef>

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

  std::byte* of(int worker) const noexcept {
    return workspace_.data() + static_cast<std::size_t>(worker) * stride_;
  }

 private:
  std::size_t stride_;
  Workspace workspace_;
};

}  // namespace ladon::cpu
