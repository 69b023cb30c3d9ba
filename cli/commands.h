// The subcommands: what each is told, and the function that does it. Each prints to stdout and
// returns the exit status, or throws Failure, UsageError or ladon::Error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/dtype.h"
#include "ladon/isa.h"

namespace ladon::cli {

/// The exit statuses. A signal ends the program as that signal.
inline constexpr int kExitGood = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

/// What every command that computes can be told.
struct Machinery {
  std::optional<Isa> isa{};  // empty: as a Context chooses
  int threads = 0;           // 0: as a Context chooses
  DeviceId device{};

  ContextOptions context_options() const {
    ContextOptions options;
    options.num_threads = threads;
    options.isa = isa;
    options.device = device.device;
    options.device_index = device.index;
    return options;
  }
};

struct InfoOptions {
  bool json = false;
};
int run_info(const InfoOptions& options);

struct PlanOptions {
  std::string model{};   // a preset's name
  std::string config{};  // or a config file, its folder, a pipe or "-"; neither: all presets
  std::vector<std::string> ignored_fields{};
  std::int64_t context = 8192;
  std::int64_t batch = 1;
  std::int64_t kv_heads = 0;  // of the GQA row; 0: the model's, or a usual number
  DType dtype = DType::kBF16;
  std::optional<std::int64_t> memory{};
  std::optional<std::int64_t> weights{};  // bytes of the weights; empty: the model's
  std::int64_t ranks = 1;                 // above 1: what they would hold and send
  std::string link = "10gbe";             // between them: a name, or LATENCY,BANDWIDTH
  bool json = false;
};
int run_plan(const PlanOptions& options);

struct CheckOptions {
  Machinery machinery{};
  std::uint64_t seed = 1;
  double slack = 1;  // factor of the allowed errors
  bool json = false;
};
int run_check(const CheckOptions& options);

struct RunOptions {
  Machinery machinery{};
  std::string model{};
  std::int64_t layer = 0;
  std::string input{};
  std::string output{};
  std::string weights{};  // a picture; empty: none
  std::string tokens{};   // a JSON array of the drawn tokens' texts
  std::string heads{};    // which are drawn: "0,3,5-7"; empty: all
  std::int64_t sequence = 0;
  bool cached = false;
  std::int64_t chunk = 1;
  std::optional<DType> dtype{};        // of the layer; empty: the input's
  std::optional<DType> cache_dtype{};  // empty: the layer's
  std::vector<std::string> ignored_fields{};
  bool json = false;
};
int run_layer(const RunOptions& options);

struct ConvertOptions {
  Machinery machinery{};
  std::string model{};
  std::string output{};  // a new folder; empty in a sweep
  std::string to{};      // mha, gqa, mqa or mla
  std::string merge = "pca";
  std::int64_t kv_heads = 0;  // gqa
  std::int64_t kv_rank = 0;   // mla; 0: all that there is
  bool unequal = false;       // mla: ranks differ between layers
  std::optional<std::int64_t> rope_dim{};
  std::string calibrate{};  // a folder of inputs; empty: weights alone
  bool refit = true;
  bool balance = false;  // mha, gqa, mqa: balance_channels() as well
  std::optional<double> max_error{};
  std::vector<std::int64_t> sweep{};      // KV heads, or ranks
  std::vector<std::int64_t> rope_dims{};  // of a sweep
  std::string plot{};                     // of a sweep; empty: none
  std::vector<std::string> ignored_fields{};
  bool json = false;
};
int run_convert(const ConvertOptions& options);

struct CompareOptions {
  Machinery machinery{};
  std::string size = "llama-3-8b";
  DType dtype = DType::kBF16;
  std::int64_t prompt = 512;
  std::int64_t context = 4096;
  std::int64_t batch = 1;
  bool quick = false;
  std::string plot{};  // empty: none
  bool json = false;
};
int run_compare(const CompareOptions& options);

struct BenchOptions {
  Machinery machinery{};
  std::string filter{};
  bool quick = false;
  std::string peers{};            // the Python that runs them; empty: none
  std::int64_t peer_limit = 120;  // seconds
  std::string plot{};             // empty: none
  std::int64_t ranks = 1;         // above 1: context-parallel attention over them instead
  std::string link{"10gbe"};      // between ranks
  bool json = false;
};
int run_bench(const BenchOptions& options);

}  // namespace ladon::cli
