// Checkpoints of tensor-parallel layers, and of training.
//
// Files are those of one process: any number of ranks reads and writes them. A rank maps a file and
// reads its own slice of each weight, no more; writing gathers one tensor at a time on rank 0,
// which alone writes. Calls with a TensorParallelLayer are collective: where a file cannot be read
// or written on one rank, all ranks throw, and no layer, optimiser or file has changed. Ranks wait
// for the slowest reader or writer, so the communicator's deadline must allow for it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string_view>

#include "ladon/checkpoint.h"
#include "ladon/communicator.h"
#include "ladon/export.h"
#include "ladon/optim.h"
#include "ladon/tensor_parallel.h"

namespace ladon {

/// load_attention() over the ranks of a communicator, which must outlive the layer: a
/// TensorParallelAttention or a TensorParallelLatentAttention, in eval mode. Reads through the
/// file's mapping, which must not be shortened meanwhile (SafetensorsFile).
LADON_API std::unique_ptr<TensorParallelLayer> load_tensor_parallel_attention(
    const Context& context, Communicator& communicator, const std::filesystem::path& folder,
    std::int64_t layer_index, const LoadOptions& options = {});
/// The same for those who hold the model's tensors open already.
LADON_API std::unique_ptr<TensorParallelLayer> load_tensor_parallel_attention(
    const Context& context, Communicator& communicator, const ShardedSafetensors& weights,
    const ModelDescription& model, std::int64_t layer_index, const LoadOptions& options = {});

/// Writes what attention_tensors() of the whole layer would give to a safetensors file.
LADON_API void write_tensor_parallel_attention(const Context& context,
                                               const std::filesystem::path& path,
                                               const TensorParallelLayer& layer,
                                               std::string_view family, std::int64_t layer_index);

/// Writes a layer and the state of its optimiser to a safetensors file: whole weights under their
/// names, "adamw.first.NAME", "adamw.second.NAME" and, of 16-bit weights, "adamw.master.NAME"; the
/// number of steps among the metadata. The optimiser must be that of the layer's parameters, in
/// their order. Layers of one process too.
LADON_API void save_training(const Context& context, const std::filesystem::path& path,
                             const AttentionLayer& layer, const AdamW& optimiser);

/// Takes up training where save_training() was called: with as many ranks, the steps that follow
/// have the same bits as without a break.
LADON_API void load_training(const Context& context, const std::filesystem::path& path,
                             AttentionLayer& layer, AdamW& optimiser);

}  // namespace ladon
