// Workload: something that the benchmark checks, and then times.
#pragma once

#include <string>

#include "ladon/context.h"

namespace ladon::bench {

class Workload {
 public:
  virtual ~Workload() = default;

  /// Runs it and compares some of every result with Isa::kReference. Empty when they agree, else
  /// what is wrong. Comes before the first run(), which may use what this left behind.
  virtual std::string check(const Context& context) = 0;
  virtual void run(const Context& context) = 0;

  virtual double flops() const = 0;
  /// That must be read from memory.
  virtual double bytes() const = 0;
};

/// A context of the reference with as many threads as this one has.
inline Context reference_for(const Context& context) {
  ContextOptions options;
  options.num_threads = context.num_threads();
  options.isa = Isa::kReference;
  return Context(options);
}

}  // namespace ladon::bench
