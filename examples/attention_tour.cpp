// A tour of attention(): grouped-query heads, causal masking, and the way back.
#include <ladon/ladon.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kLength = 256;
constexpr std::int64_t kNumHeads = 8;
constexpr std::int64_t kNumKvHeads = 2;  // four query heads share each KV head
constexpr std::int64_t kHeadDim = 64;

ladon::Tensor random_tensor(const ladon::Context& context, std::int64_t num_heads,
                            std::uint64_t seed) {
  ladon::Tensor tensor(ladon::DType::kF32, {kBatch, kLength, num_heads, kHeadDim});
  ladon::fill_normal(context, tensor, 0, 1, seed);
  return tensor;
}

double largest_difference(const ladon::Tensor& a, const ladon::Tensor& b) {
  const float* x = a.data_as<float>();
  const float* y = b.data_as<float>();
  double largest = 0;
  for (std::int64_t i = 0; i < a.num_elements(); ++i) {
    const double difference = std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
    // Written so that a NaN counts as a difference.
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

void print_kernels() {
  for (const ladon::IsaInfo& info : ladon::list_isas()) {
    std::printf("%c %-9s  %s\n", info.chosen ? '*' : ' ', info.name.c_str(), info.reason.c_str());
    if (!info.chosen) continue;
    std::string kernels;
    for (const std::string& name : info.kernels) kernels += " " + name;
    std::printf("  kernels:%s\n", kernels.c_str());
  }
}

void print_start(const char* name, const ladon::Tensor& tensor) {
  const float* x = tensor.data_as<float>();
  std::printf("%-4s %s  %9.6f %9.6f %9.6f ...\n", name, tensor.shape().to_string().c_str(),
              static_cast<double>(x[0]), static_cast<double>(x[1]), static_cast<double>(x[2]));
}

int tour() {
  std::printf("Ladon %s. Instruction sets, the chosen one starred:\n", ladon::version());
  print_kernels();

  // A Context holds the threads and the kernels. By default: all CPUs, the fastest kernels.
  const ladon::Context context;
  const ladon::Tensor q = random_tensor(context, kNumHeads, 1);
  const ladon::Tensor k = random_tensor(context, kNumKvHeads, 2);
  const ladon::Tensor v = random_tensor(context, kNumKvHeads, 3);
  const ladon::AttentionOptions options{.causal = true};

  ladon::Tensor out(ladon::DType::kF32, q.shape());
  ladon::Tensor lse(ladon::DType::kF32, {kBatch, kNumHeads, kLength});
  ladon::attention(context, q, k, v, options, out, lse);
  std::printf("\nForward on %d threads:\n", context.num_threads());
  print_start("out", out);
  print_start("lse", lse);

  // The plain double-precision loops that every kernel is tested against.
  const ladon::Context reference({.isa = ladon::Isa::kReference});
  const ladon::Tensor expected = ladon::attention(reference, q, k, v, options);
  const double error = largest_difference(out, expected);
  std::printf("largest difference from the reference: %.2g\n", error);

  // Backward wants what forward gave, and the gradient of the output. Here that is out itself: the
  // gradient of half the sum of its squares.
  ladon::Tensor dq(ladon::DType::kF32, q.shape());
  ladon::Tensor dk(ladon::DType::kF32, k.shape());
  ladon::Tensor dv(ladon::DType::kF32, v.shape());
  ladon::attention_backward(context, q, k, v, options, {.out = out, .lse = lse, .dout = out},
                            {.dq = dq, .dk = dk, .dv = dv});
  std::printf("\nBackward:\n");
  print_start("dq", dq);
  print_start("dk", dk);
  print_start("dv", dv);

  return error < 1e-5 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return tour();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_tour: %s\n", error.what());
    return 1;
  }
}
