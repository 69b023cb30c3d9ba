// The task and the model of the recall examples.
//
// A sequence lists pairs of a key and a value, then asks for each key once, in another order:
//   k3 v1  k0 v7  k5 v2 ...   k5? k3? ...      the answers: v2 v1 ...
// Which value belongs to which key is new in every sequence, so nothing can be learnt by heart. A
// bag of words knows which values there are and no more: it cannot fall below ln(pairs). Attention
// can: one layer lets each value look at the key before it, the next lets a query find that key.
//
//   embedding -> x += layer(norm(x)), twice -> norm -> head -> softmax
//
// The layers, with their backward, are Ladon's; the rest is written out here, in f32.
#pragma once

#include <ladon/ladon.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace recall {

using ladon::Tensor;

constexpr std::int64_t kWidth = 64;

/// Keys are tokens 0, 1, ...; values come after them. In a sequence all of them are different.
struct Task {
  std::int64_t num_keys = 16;
  std::int64_t num_values = 16;
  std::int64_t pairs = 6;
  std::int64_t batch = 32;
  std::int64_t length() const { return 3 * pairs; }
};

struct Batch {
  std::vector<std::int64_t> tokens;   // [batch, length]; the last `pairs` of each row ask
  std::vector<std::int64_t> answers;  // [batch, pairs], counted from the first value
};

/// The first `count` of a random order of 0, 1, ..., bound - 1.
inline std::vector<std::int64_t> draw(ladon::Random& random, std::int64_t bound,
                                      std::int64_t count) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(bound));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t i = 0; i < count; ++i) {
    std::swap(all[static_cast<std::size_t>(i)],
              all[static_cast<std::size_t>(i + random.below(bound - i))]);
  }
  all.resize(static_cast<std::size_t>(count));
  return all;
}

inline Batch make_batch(const Task& task, ladon::Random& random) {
  Batch batch;
  for (std::int64_t sequence = 0; sequence < task.batch; ++sequence) {
    const auto keys = draw(random, task.num_keys, task.pairs);
    const auto values = draw(random, task.num_values, task.pairs);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      batch.tokens.push_back(keys[i]);
      batch.tokens.push_back(task.num_keys + values[i]);
    }
    for (const std::int64_t asked : draw(random, task.pairs, task.pairs)) {
      batch.tokens.push_back(keys[static_cast<std::size_t>(asked)]);
      batch.answers.push_back(values[static_cast<std::size_t>(asked)]);
    }
  }
  return batch;
}

inline void add(const Tensor& from, Tensor& to) {
  const float* x = from.data_as<float>();
  float* y = to.data_as<float>();
  for (std::int64_t i = 0; i < to.num_elements(); ++i) y[i] += x[i];
}

inline float inverse_rms(const float* row) {
  const float squares = std::inner_product(row, row + kWidth, row, 0.0F);
  return 1 / std::sqrt(squares / static_cast<float>(kWidth) + 1e-6F);
}

/// Each row divided by the root of its mean square.
inline Tensor norm(const Tensor& x) {
  Tensor out(ladon::DType::kF32, x.shape());
  for (std::int64_t i = 0; i < x.num_elements(); i += kWidth) {
    const float* row = x.data_as<float>() + i;
    const float factor = inverse_rms(row);
    for (std::int64_t n = 0; n < kWidth; ++n) out.data_as<float>()[i + n] = factor * row[n];
  }
  return out;
}

/// dx += the gradient of norm's input: factor * (dout - x * factor^2 * mean(x * dout)).
inline void add_norm_backward(const Tensor& x, const Tensor& dout, Tensor& dx) {
  for (std::int64_t i = 0; i < x.num_elements(); i += kWidth) {
    const float* row = x.data_as<float>() + i;
    const float* drow = dout.data_as<float>() + i;
    float* to = dx.data_as<float>() + i;
    const float factor = inverse_rms(row);
    const float product = std::inner_product(row, row + kWidth, drow, 0.0F);
    const float along = factor * factor * product / static_cast<float>(kWidth);
    for (std::int64_t n = 0; n < kWidth; ++n) to[n] += factor * (drow[n] - row[n] * along);
  }
}

struct Score {
  double loss = 0;      // mean cross-entropy of the answers
  double accuracy = 0;  // share of the answers that got the highest score
};

