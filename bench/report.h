// What the benchmark says: a table as it goes, and a JSON file at the end.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "problem.h"
#include "timing.h"

namespace ladon::bench {

struct Row {
  std::string name;
  std::string isa;
  Bound bound = Bound::kCompute;
  int threads = 1;
  Timing timing;
  Timing ceiling;
  bool disturbed = false;
  std::optional<double> target{};  // share that is aimed at

  double share() const { return timing.rate / ceiling.rate; }
};

/// One thread against all of them, on one case.
struct Scaling {
  std::string name;
  std::string isa;
  int threads = 1;
  double speedup = 1;
  double ceiling_speedup = 1;  // of the FMA loop, in the same rounds
  bool disturbed = false;
};

struct Machine {
  std::string cpu;
  int threads = 1;
  std::string date;  // UTC
  std::string compiler;
  std::string version;  // of Ladon
};

Machine describe_machine(int threads);

void print_head(const Machine& machine);
void print_row(const Row& row);
void print_fault(const std::string& isa, const std::string& name, const std::string& fault);
void print_scaling(const Scaling& scaling);

/// Throws std::runtime_error now rather than after minutes of work when `path` cannot be written.
void check_json_path(const std::string& path);

/// Writes a neighbouring file and renames it, so that `path` is never half a file.
void write_json(const std::string& path, const Machine& machine, bool quick,
                const std::vector<Row>& rows, const std::optional<Scaling>& scaling);

}  // namespace ladon::bench
