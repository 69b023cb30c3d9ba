// Ladon's projections compared with those of oneDNN and OpenBLAS: y = x W^T at the shapes of two
// models' attention layers, for 1 to 1024 tokens. Built where LADON_PROJECTION_TABLE is on.
//
//   OPENBLAS_THREAD_TIMEOUT=10 projection_table [rounds]
//
// All take turns, on all CPUs. oneDNN has its weights in the layout that it wants, rearranged
// before the clock starts; Ladon and OpenBLAS read them as checkpoints store them. OpenBLAS has no
// bf16. Prints the median time and Ladon's speed over the others'.
#include <cblas.h>
#include <dnnl.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ladon/context.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "layers/projection.h"
#include "pinning.h"
#include "thread_places.h"
#include "timing.h"

namespace {

using ladon::DType;
using ladon::Tensor;

struct Shape {
  const char* name;
  std::int64_t in_features;
  std::int64_t out_features;
};

constexpr Shape kShapes[] = {
    {"Llama-3-8B q, o", 4096, 4096}, {"Llama-3-8B k, v", 4096, 1024},
    {"DeepSeek-V3 q_a", 7168, 1536}, {"DeepSeek-V3 q_b", 1536, 24576},
    {"DeepSeek-V3 kv_a", 7168, 576}, {"DeepSeek-V3 o", 16384, 7168},
};
constexpr std::int64_t kTokens[] = {1, 8, 64, 1024};

/// oneDNN's matrix product with weights in its own layout.
class OneDnn {
 public:
  OneDnn(const Tensor& x, const Tensor& w, Tensor& y)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using Tag = dnnl::memory::format_tag;
    const auto type =
        x.dtype() == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    const dnnl::memory::dims x_dims{x.size(0), x.size(1)};
    const dnnl::memory::dims w_dims{w.size(1), w.size(0)};
    const dnnl::memory::dims y_dims{y.size(0), y.size(1)};
    const dnnl::memory::desc x_desc(x_dims, type, Tag::ab);
    const dnnl::memory::desc y_desc(y_dims, type, Tag::ab);
    const dnnl::matmul::desc operation(x_desc, {w_dims, type, Tag::any}, y_desc);
    const dnnl::matmul::primitive_desc primitive(operation, engine_);
    const dnnl::memory stored({w_dims, type, Tag::ba}, engine_, const_cast<void*>(w.data()));
    dnnl::memory packed(primitive.weights_desc(), engine_);
    dnnl::memory from = stored;
    dnnl::reorder(from, packed).execute(stream_, from, packed);
    stream_.wait();
    matmul_ = dnnl::matmul(primitive);
    arguments_ = {{DNNL_ARG_SRC, dnnl::memory(x_desc, engine_, const_cast<void*>(x.data()))},
                  {DNNL_ARG_WEIGHTS, packed},
                  {DNNL_ARG_DST, dnnl::memory(y_desc, engine_, y.data())}};
  }

  void run() {
    matmul_.execute(stream_, arguments_);
    stream_.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul matmul_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

void measure(const ladon::Context& context, const Shape& shape, DType dtype, std::int64_t tokens,
             int rounds, ladon::bench::ThreadPlaces& places) {
  Tensor x(dtype, {tokens, shape.in_features});
  Tensor w(dtype, {shape.out_features, shape.in_features});
  Tensor y(dtype, {tokens, shape.out_features});
  ladon::fill_normal(context, x, 0, 1, 1);
  ladon::fill_normal(context, w, 0, 1, 2);
  project(context, x, w, {}, y.view());
  places.pin_new_threads();
  OneDnn onednn(x, w, y);
  places.pin_new_threads();
  std::vector<ladon::bench::Work> pieces;
  pieces.push_back(ladon::bench::after_a_pause([&] { project(context, x, w, {}, y.view()); }));
  pieces.push_back(ladon::bench::after_a_pause([&] { onednn.run(); }));
  if (dtype == DType::kF32) {
    const auto rows = static_cast<blasint>(tokens);
    const auto in = static_cast<blasint>(shape.in_features);
    const auto out = static_cast<blasint>(shape.out_features);
    pieces.push_back(ladon::bench::after_a_pause([&, rows, in, out] {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, out, in, 1.0F,
                  static_cast<const float*>(x.data()), in, static_cast<const float*>(w.data()), in,
                  0.0F, static_cast<float*>(y.data()), out);
    }));
  }
  const ladon::bench::TimedPieces timed = ladon::bench::time_in_turns(
      pieces, {.min_seconds = 0, .min_rounds = rounds, .max_seconds = 20});
  const double ours = timed.pieces[0].median_ms * 1e-3;
  const double flops = 2.0 * static_cast<double>(tokens * shape.in_features * shape.out_features);
  const double bytes = static_cast<double>(w.num_elements()) * static_cast<double>(size_of(dtype));
  std::printf("| %s | %s | %lld | %.3f ms%s | %.1f | %.1f |", shape.name, name_of(dtype),
              static_cast<long long>(tokens), ours * 1e3, timed.disturbed ? " (disturbed)" : "",
              flops / ours * 1e-9, bytes / ours * 1e-9);
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    std::printf(" %.2fx |", timed.pieces[i].median_ms * 1e-3 / ours);
  }
  std::printf("%s\n", pieces.size() == 2 ? " - |" : "");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const int rounds = argc > 1 ? std::max(std::stoi(argv[1]), 1) : 7;
  const ladon::Context context;
  ladon::bench::ThreadPlaces places(ladon::bench::cpus_to_pin(context));
  places.pin_new_threads();  // OpenBLAS has its own before main() runs
  std::printf(
      "| projection | dtype | tokens | Ladon | GFLOP/s | weights GB/s | over oneDNN | over "
      "OpenBLAS "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : kShapes) {
      for (const std::int64_t tokens : kTokens) {
        measure(context, shape, dtype, tokens, rounds, places);
      }
    }
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "projection_table: %s\n", error.what());
  return 1;
}
