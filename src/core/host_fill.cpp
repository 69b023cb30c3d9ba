#include <cstdint>

#include "core/element.h"
#include "core/host_copy.h"
#include "core/parallel.h"
#include "core/random_elements.h"

namespace ladon {
namespace {

// Elements of one task.
constexpr std::int64_t kElementsPerTask = std::int64_t{1} << 14;

double random_element(const RandomFillParams& params, std::int64_t index) {
  const PhiloxBlock block =
      random_block(static_cast<std::uint64_t>(index), params.stream, params.seed);
  const double first = to_unit(block.words[0], block.words[1]);
  switch (params.kind) {
    case RandomFillParams::Kind::kUniform: return params.a + (params.b - params.a) * first;
    case RandomFillParams::Kind::kNormal:
      return params.a + params.b * box_muller(first, to_unit(block.words[2], block.words[3]));
  }
  return 0;
}

/// function(begin, end) over ranges of [0, count), by the workers where there are some.
template <class Function>
void for_ranges(const Workers* workers, std::int64_t count, const Function& function) {
  if (workers == nullptr) return function(0, count);
  parallel_ranges(*workers, count, kElementsPerTask,
                  [&](std::int64_t begin, std::int64_t end, int) { function(begin, end); });
}

}  // namespace

void fill_on_host(const Workers* workers, const RandomFillParams& params) {
  const TensorView& view = params.view;
  const bool contiguous = view.is_contiguous();
  for_ranges(workers, view.num_elements(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      store_element(view.data(), view.dtype(), contiguous ? i : offset_of_element(view, i),
                    random_element(params, i));
    }
  });
}

}  // namespace ladon
