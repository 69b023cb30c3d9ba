// What a Queue enqueues on, and by way of.
#pragma once

#include <memory>
#include <utility>

#include "core/workspace_pool.h"
#include "cuda/memory.h"
#include "cuda/metadata.h"
#include "cuda/staging.h"

namespace ladon::cuda {

struct QueueResources {
  QueueResources(std::shared_ptr<CudaMemory> of, WorkspacePool& pool)
      : memory(std::move(of)), scratch(pool), staging(memory->device().index), metadata(memory) {}

  const std::shared_ptr<CudaMemory> memory;
  WorkspacePool& scratch;
  Staging staging;
  Metadata metadata;
};

}  // namespace ladon::cuda
