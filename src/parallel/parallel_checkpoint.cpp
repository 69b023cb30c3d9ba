// Tensor-parallel layers from the folders of published models, and back.

#include "ladon/parallel_checkpoint.h"

#include <string>
#include <utility>
#include <vector>

#include "core/host_copy.h"
#include "models/stored_tensors.h"
#include "parallel/gathered_file.h"
#include "parallel/tensor_parallel.h"

namespace ladon {
namespace {

constexpr std::string_view kLoad = "load_tensor_parallel_attention";
constexpr std::string_view kWrite = "write_tensor_parallel_attention";

/// Rows of a parameter's place in a file. In weights that are fused by KV heads a place is [KV
/// heads, heads of each, head_dim, ...]: there `rows` are whole KV heads, or heads of one of them.
ConstTensorView rows_of_place(const ConstTensorView& place, const TensorParallelLayer::Slice& slice,
                              bool by_heads) {
  if (!by_heads) return place.slice(0, slice.first, slice.first + slice.rows);
  const std::int64_t head_dim = place.size(2);
  const std::int64_t first = slice.first / head_dim;
  const std::int64_t count = slice.rows / head_dim;
  const std::int64_t of_each = place.size(1);
  if (count % of_each == 0) return place.slice(0, first / of_each, (first + count) / of_each);
  return place.slice(0, first / of_each, first / of_each + 1)
      .slice(1, first % of_each, first % of_each + count);
}

/// The tensor in the mapping, or, where old writers have left it unaligned, a copy.
ConstTensorView mapped_or_loaded(const models::TensorSource& source, const std::string& name,
                                 Tensor& loaded) {
  const SafetensorsEntry& entry = source.entry(name);
  if (entry.file_offset % size_of(*entry.dtype) == 0) return source.tensor(name);
  loaded = source.load(name);
  return loaded;
}

std::unique_ptr<TensorParallelLayer> make_layer(Communicator& communicator,
                                                const LayerOptions& options, DType dtype) {
  if (const auto* const latent = std::get_if<LatentAttentionOptions>(&options)) {
    LatentAttentionOptions complete = *latent;
    complete.dtype = dtype;
    return std::make_unique<TensorParallelLatentAttention>(communicator, complete);
  }
  auto complete = std::get<MultiHeadAttentionOptions>(options);
  complete.dtype = dtype;
  return std::make_unique<TensorParallelAttention>(communicator, complete);
}

std::unique_ptr<TensorParallelLayer> load_slices(const Context& context, Communicator& communicator,
                                                 const ShardedSafetensors& weights,
                                                 const ModelDescription& model,
                                                 std::int64_t layer_index,
                                                 const LoadOptions& options) {
  const models::TensorSource source(weights);
  const models::StoredLayer stored = models::stored_layer(source, model, layer_index);
  const DType dtype = models::check_layer(source, stored.names, stored.tensors, options.dtype);
  std::unique_ptr<TensorParallelLayer> layer = make_layer(communicator, stored.options, dtype);
  if (!context.device().is_cpu()) layer->to(context);
  for (const models::StoredTensor& tensor : stored.tensors) {
    Tensor loaded;
    const ConstTensorView whole =
        mapped_or_loaded(source, stored.names.prefix + tensor.name, loaded);
    const auto places = models::places_of(tensor, stored.options, whole);
    for (std::size_t i = 0; i < places.size(); ++i) {
      Tensor& value = layer->parameter(tensor.parameters[i]).value;
      const ConstTensorView rows =
          rows_of_place(places[i], layer->slice_of(tensor.parameters[i], communicator.rank()),
                        tensor.storage == models::QkvStorage::kGrouped);
      copy(context, rows, value.view().reshape(rows.shape()));
    }
    context.synchronize();  // before `loaded` is freed
  }
  layer->eval();
  return layer;
}

LayerOptions options_of(const TensorParallelLayer& layer) {
  if (const auto* const latent = dynamic_cast<const TensorParallelLatentAttention*>(&layer)) {
    return latent->options();
  }
  return dynamic_cast<const TensorParallelAttention&>(layer).options();
}

/// Loads in the check of a collective call, so that a failure of one rank is all ranks'.
template <class Load>
std::unique_ptr<TensorParallelLayer> load_on_all(const Context& context, Communicator& communicator,
                                                 const Load& load) {
  std::unique_ptr<TensorParallelLayer> layer;
  run_collective(
      communicator, kLoad,
      [&](CallSignature& signature) {
        layer = as_part_of(kLoad, load);
        layer->describe(context, signature);
      },
      [](CollectiveCall&) {}, [] {});
  return layer;
}

}  // namespace

std::unique_ptr<TensorParallelLayer> load_tensor_parallel_attention(
    const Context& context, Communicator& communicator, const ShardedSafetensors& weights,
    const ModelDescription& model, std::int64_t layer_index, const LoadOptions& options) {
  return load_on_all(context, communicator, [&] {
    return load_slices(context, communicator, weights, model, layer_index, options);
  });
}

std::unique_ptr<TensorParallelLayer> load_tensor_parallel_attention(
    const Context& context, Communicator& communicator, const std::filesystem::path& folder,
    std::int64_t layer_index, const LoadOptions& options) {
  return load_on_all(context, communicator, [&] {
    const ModelDescription model = describe_model(
        folder, {.ignored_fields = options.ignored_fields, .rope_context = options.rope_context});
    return load_slices(context, communicator, ShardedSafetensors::open(folder), model, layer_index,
                       options);
  });
}

void write_tensor_parallel_attention(const Context& context, const std::filesystem::path& path,
                                     const TensorParallelLayer& layer, std::string_view family,
                                     std::int64_t layer_index) {
  models::StoredLayer stored;
  std::vector<io::SafetensorsSpec> specs;
  write_gathered(
      context, kWrite, layer, path,
      [&](CallSignature& signature) {
        stored = models::stored_layer(options_of(layer), family, layer_index);
        for (const models::StoredTensor& tensor : stored.tensors) {
          specs.push_back({stored.names.prefix + tensor.name, layer.dtype(), tensor.shape});
        }
        signature.add("family", family);
        signature.add("layer_index", layer_index);
        return GatheredFile{specs, {}};
      },
      [&](CollectiveCall& call, std::size_t i) {
        const models::StoredTensor& tensor = stored.tensors[i];
        Tensor whole = Tensor::uninitialized(layer.dtype(), tensor.shape);
        const auto places = models::places_of(tensor, stored.options, whole.view());
        for (std::size_t part = 0; part < places.size(); ++part) {
          const std::string& name = tensor.parameters[part];
          const Tensor parameter =
              gather_rows(context, call, layer, name, layer.parameter(name).value, kWriter);
          if (call.rank() != kWriter) continue;
          copy_on_host(nullptr, parameter.view().reshape(places[part].shape()), places[part]);
        }
        return whole;
      });
}

}  // namespace ladon
