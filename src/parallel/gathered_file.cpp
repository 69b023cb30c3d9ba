#include "parallel/gathered_file.h"

#include <exception>
#include <optional>

#include "core/checks.h"

namespace ladon {

void write_gathered(const Context& context, std::string_view operation,
                    const TensorParallelLayer& layer, const std::filesystem::path& path,
                    const std::function<GatheredFile(CallSignature&)>& describe,
                    const std::function<Tensor(CollectiveCall&, std::size_t)>& gather) {
  Communicator& communicator = layer.communicator();
  GatheredFile file;
  std::optional<io::SafetensorsWriter> writer;
  std::exception_ptr failure;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        check_device(Operation(operation, context), "layer", layer.device());
        layer.describe(context, signature);
        file = describe(signature);
        if (communicator.rank() == kWriter) {
          writer.emplace(operation, path, file.tensors, file.metadata);
        }
      },
      [&](CollectiveCall& call) {
        for (const std::size_t i : io::safetensors_order(file.tensors)) {
          const Tensor whole = gather(call, i);
          if (!writer.has_value() || failure != nullptr) continue;
          try {
            writer->write(whole);
          } catch (...) {
            failure = std::current_exception();  // a full disk must not break the communicator
          }
        }
      },
      [] {});
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        signature.add("step", "name the file");
        if (failure != nullptr) std::rethrow_exception(failure);
        if (writer.has_value()) writer->commit();
      },
      [](CollectiveCall&) {}, [] {});
}

}  // namespace ladon
