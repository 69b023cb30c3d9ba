// Ladon's attention compared with that of ggml, llama.cpp's library: f32 queries over f16 keys and
// values, as llama.cpp has them. peers/ggml.sh builds and runs it.
//
//   ggml_table [rounds]
//
// Both read the same memory, [token, head, element], on all CPUs, and take turns. ggml is called as
// llama.cpp does: causal by a mask of f16, sums in f32. Before it is timed, ggml's result is
// compared with Ladon's in double. Prints median times and Ladon's speed over ggml's.
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "ladon/context.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "pinning.h"
#include "thread_places.h"
#include "timing.h"

namespace {

using ladon::DType;
using ladon::Tensor;

struct TimedCase {
  const char* name;
  std::int64_t query_len;
  std::int64_t kv_len;
  std::int64_t num_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim = 128;
};

constexpr TimedCase kTimedCases[] = {
    {"decode H32/32 S8192 D128", 1, 8192, 32, 32},
    {"decode H32/8 S8192 D128", 1, 8192, 32, 8},
    {"prefill H8/8 S1024 D128 causal", 1024, 1024, 8, 8},
    {"prefill H32/8 S1024 D128 causal", 1024, 1024, 32, 8},
};

/// One call of ggml's, over memory of others.
class GgmlAttention {
 public:
  GgmlAttention(Tensor& q, Tensor& k, Tensor& v, int threads)
      : context_(ggml_init({.mem_size = ggml_tensor_overhead() * 64 + ggml_graph_overhead(),
                            .mem_buffer = nullptr,
                            .no_alloc = true}),
                 &ggml_free) {
    ggml_tensor* const mask = make_mask(q.size(1), k.size(1));
    result_ = ggml_flash_attn_ext(context_.get(), seen(q, GGML_TYPE_F32), seen(k, GGML_TYPE_F16),
                                  seen(v, GGML_TYPE_F16), mask,
                                  1 / std::sqrt(static_cast<float>(q.size(3))), 0, 0);
    ggml_prec_set_acc(result_, GGML_PREC_F32);
    out_.resize(static_cast<std::size_t>(q.num_elements()));
    result_->data = out_.data();
    graph_ = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph_, result_);
    plan_ = ggml_graph_plan(graph_, threads, nullptr);
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void run() {
    if (ggml_graph_compute(graph_, &plan_) != GGML_STATUS_SUCCESS) {
      throw std::runtime_error("ggml_graph_compute failed");
    }
  }
  const std::vector<float>& out() const { return out_; }

 private:
  /// [1, token, head, element] as ggml's [element, token, head].
  ggml_tensor* seen(Tensor& tensor, ggml_type type) {
    ggml_tensor* const stored =
        ggml_new_tensor_3d(context_.get(), type, tensor.size(3), tensor.size(2), tensor.size(1));
    stored->data = tensor.data();
    return ggml_permute(context_.get(), stored, 0, 2, 1, 3);
  }

  /// Causal, bottom-right; none for one token.
  ggml_tensor* make_mask(std::int64_t query_len, std::int64_t kv_len) {
    if (query_len == 1) return nullptr;
    ggml_tensor* const mask = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F16, kv_len, query_len);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
    for (std::int64_t query = 0; query < query_len; ++query) {
      for (std::int64_t key = 0; key < kv_len; ++key) {
        mask_.push_back(key <= query + kv_len - query_len ? ggml_fp32_to_fp16(0) : hidden);
      }
    }
    mask->data = mask_.data();
    return mask;
  }

  std::unique_ptr<ggml_context, void (*)(ggml_context*)> context_;
  std::vector<ggml_fp16_t> mask_;
  ggml_tensor* result_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_{};
  std::vector<float> out_;
  std::vector<std::uint8_t> work_;
};

Tensor random(const ladon::Context& context, DType dtype, const ladon::Dims& shape,
              std::uint64_t seed) {
  Tensor tensor(dtype, shape);
  ladon::fill_normal(context, tensor, 0, 1, seed);
  return tensor;
}

double largest_error(const std::vector<float>& out, const Tensor& truth) {
  double largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    largest = std::max(largest, std::abs(double{out[i]} - truth.data_as<double>()[i]));
  }
  return largest;
}

void measure(const ladon::Context& context, const TimedCase& problem, int rounds,
             ladon::bench::ThreadPlaces& places) {
  Tensor q =
      random(context, DType::kF32, {1, problem.query_len, problem.num_heads, problem.head_dim}, 1);
  const ladon::Dims kv_shape{1, problem.kv_len, problem.num_kv_heads, problem.head_dim};
  Tensor k = random(context, DType::kF16, kv_shape, 2);
  Tensor v = random(context, DType::kF16, kv_shape, 3);
  Tensor out(DType::kF32, q.shape());
  const ladon::AttentionOptions options{.causal = true};
  const auto run_ladon = [&] { ladon::attention(context, q, k, v, options, out); };
  run_ladon();
  places.pin_new_threads();
  GgmlAttention ggml(q, k, v, context.num_threads());
  ggml.run();
  places.pin_new_threads();
  const auto wide = [&](const Tensor& t) { return Tensor::copy_of(context, t, DType::kF64); };
  const Tensor truth = ladon::attention(context, wide(q), wide(k), wide(v), options);
  const auto* const ours = out.data_as<float>();
  const double our_error = largest_error({ours, ours + out.num_elements()}, truth);
  const double their_error = largest_error(ggml.out(), truth);
  if (!(their_error < 0.01)) throw std::runtime_error("ggml was given another problem");

  const std::vector<ladon::bench::Work> pieces = {ladon::bench::after_a_pause(run_ladon),
                                                  ladon::bench::after_a_pause([&] { ggml.run(); })};
  const ladon::bench::TimedPieces timed = ladon::bench::time_in_turns(
      pieces, {.min_seconds = 0, .min_rounds = rounds, .max_seconds = 15});
  const double times[] = {timed.pieces[0].median_ms, timed.pieces[1].median_ms};
  std::printf("| %s | %.2f | %.2f | %.2fx%s | %.1e | %.1e |\n", problem.name, times[0], times[1],
              times[1] / times[0], timed.disturbed ? " (disturbed)" : "", our_error, their_error);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const int rounds = argc > 1 ? std::max(std::stoi(argv[1]), 1) : 31;
  const ladon::Context context;
  ladon::bench::ThreadPlaces places(ladon::bench::cpus_to_pin(context));
  places.pin_new_threads();
  ggml_cpu_init();
  std::printf("ggml %s, %d threads, Ladon on %s\n\n", ggml_version(), context.num_threads(),
              ladon::name_of(context.isa()));
  std::printf(
      "| f32 over f16 | Ladon ms | ggml ms | over ggml | error | ggml's error |\n"
      "|---|---|---|---|---|---|\n");
  for (const TimedCase& problem : kTimedCases) measure(context, problem, rounds, places);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "ggml_table: %s\n", error.what());
  return 1;
}
