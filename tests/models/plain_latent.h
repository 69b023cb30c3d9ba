// DeepSeek's latent attention in plain double loops, written from the papers of DeepSeek-V2 and V3
// and the published modules. It reads a folder's tensors and shares no code with the library.
#pragma once

#include <functional>
#include <vector>

#include "models/plain_attention.h"

namespace ladon::test {

/// One number of a projection: (the input, row).
using RowNumber = std::function<double(const std::vector<double>& x, int row)>;

struct PlainLatent {
  int num_heads = 0;
  int query_rank = 0;  // 0: queries are made of the input
  int kv_rank = 0;
  int nope = 0, rope = 0, value = 0;  // elements of a head
  int embed = 0;

  /// q_a_proj, with query_rank rows, and q_b_proj over it; or q_proj as the second alone.
  RowNumber query_down, query_up;
  std::vector<double> query_norm{};
  RowNumber latent;  // kv_a_proj_with_mqa: the latent, then the rope key
  std::vector<double> latent_norm{};
  RowNumber expanded;  // kv_b_proj: for each head its key, then its value
  RowNumber out;

  double scale = 1;
  bool interleaved = true;  // pairs are (2n, 2n + 1), or else (n, n + rope / 2)
  std::vector<double> frequencies{};
  double rope_magnitude = 1;

  Rows run(const Rows& x) const;
};

}  // namespace ladon::test
