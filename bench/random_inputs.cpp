#include "random_inputs.h"

#include <algorithm>

#include "ladon/random.h"

namespace ladon::bench {

void fill_with_normal(const Context& context, const TensorView& view, std::uint64_t seed,
                      std::uint64_t stream) {
  constexpr std::int64_t kDrawn = std::int64_t{1} << 22;
  const std::int64_t count = view.num_elements();
  const TensorView flat = view.reshape({count});
  const TensorView drawn = flat.slice(0, 0, std::min(kDrawn, count));
  fill_normal(context, drawn, 0, 1, seed, stream);
  for (std::int64_t begin = kDrawn; begin < count; begin += kDrawn) {
    const std::int64_t length = std::min(kDrawn, count - begin);
    copy(context, drawn.slice(0, 0, length), flat.slice(0, begin, begin + length));
  }
}

}  // namespace ladon::bench
