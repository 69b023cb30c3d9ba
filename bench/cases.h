// The benchmark's cases, and the targets that they are compared with.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ceiling.h"
#include "ladon/device.h"
#include "ladon/isa.h"
#include "memory_workload.h"
#include "shape.h"
#include "workload.h"

namespace ladon::bench {

/// A bf16 layer of Llama-3-8B's shape: 4096 wide, 32 query heads and 8 KV heads of 128. Projections
/// and attention are counted together; so are the bytes of weights and cache.
struct LayerShape {
  bool prefill = true;
  std::int64_t tokens = 1024;  // of the prompt, or in the cache
  bool qk_norm = false;        // as Qwen3's

  std::string name() const;
};

/// What a case is to reach. The name is the case's.
struct Target {
  std::string_view name;
  double share = 0;           // of its limit; 0: none
  Limit limit = Limit::kFma;  // that the share is of
  double pytorch_ratio = 0;   // Ladon's speed over PyTorch's; 0: none
};

/// Those of the machine's fastest kernels.
std::span<const Target> best_targets();

struct Case {
  Isa isa = Isa::kBaseline;
  DeviceId device{};  // where isa is not the CPU's to choose
  std::variant<Shape, LayerShape, MemoryShape> work{};
  Limit limit = Limit::kFma;  // that bounds it on a machine that has everything
  std::optional<Target> target{};
  bool fastest = false;  // of the kernels that are measured: peers are measured alongside these

  std::string name() const;
  /// "avx2", or "cuda:0".
  std::string kernels() const { return device.is_cpu() ? ladon::name_of(isa) : device.to_string(); }
  std::string full_name() const { return kernels() + " " + name(); }
  /// That is computed in.
  DType dtype() const;
  /// A shape that other libraries know too; null where there is none.
  const Shape* peer_shape() const;
};

/// A case of this work on these kernels, with the limit that its kind, dtype and length mean. No
/// target.
Case case_of(Isa isa, const Shape& shape);
Case case_of(Isa isa, const LayerShape& shape);
Case case_of(Isa isa, const MemoryShape& shape);

/// All cases of these instruction sets (slowest first, not empty): what each computes, and on the
/// last of them caches, latents and layers. Targets are for the fastest set of the machine.
std::vector<Case> list_cases(std::span<const Isa> isas, Isa fastest_here);

std::unique_ptr<Workload> make_workload(const Context& context, const Case& one);

}  // namespace ladon::bench
