#include "layers/layer_weights.h"

#include "core/host_copy.h"

namespace ladon {

void fill_weight(Parameter& parameter, double low, double high, std::uint64_t seed,
                 std::uint64_t stream) {
  fill_on_host(nullptr, {.view = parameter.value,
                         .kind = RandomFillParams::Kind::kUniform,
                         .a = low,
                         .b = high,
                         .seed = seed,
                         .stream = stream});
}

}  // namespace ladon
