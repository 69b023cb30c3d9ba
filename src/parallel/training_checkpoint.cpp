// save_training() and load_training(): weights and the state of AdamW in one file, whole, for
// layers of one process and of several ranks.

#include <charconv>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/compute_dtype.h"
#include "core/fail.h"
#include "io/file.h"
#include "ladon/parallel_checkpoint.h"
#include "parallel/gathered_file.h"
#include "parallel/tensor_parallel.h"

namespace ladon {
namespace {

constexpr std::string_view kSave = "save_training";
constexpr std::string_view kLoad = "load_training";
constexpr const char* kStepsKey = "adamw.steps";

/// One tensor of the file: a weight, or what the optimiser keeps of it.
struct Part {
  std::string name;
  std::size_t parameter = 0;
  Tensor AdamW::Moments::*moment = nullptr;  // null: the weight itself
};

std::vector<Part> parts_of(const AttentionLayer& layer, const AdamW& optimiser) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < layer.named_parameters().size(); ++i) {
    const std::string& name = layer.named_parameters()[i].name;
    parts.push_back({name, i});
    parts.push_back({"adamw.first." + name, i, &AdamW::Moments::first});
    parts.push_back({"adamw.second." + name, i, &AdamW::Moments::second});
    if (optimiser.states()[i].master.rank() != 0) {
      parts.push_back({"adamw.master." + name, i, &AdamW::Moments::master});
    }
  }
  return parts;
}

/// This rank's own.
const Tensor& tensor_of(const AttentionLayer& layer, const AdamW& optimiser, const Part& part) {
  if (part.moment == nullptr) return layer.named_parameters()[part.parameter].value;
  return optimiser.states()[part.parameter].*part.moment;
}

void check_optimiser(const Operation& operation, const AttentionLayer& layer,
                     const AdamW& optimiser) {
  check_device(operation, "layer", layer.device());
  const std::span<const Parameter> parameters = layer.named_parameters();
  bool same = parameters.size() == optimiser.states().size();
  for (std::size_t i = 0; same && i < parameters.size(); ++i) {
    const AdamW::State& state = optimiser.states()[i];
    same = state.parameter == &parameters[i] && state.dtype == parameters[i].value.dtype();
  }
  if (!same) {
    fail(operation, "optimiser",
         "got one for other parameters, expected that of the layer's, in their order");
  }
  for (const AdamW::State& state : optimiser.states()) {
    check_device(operation, "optimiser", state.first.device());
  }
}

const TensorParallelLayer* as_parallel(const AttentionLayer& layer) {
  return dynamic_cast<const TensorParallelLayer*>(&layer);
}

/// The rows of a whole parameter that the layer has, and their number in the whole.
TensorParallelLayer::Slice slice_of(const AttentionLayer& layer, const Parameter& parameter) {
  if (const TensorParallelLayer* const parallel = as_parallel(layer)) {
    return parallel->slice_of(parameter.name, parallel->communicator().rank());
  }
  return {.whole_rows = parameter.value.size(0), .rows = parameter.value.size(0)};
}

Dims whole_shape(const AttentionLayer& layer, const Parameter& parameter) {
  Dims shape = parameter.value.shape();
  shape[0] = slice_of(layer, parameter).whole_rows;
  return shape;
}

GatheredFile describe_file(const AttentionLayer& layer, const AdamW& optimiser,
                           const std::vector<Part>& parts) {
  GatheredFile file;
  for (const Part& part : parts) {
    file.tensors.push_back({part.name, tensor_of(layer, optimiser, part).dtype(),
                            whole_shape(layer, layer.named_parameters()[part.parameter])});
  }
  file.metadata[kStepsKey] = std::to_string(optimiser.steps_taken());
  return file;
}

[[noreturn]] void refuse(const SafetensorsFile& file, std::string_view what,
                         const std::string& reason) {
  fail(ErrorCode::kIo, kLoad, file.path().string() + ": " + std::string(what), reason);
}

std::int64_t read_steps(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kStepsKey);
  if (found == file.metadata().end()) {
    refuse(file, "metadata",
           "got no " + std::string(kStepsKey) + ", expected what save_training() wrote");
  }
  const std::string& text = found->second;
  std::int64_t steps = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), steps);
  if (error != std::errc() || end != text.data() + text.size() || steps < 0) {
    refuse(file, kStepsKey, "got " + io::in_quotes(text) + ", expected a number of steps");
  }
  return steps;
}

