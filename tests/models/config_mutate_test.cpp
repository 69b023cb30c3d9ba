// Thousands of damaged configs, made from those of the families: each is described or refused.
// tests/fuzz/fuzz_model_config.cpp searches the same reader without an end.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "io/io_support.h"
#include "io/mutations.h"
#include "ladon/checkpoint.h"
#include "models/model_folder.h"

namespace ladon::test {
namespace {

TEST(Mutations, ModelConfigs) {
  const TempFolder temp;
  std::vector<std::string> corpus;
  for (const FamilyCase& setup : family_cases()) corpus.push_back(setup.config);
  const std::vector<std::string> words = {"0",
                                          "1",
                                          "-1",
                                          "3",
                                          "0.5",
                                          "1e9",
                                          "9223372036854775807",
                                          "18446744073709551616",
                                          "null",
                                          "true",
                                          "false",
                                          "[",
                                          "]",
                                          "{",
                                          "}",
                                          ",",
                                          ":",
                                          "\"",
                                          "\"rope_scaling\":",
                                          "\"rope_parameters\":{\"rope_type\":\"yarn\"},",
                                          "\"layer_types\":[\"full_attention\"],",
                                          "\"head_dim\":2,",
                                          "\"llama\"",
                                          "\"falcon\"",
                                          "\"alibi\":true,",
                                          "\"deepseek_v3\"",
                                          "\"q_lora_rank\":null,",
                                          "\"mscale\":2,",
                                          "\xc3",
                                          std::string(1, '\0')};
  const Outcome outcome = run_mutations(corpus, words, 5, [&](const std::string& path) {
    std::filesystem::remove(temp / "config.json");
    std::filesystem::create_symlink(path, temp / "config.json");
    const ModelDescription model = describe_model(temp.path());
    // What passes is whole.
    ASSERT_EQ(static_cast<std::size_t>(model.num_layers), model.layers.size());
    ASSERT_EQ(model.num_heads % model.num_kv_heads, 0);
  });
  // Both happen, or the changes are too gentle or too harsh to find anything.
  EXPECT_GT(outcome.read, 100);
  EXPECT_GT(outcome.refused, 5000);
}

}  // namespace
}  // namespace ladon::test
