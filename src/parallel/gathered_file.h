// A file of whole tensors, gathered from the slices of ranks one after the other.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors_writer.h"
#include "ladon/tensor_parallel.h"
#include "parallel/collective_call.h"

namespace ladon {

struct GatheredFile {
  std::vector<io::SafetensorsSpec> tensors;
  std::map<std::string, std::string> metadata{};
};

/// The rank that writes.
inline constexpr int kWriter = 0;

/// describe() checks a rank's arguments and says what the file is to hold; gather(call, i) brings
/// tensor i to the writer, on all ranks in the same order. The file gets its name when all is well
/// on all ranks; otherwise all of them throw.
void write_gathered(const Context& context, std::string_view operation,
                    const TensorParallelLayer& layer, const std::filesystem::path& path,
                    const std::function<GatheredFile(CallSignature&)>& describe,
                    const std::function<Tensor(CollectiveCall&, std::size_t)>& gather);

}  // namespace ladon
