// What a build without Eigen answers. This program has those functions instead of the library's.
#include <gtest/gtest.h>

#include "ladon/convert.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::error_of;
using test::host_context;

TEST(Unavailable, SaysSo) {
  const MultiHeadAttention layer({.embed_dim = 8, .num_heads = 2});
  const LatentAttention latent(
      {.embed_dim = 8, .num_heads = 2, .kv_rank = 3, .nope_dim = 4, .rope_dim = 2});
  const std::string why = ": LADON_CONVERT: got a build without Eigen, expected one with it";
  const auto code = ErrorCode::kUnsupported;
  EXPECT_EQ(error_of([&] { to_mha(host_context(), latent); }, code), "to_mha" + why);
  EXPECT_EQ(error_of([&] { to_mqa(host_context(), latent); }, code), "to_mqa" + why);
  EXPECT_EQ(error_of([&] { to_gqa(host_context(), layer, {.num_kv_heads = 1}); }, code),
            "to_gqa" + why);
  EXPECT_EQ(error_of([&] { to_mla(host_context(), layer); }, code), "to_mla" + why);
  EXPECT_EQ(error_of([&] { reduce_rank(host_context(), latent); }, code), "reduce_rank" + why);
  EXPECT_EQ(error_of([&] { balance_channels(host_context(), layer); }, code),
            "balance_channels" + why);
  EXPECT_EQ(error_of([&] { OutputFit(layer, layer); }, code), "OutputFit" + why);
  // What needs no linear algebra is there.
  EXPECT_EQ(cache_elements(to_mha(host_context(), layer)), 16);
}

}  // namespace
}  // namespace ladon
