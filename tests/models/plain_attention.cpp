#include "models/plain_attention.h"

#include <algorithm>
#include <cmath>

namespace ladon::test {
namespace {

constexpr double kPi = 3.14159265358979323846;

using Head = std::vector<double>;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

void normalise(Head& head, const std::vector<double>& weight, double epsilon) {
  double squares = 0;
  for (const double number : head) squares += number * number;
  const double length = std::sqrt(squares / static_cast<double>(head.size()) + epsilon);
  for (std::size_t i = 0; i < head.size(); ++i) head[i] = head[i] / length * weight[i];
}

void rotate(Head& head, int position, const PlainAttention& how) {
  for (std::size_t n = 0; n < how.frequencies.size(); ++n) {
    const double angle = position * how.frequencies[n];
    double& first = head[how.interleaved ? 2 * n : n];
    double& second = head[how.interleaved ? 2 * n + 1 : n + how.frequencies.size()];
    const double left = first;
    const double right = second;
    first = how.rope_magnitude * (left * std::cos(angle) - right * std::sin(angle));
    second = how.rope_magnitude * (right * std::cos(angle) + left * std::sin(angle));
  }
}

/// Each head less its mean, with weights of its own.
void normalise_each(std::vector<Head>& heads, const std::vector<double>& weights, double epsilon) {
  auto next = weights.begin();
  for (Head& head : heads) {
    double sum = 0;
    for (const double number : head) sum += number;
    for (double& number : head) number -= sum / static_cast<double>(head.size());
    const auto end = next + static_cast<std::ptrdiff_t>(head.size());
    normalise(head, {next, end}, epsilon);
    next = end;
  }
}

/// One norm over all heads.
void normalise_together(std::vector<Head>& heads, const std::vector<double>& weight,
                        double epsilon) {
  Head all;
  for (const Head& head : heads) all.insert(all.end(), head.begin(), head.end());
  normalise(all, weight, epsilon);
  auto next = all.begin();
  for (Head& head : heads) {
    for (double& number : head) number = *next++;
  }
}

/// All heads of all tokens: [token][head].
std::vector<std::vector<Head>> project(const Rows& x, int heads, int head_dim,
                                       const HeadNumber& number) {
  std::vector<std::vector<Head>> result;
  for (const auto& token : x) {
    auto& row = result.emplace_back();
    for (int head = 0; head < heads; ++head) {
      auto& numbers = row.emplace_back();
      for (int place = 0; place < head_dim; ++place) {
        numbers.push_back(number(token, head, place));
      }
    }
  }
  return result;
}

}  // namespace

Rows PlainAttention::run(const Rows& query_input, const Rows& key_input,
                         const Rows& value_input) const {
  auto queries = project(query_input, num_heads, head_dim, query);
  auto keys = project(key_input, num_kv_heads, head_dim, key);
  const auto values = project(value_input, num_kv_heads, head_dim, value);
  const auto prepare = [&](std::vector<std::vector<Head>>& tokens, const Head& norm) {
    for (std::size_t position = 0; position < tokens.size(); ++position) {
      const bool together = norm.size() > at(head_dim);
      if (together && layer_norm_of_each_head) {
        normalise_each(tokens[position], norm, norm_epsilon);
      } else if (together) {
        normalise_together(tokens[position], norm, norm_epsilon);
      }
      for (Head& head : tokens[position]) {
        if (!norm.empty() && !together) normalise(head, norm, norm_epsilon);
        rotate(head, static_cast<int>(position), *this);
      }
    }
  };
  prepare(queries, query_norm);
  prepare(keys, key_norm);

  Rows result;
  for (int i = 0; i < static_cast<int>(queries.size()); ++i) {
    Head together;
    for (int head = 0; head < num_heads; ++head) {
      const int kv_head = head * num_kv_heads / num_heads;
      std::vector<double> weights;
      double total = sinks.empty() ? 0 : std::exp(sinks[at(head)]);
      for (int j = 0; j < static_cast<int>(keys.size()); ++j) {
        double score = 0;
        for (int place = 0; place < head_dim; ++place) {
          score += queries[at(i)][at(head)][at(place)] * keys[at(j)][at(kv_head)][at(place)];
        }
        score *= scale;
        if (softcap > 0) score = softcap * std::tanh(score / softcap);
        if (!slopes.empty()) score += slopes[at(head)] * (j - i);
        const bool seen = (!causal || j <= i) && (window == 0 || i - j < window);
        weights.push_back(seen ? std::exp(score) : 0);
        total += weights.back();
      }
      for (int place = 0; place < head_dim; ++place) {
        double sum = 0;
        for (int j = 0; j < static_cast<int>(keys.size()); ++j) {
          sum += weights[at(j)] / total * values[at(j)][at(kv_head)][at(place)];
        }
        together.push_back(sum);
      }
    }
    auto& row = result.emplace_back();
    for (int feature = 0; feature < out_width; ++feature) row.push_back(out(together, feature));
  }
  return result;
}

std::vector<double> plain_frequencies(int head_dim, double theta) {
  std::vector<double> frequencies;
  for (int n = 0; n < head_dim; n += 2)
    frequencies.push_back(1 / std::pow(theta, n / double(head_dim)));
  return frequencies;
}

std::vector<double> linear_frequencies(int head_dim, double theta, double factor) {
  std::vector<double> frequencies = plain_frequencies(head_dim, theta);
  for (double& each : frequencies) each /= factor;
  return frequencies;
}

std::vector<double> llama3_frequencies(int head_dim, double theta,
                                       const Llama3Frequencies& scaling) {
  std::vector<double> frequencies = plain_frequencies(head_dim, theta);
  for (double& each : frequencies) {
    // How often this pair goes round within the context that the model was trained on.
    const double rounds = scaling.context * each / (2 * kPi);
    if (rounds > scaling.high) continue;
    const double smooth = std::max(0.0, (rounds - scaling.low) / (scaling.high - scaling.low));
    each = smooth * each + (1 - smooth) * each / scaling.factor;
  }
  return frequencies;
}

std::vector<double> yarn_frequencies(int head_dim, double theta, const YarnFrequencies& scaling) {
  const auto pair_of_rounds = [&](double rounds) {
    return head_dim * std::log(scaling.context / (rounds * 2 * kPi)) / (2 * std::log(theta));
  };
  double from = pair_of_rounds(scaling.fast);
  double to = pair_of_rounds(scaling.slow);
  if (scaling.truncate) {
    from = std::floor(from);
    to = std::ceil(to);
  }
  from = std::max(from, 0.0);
  to = std::min(to, head_dim - 1.0);
  std::vector<double> frequencies = plain_frequencies(head_dim, theta);
  for (std::size_t n = 0; n < frequencies.size(); ++n) {
    const double place = (static_cast<double>(n) - from) / (to - from);
    const double stretched = std::min(1.0, std::max(0.0, place));
    frequencies[n] = frequencies[n] / scaling.factor * stretched + frequencies[n] * (1 - stretched);
  }
  return frequencies;
}

std::vector<double> divided_frequencies(int rotated, double theta,
                                        const std::vector<double>& divisors) {
  std::vector<double> frequencies = plain_frequencies(rotated, theta);
  for (std::size_t n = 0; n < frequencies.size(); ++n) frequencies[n] /= divisors[n];
  return frequencies;
}

std::vector<double> dynamic_frequencies(int rotated, double theta, double factor, double context,
                                        double length) {
  const double growth = factor * length / context - factor + 1;
  return plain_frequencies(rotated, theta * std::pow(growth, rotated / (rotated - 2.0)));
}

std::vector<double> plain_slopes(int num_heads) {
  const auto of_power = [](int heads) {
    std::vector<double> slopes;
    const double start = std::pow(2.0, -std::pow(2.0, -(std::log2(heads) - 3)));
    for (int i = 0; i < heads; ++i) slopes.push_back(start * std::pow(start, i));
    return slopes;
  };
  int power = 1;
  while (power * 2 <= num_heads) power *= 2;
  std::vector<double> slopes = of_power(power);
  const std::vector<double> finer = of_power(2 * power);
  for (int i = 0; static_cast<int>(slopes.size()) < num_heads; i += 2)
    slopes.push_back(finer[at(i)]);
  return slopes;
}

}  // namespace ladon::test
