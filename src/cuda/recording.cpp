#include "cuda/recording.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/fail.h"
#include "cuda/error.h"

namespace ladon::cuda {
namespace {

constexpr std::size_t kSmallestPinned = 1024;  // bytes

bool is_same(const dim3& a, const dim3& b) { return a.x == b.x && a.y == b.y && a.z == b.z; }

bool is_same(const Grid& a, const Grid& b) {
  return is_same(a.blocks, b.blocks) && is_same(a.threads, b.threads) &&
         a.shared_bytes == b.shared_bytes && a.starts_early == b.starts_early;
}

cudaKernelNodeParams kernel_params(const void* kernel, const Grid& grid, void** arguments) {
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(kernel);
  params.gridDim = grid.blocks;
  params.blockDim = grid.threads;
  params.sharedMemBytes = static_cast<unsigned>(grid.shared_bytes);
  params.kernelParams = arguments;
  return params;
}

cudaMemsetParams zero_params(void* to, std::size_t bytes) {
  cudaMemsetParams params{};
  params.dst = to;
  params.elementSize = 1;
  params.width = bytes;
  params.height = 1;
  params.pitch = bytes;
  return params;
}

/// `early`: both are kernels, and the second waits for the first by itself.
cudaError_t add_edge(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to, bool early) {
#if CUDART_VERSION >= 12030
  cudaGraphEdgeData edge{};
  if (early) {
    edge.type = cudaGraphDependencyTypeProgrammatic;
    edge.from_port = cudaGraphKernelNodePortProgrammatic;
  }
#if CUDART_VERSION >= 13000
  return cudaGraphAddDependencies(graph, &from, &to, &edge, 1);
#else
  return cudaGraphAddDependencies_v2(graph, &from, &to, &edge, 1);
#endif
#else
  static_cast<void>(early);
  return cudaGraphAddDependencies(graph, &from, &to, 1);
#endif
}

}  // namespace

Recording::Recording(int device_index, std::shared_ptr<DeviceMemory> memory)
    : device_index_(device_index), metadata_(std::move(memory)) {
  const DeviceScope scope(device_index_);
  check(scope.status(), "Graph");
  check(cudaEventCreateWithFlags(&finished_, cudaEventDisableTiming), "Graph");
}

Recording::~Recording() {
  const DeviceScope scope(device_index_);
  static_cast<void>(cudaEventSynchronize(finished_));
  static_cast<void>(cudaEventDestroy(finished_));
  discard_graph();
  for (const Step& step : steps_) static_cast<void>(cudaFreeHost(step.pinned));
}

void Recording::discard_graph() noexcept {
  if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
  if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
  executable_ = nullptr;
  graph_ = nullptr;
}

void Recording::begin() {
  const DeviceScope scope(device_index_);
  check(cudaEventSynchronize(finished_), "Graph");
  metadata_.restart();
  num_steps_ = 0;
  is_incomplete_ = false;
  is_same_graph_ = executable_ != nullptr;
  recorder_ = std::this_thread::get_id();
}

Recording::Step& Recording::upcoming() {
  if (std::this_thread::get_id() != recorder_) {
    fail("Graph", "context", "got a call from another thread, expected none while a step runs");
  }
  if (num_steps_ == steps_.size()) {
    steps_.emplace_back();
    is_same_graph_ = false;
  }
  return steps_[num_steps_];
}

Recording::Step& Recording::next(Kind kind, const void* kernel) {
  Step& step = upcoming();
  ++num_steps_;
  if (step.kind != kind || step.kernel != kernel || step.node == nullptr) is_same_graph_ = false;
  step.kind = kind;
  step.kernel = kernel;
  step.is_changed = false;
  return step;
}

void Recording::add_kernel(const void* kernel, const Grid& grid, const void* params,
                           std::size_t bytes) {
  Step& step = next(Kind::kKernel, kernel);
  const auto* const from = static_cast<const std::byte*>(params);
  step.is_changed = !is_same(step.grid, grid) || step.params.size() != bytes ||
                    std::memcmp(step.params.data(), from, bytes) != 0;
  if (!step.is_changed) return;
  if (step.grid.starts_early != grid.starts_early) is_same_graph_ = false;  // another kind of edge
  step.grid = grid;
  try {
    step.params.assign(from, from + bytes);
  } catch (...) {
    step.node = nullptr;
    --num_steps_;
    throw;
  }
}

void Recording::add_transfer(Kind kind, void* to, const void* from, std::size_t bytes) {
  Step& step = next(kind, nullptr);
  step.grid = {};
  step.is_changed = step.to != to || step.from != from || step.bytes != bytes;
  step.to = to;
  step.from = from;
  step.bytes = bytes;
}

void Recording::add_copy(void* to, const void* from, std::size_t bytes) {
  add_transfer(Kind::kCopy, to, from, bytes);
}

void Recording::add_zero(void* to, std::size_t bytes) {
  add_transfer(Kind::kZero, to, nullptr, bytes);
}

void Recording::try_copy(void* to, const void* from, std::size_t bytes) noexcept {
  try {
    add_copy(to, from, bytes);
  } catch (...) {
    is_incomplete_ = true;
  }
}

void Recording::try_zero(void* to, std::size_t bytes) noexcept {
  try {
    add_zero(to, bytes);
  } catch (...) {
    is_incomplete_ = true;
  }
}

void Recording::add_upload(void* to, const void* from, std::size_t bytes) {
  // The step's own memory, so that an upload that stays where it is changes no node.
  Step& step = upcoming();
  if (step.pinned_bytes < bytes) {
    const std::size_t size = std::max(kSmallestPinned, std::bit_ceil(bytes));
    void* pinned = nullptr;
    check(cudaHostAlloc(&pinned, size, cudaHostAllocDefault), "Graph");
    static_cast<void>(cudaFreeHost(step.pinned));
    step.pinned = static_cast<std::byte*>(pinned);
    step.pinned_bytes = size;
  }
  std::memcpy(step.pinned, from, bytes);
  add_transfer(Kind::kUpload, to, step.pinned, bytes);
}

cudaError_t Recording::add_node(cudaGraph_t graph, Step& step) {
  void* arguments[] = {step.params.data()};
  const cudaKernelNodeParams kernel = kernel_params(step.kernel, step.grid, arguments);
  const cudaMemsetParams zero = zero_params(step.to, step.bytes);
  switch (step.kind) {
    case Kind::kKernel: return cudaGraphAddKernelNode(&step.node, graph, nullptr, 0, &kernel);
    case Kind::kUpload:
    case Kind::kCopy:
      return cudaGraphAddMemcpyNode1D(&step.node, graph, nullptr, 0, step.to, step.from, step.bytes,
                                      cudaMemcpyDefault);
    case Kind::kZero: return cudaGraphAddMemsetNode(&step.node, graph, nullptr, 0, &zero);
  }
  return cudaErrorInvalidValue;
}

cudaError_t Recording::change_node(Step& step) const {
  void* arguments[] = {step.params.data()};
  const cudaKernelNodeParams kernel = kernel_params(step.kernel, step.grid, arguments);
  const cudaMemsetParams zero = zero_params(step.to, step.bytes);
  switch (step.kind) {
    case Kind::kKernel: return cudaGraphExecKernelNodeSetParams(executable_, step.node, &kernel);
    case Kind::kUpload:
    case Kind::kCopy:
      return cudaGraphExecMemcpyNodeSetParams1D(executable_, step.node, step.to, step.from,
                                                step.bytes, cudaMemcpyDefault);
    case Kind::kZero: return cudaGraphExecMemsetNodeSetParams(executable_, step.node, &zero);
  }
  return cudaErrorInvalidValue;
}

/// Returns false where CUDA cannot change the graph so.
bool Recording::update() {
  statistics_.num_changed = 0;
  for (std::size_t i = 0; i < num_steps_; ++i) {
    if (!steps_[i].is_changed) continue;
    ++statistics_.num_changed;
    if (change_node(steps_[i]) == cudaSuccess) continue;
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return true;
}

void Recording::build() {
  discard_graph();
  for (Step& step : steps_) step.node = nullptr;
  check(cudaGraphCreate(&graph_, 0), "Graph");
  for (std::size_t i = 0; i < num_steps_; ++i) {
    Step& step = steps_[i];
    check(add_node(graph_, step), "Graph");
    if (i == 0) continue;
    const Step& before = steps_[i - 1];
    const bool early = step.grid.starts_early && before.kind == Kind::kKernel;
    check(add_edge(graph_, before.node, step.node, early), "Graph");
  }
  check(cudaGraphInstantiate(&executable_, graph_, 0), "Graph");
  statistics_.num_changed = static_cast<std::int64_t>(num_steps_);
  ++statistics_.num_built;
}

cudaError_t Recording::enqueue_step(const Step& step, cudaStream_t stream) {
  switch (step.kind) {
    case Kind::kKernel:
      return enqueue_kernel(step.kernel, step.grid, const_cast<std::byte*>(step.params.data()),
                            stream);
    case Kind::kUpload:
    case Kind::kCopy:
      return cudaMemcpyAsync(step.to, step.from, step.bytes, cudaMemcpyDefault, stream);
    case Kind::kZero: return cudaMemsetAsync(step.to, 0, step.bytes, stream);
  }
  return cudaErrorInvalidValue;
}

void Recording::enqueue(cudaStream_t stream) {
  try {
    const bool is_as_long = num_steps_ == steps_.size() || steps_[num_steps_].node == nullptr;
    if (!is_same_graph_ || !is_as_long || !update()) build();
    return check(cudaGraphLaunch(executable_, stream), "Graph");
  } catch (const Error&) {
    discard_graph();
  }
  for (std::size_t i = 0; i < num_steps_; ++i) check(enqueue_step(steps_[i], stream), "Graph");
}

void Recording::run(cudaStream_t stream) {
  const DeviceScope scope(device_index_);
  enqueue(stream);
  statistics_.num_nodes = static_cast<std::int64_t>(num_steps_);
  check(cudaEventRecord(finished_, stream), "Graph");
  if (is_incomplete_) {
    fail("Graph::run", "step",
         "got a copy that could not be recorded, such as one of another thread, expected none");
  }
}

}  // namespace ladon::cuda
