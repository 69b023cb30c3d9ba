// Attention in plain double loops, written from the models' public descriptions. It shares no code
// with the library: own projections, own rope, own norm, own ALiBi, own softmax.
#pragma once

#include <functional>
#include <vector>

namespace ladon::test {

/// Numbers by token and feature.
using Rows = std::vector<std::vector<double>>;

/// One number of a projection: (the token's input, head, place in the head).
using HeadNumber = std::function<double(const std::vector<double>& x, int head, int place)>;

struct PlainAttention {
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  HeadNumber query, key, value;
  /// One number of the output from all heads' results, head after head.
  std::function<double(const std::vector<double>& heads, int feature)> out;
  int out_width = 0;

  bool causal = true;
  int window = 0;  // how many keys a query sees, its own the last; 0: all
  double scale = 1;
  double softcap = 0;
  /// Of each pair, in radians per position. Pair n is elements n and n + the number of pairs; those
  /// past the pairs stay.
  std::vector<double> frequencies{};
  bool interleaved = false;  // pairs are elements 2n and 2n + 1
  double rope_magnitude = 1;
  /// Of a head, or of all heads of a token together.
  std::vector<double> query_norm{}, key_norm{};
  double norm_epsilon = 0;
  bool layer_norm_of_each_head = false;  // with a row of weights for each head
  std::vector<double> slopes{};
  std::vector<double> sinks{};

  Rows run(const Rows& x) const { return run(x, x, x); }
  Rows run(const Rows& query_input, const Rows& key_input, const Rows& value_input) const;
};

/// Frequencies of rope as each kind of scaling defines them.
std::vector<double> plain_frequencies(int head_dim, double theta);
std::vector<double> linear_frequencies(int head_dim, double theta, double factor);
struct Llama3Frequencies {
  double factor, low, high, context;
};
std::vector<double> llama3_frequencies(int head_dim, double theta,
                                       const Llama3Frequencies& scaling);
struct YarnFrequencies {
  double factor, context;
  bool truncate = true;
  double fast = 32, slow = 1;
};
std::vector<double> yarn_frequencies(int head_dim, double theta, const YarnFrequencies& scaling);

/// Each frequency divided by a separate number.
std::vector<double> divided_frequencies(int rotated, double theta,
                                        const std::vector<double>& divisors);
/// The base stretched for sequences of `length`.
std::vector<double> dynamic_frequencies(int rotated, double theta, double factor, double context,
                                        double length);

/// ALiBi's slopes, from the two lists that its paper interleaves.
std::vector<double> plain_slopes(int num_heads);

}  // namespace ladon::test
