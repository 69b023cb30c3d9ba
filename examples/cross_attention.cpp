// Cross-attention: the queries come from one sequence, the keys and values from another, which has
// its own width and its own length, as a caption reads an image or a translation its source.
#include <ladon/ladon.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kTextLength = 3;
constexpr std::int64_t kTextWidth = 64;
constexpr std::int64_t kImageLength = 6;
constexpr std::int64_t kImageWidth = 96;
constexpr std::int64_t kNumHeads = 4;

/// Prints a head's weights of every query, and says whether all rows sum to 1 and give nothing to
/// keys past the sequence's length.
bool print_weights(const ladon::Tensor& weights, std::int64_t sequence, std::int64_t head,
                   std::int64_t image_length) {
  const float* row =
      weights.data_as<float>() + (sequence * kNumHeads + head) * kTextLength * kImageLength;
  bool good = true;
  for (std::int64_t query = 0; query < kTextLength; ++query, row += kImageLength) {
    std::printf("  query %d: ", static_cast<int>(query));
    double sum = 0;
    for (std::int64_t key = 0; key < kImageLength; ++key) {
      std::printf(" %.3f", static_cast<double>(row[key]));
      sum += static_cast<double>(row[key]);
      good = good && (key < image_length || row[key] == 0);
    }
    std::printf("   sum %.6f\n", sum);
    good = good && std::fabs(sum - 1) < 1e-5;
  }
  return good;
}

int run() {
  const ladon::MultiHeadAttention layer({.embed_dim = kTextWidth,
                                         .num_heads = kNumHeads,
                                         .num_kv_heads = 2,
                                         .key_dim = kImageWidth,  // of the values too
                                         .query_bias = true,
                                         .out_bias = true},
                                        /*seed=*/1);
  const ladon::Context context;
  ladon::Tensor text(ladon::DType::kF32, {kBatch, kTextLength, kTextWidth});
  ladon::Tensor image(ladon::DType::kF32, {kBatch, kImageLength, kImageWidth});
  ladon::fill_normal(context, text, 0, 1, /*seed=*/2);
  ladon::fill_normal(context, image, 0, 1, /*seed=*/3);

  // The second image is shorter: what is past its length is padding, which is never read.
  const std::array<std::int64_t, kBatch> image_lengths = {kImageLength, 4};
  ladon::Tensor weights(ladon::DType::kF32, {kBatch, kNumHeads, kTextLength, kImageLength});
  const ladon::Tensor out = layer.forward(context, {.query = text, .key = image},
                                          {.kv_lengths = image_lengths, .weights = weights});

  std::printf("text %s and image %s -> %s\n", text.shape().to_string().c_str(),
              image.shape().to_string().c_str(), out.shape().to_string().c_str());
  bool good = out.shape() == text.shape();
  for (std::int64_t sequence = 0; sequence < kBatch; ++sequence) {
    const std::int64_t length = image_lengths[static_cast<std::size_t>(sequence)];
    std::printf("sequence %d, head 0, %d of %d keys:\n", static_cast<int>(sequence),
                static_cast<int>(length), static_cast<int>(kImageLength));
    good = print_weights(weights, sequence, 0, length) && good;
  }
  return good ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cross_attention: %s\n", error.what());
    return 1;
  }
}
