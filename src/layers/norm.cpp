// Everything is summed in double, row by row and in order: a norm is a few percent of a layer's
// work at the most, and this way its error is that of one rounding.
#include "layers/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/context_impl.h"
#include "core/element.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "core/workspace.h"

namespace ladon {
namespace {

// Rows of one task. Sums over rows are taken task by task in order, so the cut is fixed.
constexpr std::int64_t kRowsPerTask = 256;

std::int64_t row_count(const ConstTensorView& x, std::int64_t dim) {
  return dim == 0 ? 0 : x.num_elements() / dim;
}

/// Elements from one row to the next.
std::int64_t row_step(const ConstTensorView& x, std::int64_t dim) {
  return x.rank() == 2 ? x.stride(0) : dim;
}

double inverse_rms(const ConstTensorView& x, std::int64_t row, std::int64_t dim, double epsilon) {
  double sum = 0;
  const std::int64_t start = row * row_step(x, dim);
  for (std::int64_t i = 0; i < dim; ++i) {
    const double value = load_element(x.data(), x.dtype(), start + i);
    sum += value * value;
  }
  return 1 / std::sqrt(sum / static_cast<double>(dim) + epsilon);
}

/// The weight in double, in memory of the Context: a norm allocates nothing.
class Weights {
 public:
  Weights(const Context& context, const ConstTensorView& weight)
      : memory_(context.impl().workspaces(),
                static_cast<std::size_t>(weight.size(0)) * sizeof(double)) {
    auto* const values = reinterpret_cast<double*>(memory_.data());
    for (std::int64_t i = 0; i < weight.size(0); ++i) {
      values[i] = load_element(weight.data(), weight.dtype(), i);
    }
  }
  double operator[](std::int64_t i) const noexcept {
    return reinterpret_cast<const double*>(memory_.data())[i];
  }

 private:
  Workspace memory_;
};

}  // namespace

void rms_norm(const Context& context, const ConstTensorView& x, const ConstTensorView& weight,
              double epsilon, const TensorView& y) {
  const std::int64_t dim = weight.size(0);
  const std::int64_t rows = row_count(x, dim);
  const Weights weights(context, weight);
  parallel_for(context, ceil_div(rows, kRowsPerTask), [&](std::int64_t task, int) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
      const double factor = inverse_rms(x, row, dim, epsilon);
      const std::int64_t from = row * row_step(x, dim);
      const std::int64_t to = row * row_step(y, dim);
      for (std::int64_t i = 0; i < dim; ++i) {
        const double value = load_element(x.data(), x.dtype(), from + i);
        store_element(y.data(), y.dtype(), to + i, value * factor * weights[i]);
      }
    }
  });
}

void rms_norm_backward(const Context& context, const ConstTensorView& x,
                       const ConstTensorView& weight, double epsilon, const ConstTensorView& dy,
                       const TensorView& dx, const TensorView& dweight) {
  const std::int64_t dim = weight.size(0);
  const std::int64_t rows = row_count(x, dim);
  const std::int64_t tasks = ceil_div(rows, kRowsPerTask);
  const auto width = static_cast<std::size_t>(dim);
  const Weights weights(context, weight);
  std::vector<double> partial(static_cast<std::size_t>(tasks) * width);
  parallel_for(context, tasks, [&](std::int64_t task, int) {
    double* sums = partial.data() + static_cast<std::size_t>(task) * width;
    const std::int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
      const double factor = inverse_rms(x, row, dim, epsilon);
      const std::int64_t from = row * row_step(x, dim);
      const std::int64_t back = row * row_step(dy, dim);
      const std::int64_t to = row * row_step(dx, dim);
      double dot = 0;  // of the normalised x with its gradient
      for (std::int64_t i = 0; i < dim; ++i) {
        const double unit = load_element(x.data(), x.dtype(), from + i) * factor;
        const double gradient = load_element(dy.data(), dy.dtype(), back + i);
        dot += unit * gradient * weights[i];
        sums[i] += unit * gradient;
      }
      dot /= static_cast<double>(dim);
      for (std::int64_t i = 0; i < dim; ++i) {
        const double unit = load_element(x.data(), x.dtype(), from + i) * factor;
        const double gradient = load_element(dy.data(), dy.dtype(), back + i);
        store_element(dx.data(), dx.dtype(), to + i, factor * (gradient * weights[i] - unit * dot));
      }
    }
  });
  for (std::int64_t i = 0; i < dim; ++i) {
    double sum = load_element(dweight.data(), dweight.dtype(), i);
    for (std::int64_t task = 0; task < tasks; ++task) {
      sum += partial[static_cast<std::size_t>(task * dim + i)];
    }
    store_element(dweight.data(), dweight.dtype(), i, sum);
  }
}

}  // namespace ladon
