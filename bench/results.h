// What the benchmark finds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ceiling.h"
#include "timing.h"

namespace ladon::bench {

/// A rival's time for a case, in the same rounds; or why there is none.
struct PeerTiming {
  std::string peer;
  Timing timing{};
  std::string why_not{};

  bool measured() const { return timing.repetitions > 0; }
};

struct Row {
  std::string name;
  std::string isa;
  Limit limit = Limit::kFma;  // that the ceiling is of
  int threads = 1;
  Timing timing{};
  Timing ceiling{};
  bool disturbed = false;
  std::optional<double> target{};          // share that is aimed at
  std::string target_does_not_apply{};     // why, where one is set that this machine cannot meet
  std::optional<double> pytorch_target{};  // Ladon's speed over PyTorch's that is aimed at
  std::vector<PeerTiming> peers{};

  double share() const { return timing.rate / ceiling.rate; }
  /// Ladon's speed over the peer's.
  double ratio(const PeerTiming& peer) const { return peer.timing.median_ms / timing.median_ms; }
};

/// A case that gave a wrong answer, and was not timed.
struct Fault {
  std::string name;
  std::string isa;
  std::string what;
};

/// One thread against all of them, on one case.
struct Scaling {
  std::string name;
  std::string isa;
  int threads = 1;
  double speedup = 1;
  double ceiling_speedup = 1;  // of the ceiling, in the same rounds
  double target = 1;           // that is aimed at
  bool disturbed = false;
};

/// How time grows with length: as length^exponent.
struct Exponent {
  struct Point {
    std::int64_t length = 0;
    double median_ms = 0;
  };
  std::string name;  // with the instruction set, without a length
  double exponent = 0;
  double expected = 0;
  std::vector<Point> points{};
  bool disturbed = false;
};

/// A shape compared with a rounder one.
struct Neighbour {
  std::string name;
  std::string of;  // the rounder one
  std::string isa;
  double ratio = 1;   // its share over the other's
  double target = 1;  // the least that is aimed at
  bool disturbed = false;
};

/// A rival, as it was found.
struct PeerState {
  std::string peer;
  std::string version{};  // empty: it never ran
  std::string problem{};  // why it was left out, from the beginning or from somewhere on
};

/// Largest errors of a gradient in bf16 against the f64 reference, of the largest number there;
/// all of the same inputs.
struct GradientErrors {
  std::string name;      // of the shape
  std::string gradient;  // "dq", "dk" or "dv"
  double ladon = 0;
  double pytorch = 0;
};

struct BenchmarkResults {
  std::vector<Row> rows{};
  std::vector<Fault> faults{};
  std::vector<Scaling> scaling{};
  std::vector<Exponent> exponents{};
  std::vector<Neighbour> neighbours{};
  std::vector<PeerState> peers{};
  std::vector<GradientErrors> gradients{};
};

}  // namespace ladon::bench
