#include "models/plain_latent.h"

#include <cmath>
#include <complex>
#include <cstddef>

namespace ladon::test {
namespace {

using Numbers = std::vector<double>;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

Numbers rows_of(const RowNumber& projection, const Numbers& x, int rows) {
  Numbers result;
  for (int row = 0; row < rows; ++row) result.push_back(projection(x, row));
  return result;
}

/// Both norms of the published modules are built with their class's own epsilon.
Numbers normed(const Numbers& x, const Numbers& weight) {
  if (weight.empty()) return x;  // converted layers have none
  constexpr double kEpsilon = 1e-6;
  double mean = 0;
  for (const double number : x) mean += number * number / static_cast<double>(x.size());
  Numbers result;
  for (std::size_t i = 0; i < x.size(); ++i) {
    result.push_back(weight[i] * x[i] / std::sqrt(mean + kEpsilon));
  }
  return result;
}

/// Every pair as a complex number, rotated by e^(i angle).
Numbers rotated(const Numbers& x, const PlainLatent& plain, int position) {
  Numbers result(x.size());
  for (int n = 0; n < plain.rope / 2; ++n) {
    const std::size_t a = at(plain.interleaved ? 2 * n : n);
    const std::size_t b = at(plain.interleaved ? 2 * n + 1 : n + plain.rope / 2);
    const std::complex<double> pair =
        std::complex(x[a], x[b]) *
        std::polar(plain.rope_magnitude, position * plain.frequencies[at(n)]);
    result[a] = pair.real();
    result[b] = pair.imag();
  }
  return result;
}

Numbers part(const Numbers& x, int begin, int end) { return {x.begin() + begin, x.begin() + end}; }

double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

struct Token {
  std::vector<Numbers> query_nope, query_rope;  // by head
  std::vector<Numbers> key, value;              // by head
  Numbers rope_key;                             // of all heads
};

Token token_of(const PlainLatent& p, const Numbers& x, int position) {
  Token token;
  const int query_dim = p.nope + p.rope;
  const Numbers low =
      p.query_rank == 0 ? x : normed(rows_of(p.query_down, x, p.query_rank), p.query_norm);
  const Numbers query = rows_of(p.query_up, low, p.num_heads * query_dim);
  const Numbers compressed = rows_of(p.latent, x, p.kv_rank + p.rope);
  const Numbers latent = normed(part(compressed, 0, p.kv_rank), p.latent_norm);
  token.rope_key = rotated(part(compressed, p.kv_rank, p.kv_rank + p.rope), p, position);
  const int pair_dim = p.nope + p.value;
  const Numbers expanded = rows_of(p.expanded, latent, p.num_heads * pair_dim);
  for (int head = 0; head < p.num_heads; ++head) {
    const int q = head * query_dim;
    token.query_nope.push_back(part(query, q, q + p.nope));
    token.query_rope.push_back(rotated(part(query, q + p.nope, q + query_dim), p, position));
    const int kv = head * pair_dim;
    token.key.push_back(part(expanded, kv, kv + p.nope));
    token.value.push_back(part(expanded, kv + p.nope, kv + pair_dim));
  }
  return token;
}

}  // namespace

Rows PlainLatent::run(const Rows& x) const {
  std::vector<Token> tokens;
  for (const Numbers& row : x)
    tokens.push_back(token_of(*this, row, static_cast<int>(tokens.size())));
  Rows result;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    Numbers together;
    for (std::size_t head = 0; head < at(num_heads); ++head) {
      Numbers sum(at(value));
      double total = 0;
      for (std::size_t j = 0; j <= i; ++j) {
        const double weight =
            std::exp(scale * (dot(tokens[i].query_nope[head], tokens[j].key[head]) +
                              dot(tokens[i].query_rope[head], tokens[j].rope_key)));
        total += weight;
        for (std::size_t n = 0; n < sum.size(); ++n) sum[n] += weight * tokens[j].value[head][n];
      }
      for (const double number : sum) together.push_back(number / total);
    }
    result.push_back(rows_of(out, together, embed));
  }
  return result;
}

}  // namespace ladon::test
