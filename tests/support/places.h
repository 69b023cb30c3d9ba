// The places that tests run in: every instruction set of the CPU, a pretended device, which shows
// that nothing but operations touches a device's memory, and a GPU where there is one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/isa.h"
#include "support/pretended_device.h"
#include "support/runnable_isas.h"

namespace ladon::test {

struct Place {
  enum class Kind : std::uint8_t { kCpu, kPretended, kCuda };

  Isa isa = Isa::kReference;
  Kind kind = Kind::kCpu;

  std::string name() const {
    if (kind == Kind::kCuda) return "cuda";
    return kind == Kind::kPretended ? "pretended" : name_of(isa);
  }
  bool is_cpu() const { return kind == Kind::kCpu; }
  bool is_cuda() const { return kind == Kind::kCuda; }
  /// Where sizes that take long are left out.
  bool is_reference() const { return is_cpu() && isa == Isa::kReference; }
  /// Two threads, so that sharing out the work is tested too. Work of another Context of the place
  /// must be waited for (synchronize()) before this one uses its results.
  Context context(int threads = 2) const {
    ContextOptions options{.num_threads = threads, .isa = isa};
    if (kind == Kind::kPretended) return pretended_context(options);
    if (kind == Kind::kCuda) options.device = Device::kCuda;
    return Context(options);
  }
};

/// With LADON_ISA set, that instruction set alone; with LADON_TEST_PLACES=cuda, the GPU alone,
/// without which all tests then fail.
inline std::vector<Place> places() {
  const std::vector<Isa> isas = runnable_isas();
  const Place cuda{.isa = isas.back(), .kind = Place::Kind::kCuda};
  const char* const wanted = std::getenv("LADON_TEST_PLACES");
  if (wanted != nullptr && std::string_view(wanted) == "cuda") return {cuda};
  std::vector<Place> all;
  for (const Isa isa : isas) all.push_back({.isa = isa});
  if (isas.size() == 1) return all;
  all.push_back({.isa = isas.back(), .kind = Place::Kind::kPretended});
  if (!list_devices().devices.empty()) all.push_back(cuda);
  return all;
}

/// The fastest kernels and the devices, for tests that take long.
inline std::vector<Place> fastest_places() {
  std::vector<Place> fastest;
  for (const Place& place : places()) {
    if (!place.is_cpu() || place.isa == runnable_isas().back()) fastest.push_back(place);
  }
  return fastest;
}

}  // namespace ladon::test