class Model {
 public:
  Model(const ladon::Context& context, const Task& task,
        const ladon::MultiHeadAttentionOptions& options, std::uint64_t seed)
      : task_(task),
        embedding_(ladon::Parameter::zeros("embedding", ladon::DType::kF32,
                                           {task.num_keys + task.num_values, kWidth})),
        head_(ladon::Parameter::zeros("head", ladon::DType::kF32, {task.num_values, kWidth})) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      layers_.push_back(std::make_unique<ladon::MultiHeadAttention>(options, seed + i));
    }
    ladon::fill_normal(context, embedding_.value, 0, 1, seed, 100);
    ladon::fill_normal(context, head_.value, 0, 1 / std::sqrt(static_cast<double>(kWidth)), seed,
                       101);
  }

  /// The same model with other layers.
  Model(const Model& other, std::vector<std::unique_ptr<ladon::AttentionLayer>> layers)
      : task_(other.task_),
        embedding_(other.embedding_.copy()),
        head_(other.head_.copy()),
        layers_(std::move(layers)) {}

  const ladon::AttentionLayer& layer(std::size_t index) const { return *layers_[index]; }
  void set_layer(std::size_t index, std::unique_ptr<ladon::AttentionLayer> layer) {
    layers_[index] = std::move(layer);
  }

  std::vector<ladon::Parameter*> parameters() {
    std::vector<ladon::Parameter*> all = {&embedding_, &head_};
    for (auto& layer : layers_) {
      for (ladon::Parameter* parameter : layer->parameters()) all.push_back(parameter);
    }
    return all;
  }

  /// The loss, with its gradient added to every parameter's.
  Score train(const ladon::Context& context, const Batch& batch) {
    Tensor x = embed(batch);
    std::vector<Tensor> inputs;  // of each layer, before its norm
    std::vector<ladon::SavedForward> saved;
    for (auto& layer : layers_) {
      const Tensor normed = Tensor::copy_of(context, norm(x), layer->dtype());
      ladon::TrainingForward forward = layer->forward_training(context, {.query = normed});
      inputs.push_back(Tensor::copy_of(context, x));
      saved.push_back(std::move(forward.saved));
      add(Tensor::copy_of(context, forward.out, ladon::DType::kF32), x);
    }
    Tensor dnormed = new_hidden();
    const Score score = answer(norm(x), batch, &dnormed, &head_.gradient);
    Tensor dx = new_hidden();
    add_norm_backward(x, dnormed, dx);
    for (std::size_t i = layers_.size(); i-- > 0;) {
      const Tensor dout = Tensor::copy_of(context, dx, layers_[i]->dtype());
      const ladon::InputGradients gradients = layers_[i]->backward(context, dout, saved[i]);
      add_norm_backward(inputs[i], Tensor::copy_of(context, gradients.query, ladon::DType::kF32),
                        dx);
    }
    embed_backward(batch, dx);
    return score;
  }

  /// What a layer's attention sees: its normed inputs, [batch, length, width].
  Tensor layer_input(const ladon::Context& context, const Batch& batch, std::size_t index) const {
    Tensor x = embed(batch);
    for (std::size_t i = 0; i < index; ++i) {
      const Tensor normed = Tensor::copy_of(context, norm(x), layers_[i]->dtype());
      add(Tensor::copy_of(context, layers_[i]->forward(context, normed), ladon::DType::kF32), x);
    }
    return norm(x);
  }

  Score test(const ladon::Context& context, const Batch& batch) const {
    Tensor x = embed(batch);
    for (const auto& layer : layers_) {
      const Tensor normed = Tensor::copy_of(context, norm(x), layer->dtype());
      add(Tensor::copy_of(context, layer->forward(context, normed), ladon::DType::kF32), x);
    }
    return answer(norm(x), batch, nullptr, nullptr);
  }

 private:
  Tensor new_hidden() const {
    return Tensor(ladon::DType::kF32, {task_.batch, task_.length(), kWidth});
  }

  Tensor embed(const Batch& batch) const {
    Tensor x = new_hidden();
    float* to = x.data_as<float>();
    for (const std::int64_t token : batch.tokens) {
      to = std::copy_n(embedding_.value.data_as<float>() + token * kWidth, kWidth, to);
    }
    return x;
  }

  void embed_backward(const Batch& batch, const Tensor& dx) {
    const float* from = dx.data_as<float>();
    for (const std::int64_t token : batch.tokens) {
      float* to = embedding_.gradient.data_as<float>() + token * kWidth;
      for (std::int64_t n = 0; n < kWidth; ++n) to[n] += *from++;
    }
  }

  /// Scores the answers. With dx, writes the gradient of x there and adds the head's to dhead.
  Score answer(const Tensor& x, const Batch& batch, Tensor* dx, Tensor* dhead) const {
    const float share = 1 / static_cast<float>(batch.answers.size());
    Score score;
    std::vector<float> logits(static_cast<std::size_t>(task_.num_values));
    for (std::size_t i = 0; i < batch.answers.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      const std::int64_t position =
          index / task_.pairs * task_.length() + 2 * task_.pairs + index % task_.pairs;
      const float* row = x.data_as<float>() + position * kWidth;
      const float* weight = head_.value.data_as<float>();
      for (float& logit : logits) {
        logit = std::inner_product(row, row + kWidth, weight, 0.0F);
        weight += kWidth;
      }
      const auto highest = std::max_element(logits.begin(), logits.end());
      const auto correct = static_cast<std::size_t>(batch.answers[i]);
      float sum = 0;
      for (const float logit : logits) sum += std::exp(logit - *highest);
      const float lse = *highest + std::log(sum);
      score.loss += static_cast<double>(share * (lse - logits[correct]));
      if (highest - logits.begin() == batch.answers[i])
        score.accuracy += static_cast<double>(share);
      if (dx == nullptr) continue;
      float* drow = dx->data_as<float>() + position * kWidth;
      for (std::size_t value = 0; value < logits.size(); ++value) {
        const float probability = std::exp(logits[value] - lse);
        const float dlogit = share * (probability - (value == correct ? 1.0F : 0.0F));
        const std::size_t first = value * static_cast<std::size_t>(kWidth);
        const float* from = head_.value.data_as<float>() + first;
        float* to = dhead->data_as<float>() + first;
        for (std::int64_t n = 0; n < kWidth; ++n) {
          drow[n] += dlogit * from[n];
          to[n] += dlogit * row[n];
        }
      }
    }
    return score;
  }

  Task task_;
  ladon::Parameter embedding_;
  ladon::Parameter head_;
  std::vector<std::unique_ptr<ladon::AttentionLayer>> layers_;
};

/// Runs an example: whether it reached what it states is printed, and is its exit status; what it
/// throws is printed, and the status 2.
inline int run_program(const char* name, int argc, char** argv,
                       bool (*run)(std::span<char* const> arguments)) {
  try {
    const bool good = run(std::span<char* const>(argv + 1, static_cast<std::size_t>(argc - 1)));
    std::puts(good ? "reached" : "NOT reached");
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 2;
  }
}

}  // namespace recall