/// What a file brings, before anything is changed.
struct Loaded {
  std::int64_t steps = 0;
  std::vector<Tensor> values;
  std::vector<AdamW::Moments> moments;
};

Loaded read_training(const Context& context, const std::filesystem::path& path,
                     const AttentionLayer& layer, const AdamW& optimiser) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const std::vector<Part> parts = parts_of(layer, optimiser);
  if (file.entries().size() != parts.size()) {
    refuse(file, "tensors",
           "got " + std::to_string(file.entries().size()) + " of them, expected the " +
               std::to_string(parts.size()) + " of this layer and its optimiser");
  }
  Loaded loaded;
  loaded.steps = read_steps(file);
  loaded.values.resize(layer.named_parameters().size());
  loaded.moments.resize(layer.named_parameters().size());
  for (const Part& part : parts) {
    const ConstTensorView whole = file.tensor(part.name);
    const Parameter& parameter = layer.named_parameters()[part.parameter];
    const Tensor& own = tensor_of(layer, optimiser, part);
    const Dims expected = whole_shape(layer, parameter);
    if (whole.dtype() != own.dtype() || !(whole.shape() == expected)) {
      refuse(file, "tensor " + io::in_quotes(part.name),
             std::string("got ") + name_of(whole.dtype()) + " " + whole.shape().to_string() +
                 ", expected " + name_of(own.dtype()) + " " + expected.to_string());
    }
    const TensorParallelLayer::Slice slice = slice_of(layer, parameter);
    Tensor read = Tensor::uninitialized(context, own.dtype(), own.shape());
    copy(context, whole.slice(0, slice.first, slice.first + slice.rows), read);
    (part.moment == nullptr ? loaded.values[part.parameter]
                            : loaded.moments[part.parameter].*part.moment) = std::move(read);
  }
  context.synchronize();  // before the mapping goes
  return loaded;
}

}  // namespace

void save_training(const Context& context, const std::filesystem::path& path,
                   const AttentionLayer& layer, const AdamW& optimiser) {
  const Operation operation(kSave, context);
  std::vector<Part> parts;
  const TensorParallelLayer* const parallel = as_parallel(layer);
  if (parallel == nullptr) {
    check_optimiser(operation, layer, optimiser);
    parts = parts_of(layer, optimiser);
    const GatheredFile file = describe_file(layer, optimiser, parts);
    io::SafetensorsWriter writer(kSave, path, file.tensors, file.metadata);
    for (const std::size_t i : io::safetensors_order(file.tensors)) {
      writer.write(tensor_of(layer, optimiser, parts[i]).to_host());
    }
    return writer.commit();
  }
  write_gathered(
      context, kSave, *parallel, path,
      [&](CallSignature& signature) {
        check_optimiser(operation, layer, optimiser);
        signature.add("steps", optimiser.steps_taken());
        parts = parts_of(layer, optimiser);
        return describe_file(layer, optimiser, parts);
      },
      [&](CollectiveCall& call, std::size_t i) {
        return gather_rows(context, call, *parallel,
                           layer.named_parameters()[parts[i].parameter].name,
                           tensor_of(layer, optimiser, parts[i]), kWriter);
      });
}

void load_training(const Context& context, const std::filesystem::path& path, AttentionLayer& layer,
                   AdamW& optimiser) {
  const Operation operation(kLoad, context);
  Loaded loaded;
  const auto read = [&] {
    check_optimiser(operation, layer, optimiser);
    loaded = as_part_of(kLoad, [&] { return read_training(context, path, layer, optimiser); });
  };
  if (const TensorParallelLayer* const parallel = as_parallel(layer)) {
    run_collective(
        parallel->communicator(), kLoad,
        [&](CallSignature& signature) {
          read();
          parallel->describe(context, signature);
          signature.add("steps", loaded.steps);
        },
        [](CollectiveCall&) {}, [] {});
  } else {
    read();
  }
  optimiser.restore(loaded.steps, std::move(loaded.moments));
  for (std::size_t i = 0; i < loaded.values.size(); ++i) {
    Parameter& parameter = layer.named_parameters()[i];
    parameter.value = std::move(loaded.values[i]);
    ++parameter.generation;
  }
}

}  // namespace ladon
