// What the families' cases are put together from: tensors under their names, and for each number of
// a head the row of the tensor that holds it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "models/model_folder.h"

namespace ladon::test {

/// The sizes of a case.
struct Sizes {
  int embed, heads, kv_heads, head_dim;
};

/// A linear layer's tensors, of a size that keeps results near 1.
void add_linear(TensorMap& tensors, TensorMaker& maker, const std::string& name, const Dims& shape,
                int in, int bias_size);
PlainLinear linear_of(const TensorMap& tensors, const std::string& name, bool transposed = false);

/// What a family's plain attention has besides its projections.
using Finish = std::function<void(PlainAttention& plain, int layer)>;

/// "model.layers.%.self_attn." with the layer's number.
std::string layer_prefix(const std::string& prefix, int layer);

struct Names {
  std::string query = "q_proj", key = "k_proj", value = "v_proj", out = "o_proj";
};

/// Families with three input projections: head h of a projection is its rows [h d, (h + 1) d).
FamilyCase separate_case(FamilyCase setup, const Sizes& sizes, bool qkv_bias, bool out_bias,
                         const Finish& finish, const Names& names = {});

/// The row of the fused tensor that holds a number of a head.
struct FusedRows {
  std::function<int(int head, int place)> query, key, value;
};

/// Families with one input projection.
FamilyCase fused_case(FamilyCase setup, const Sizes& sizes, const std::string& fused,
                      const std::string& out, const FusedRows& rows, bool bias,
                      const Finish& finish, bool transposed = false);

/// Multi-query: all query heads, then the key, then the value.
FusedRows multi_query_rows(const Sizes& sizes);
/// Each head's query, key and value together.
FusedRows per_head_rows(const Sizes& sizes);
/// Each KV head's queries, then its key, then its value.
FusedRows per_group_rows(const Sizes& sizes);
/// Queries, keys and values one after the other.
FusedRows thirds_rows(const Sizes& sizes);

/// The parts of family_cases().
std::vector<FamilyCase> llama_cases();
std::vector<FamilyCase> qwen_and_gemma_cases();
std::vector<FamilyCase> falcon_cases();
std::vector<FamilyCase> gpt_and_bert_cases();
std::vector<FamilyCase> deepseek_cases();
std::vector<FamilyCase> converted_cases();
std::vector<FamilyCase> newer_cases();

/// A case whose tensors are called as Llama's.
FamilyCase llama_like(const std::string& name, const std::string& family, const std::string& config,
                      int num_layers = 2, const std::string& outer = "model.");

}  // namespace ladon::test
