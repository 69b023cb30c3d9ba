// ShardedSafetensors: model folders of one file and of several, and indexes that are wrong.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "io/io_support.h"
#include "ladon/safetensors.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::host_context;

using namespace test;

using Names = std::vector<std::string>;

constexpr const char* kFirst = "model-00001-of-00002.safetensors";
constexpr const char* kSecond = "model-00002-of-00002.safetensors";

class Sharded : public testing::Test {
 protected:
  Sharded() {
    write_safetensors(temp_ / kFirst, std::vector<SafetensorsItem>{{"a", a_}, {"b", b_}});
    write_safetensors(temp_ / kSecond, std::vector<SafetensorsItem>{{"c", c_}});
    write_index(R"({"a":"%1","b":"%1","c":"%2"})");
  }
  /// %1 and %2 stand for the shards' names.
  void write_index(std::string weight_map, const std::string& before = "") {
    for (const auto& [mark, name] : {std::pair("%1", kFirst), std::pair("%2", kSecond)}) {
      for (std::size_t at = 0; (at = weight_map.find(mark)) != std::string::npos;) {
        weight_map.replace(at, 2, name);
      }
    }
    write_bytes(temp_ / "model.safetensors.index.json",
                "{" + before + "\"weight_map\":" + weight_map + "}");
  }
  std::string index_refusal() {
    const std::string message =
        error_of([&] { ShardedSafetensors::open(temp_.path()); }, ErrorCode::kIo);
    const std::string prefix =
        "ShardedSafetensors: " + (temp_ / "model.safetensors.index.json").string() + ": ";
    EXPECT_TRUE(message.starts_with(prefix)) << message;
    return message.substr(std::min(prefix.size(), message.size()));
  }

  TempFolder temp_;
  Tensor a_ = counting_bytes(DType::kF32, {2, 2}, 1);
  Tensor b_ = counting_bytes(DType::kF16, {3}, 2);
  Tensor c_ = counting_bytes(DType::kI64, {1}, 3);
};

TEST_F(Sharded, TensorsComeFromTheirShards) {
  const ShardedSafetensors model = ShardedSafetensors::open(temp_.path());
  EXPECT_EQ(model.folder(), temp_.path());
  EXPECT_EQ(model.names(), (Names{"a", "b", "c"}));
  EXPECT_EQ(model.shards(), (Names{kFirst, kSecond}));
  EXPECT_TRUE(model.has("c"));
  EXPECT_FALSE(model.has("d"));
  EXPECT_EQ(model.shard_of("c"), kSecond);
  EXPECT_EQ(model.entry("b").dtype, DType::kF16);
  EXPECT_EQ(bytes_of(model.tensor("a")), bytes_of(a_));
  EXPECT_EQ(bytes_of(model.load("b")), bytes_of(b_));
  EXPECT_EQ(bytes_of(model.load("c", DType::kF64)),
            bytes_of(Tensor::copy_of(host_context(), c_, DType::kF64)));
  EXPECT_EQ(&model.file_of("a"), &model.file_of("b"));
  EXPECT_EQ(model.file_of("c").path(), temp_ / kSecond);
  EXPECT_EQ(model.tensor("a").data(), model.tensor("a").data());
}

TEST_F(Sharded, ShardsAreOpenedWhenTheyAreWanted) {
  std::filesystem::remove(temp_ / kSecond);
  const ShardedSafetensors model = ShardedSafetensors::open(temp_.path());
  EXPECT_EQ(bytes_of(model.load("a")), bytes_of(a_));
  const std::string missing =
      "SafetensorsFile: " + (temp_ / kSecond).string() +
      ": got \"No such file or directory\", expected a file that can be read";
  EXPECT_EQ(error_of([&] { model.load("c"); }, ErrorCode::kIo), missing);
  // A failure is not remembered.
  write_safetensors(temp_ / kSecond, std::vector<SafetensorsItem>{{"c", c_}});
  EXPECT_EQ(bytes_of(model.load("c")), bytes_of(c_));
}

TEST_F(Sharded, ASingleFileNeedsNoIndex) {
  std::filesystem::rename(temp_ / kFirst, temp_ / "model.safetensors");
  const ShardedSafetensors model = ShardedSafetensors::open(temp_.path());
  EXPECT_EQ(model.names(), (Names{"a", "b"}));
  EXPECT_EQ(model.shards(), Names{"model.safetensors"});
  EXPECT_EQ(bytes_of(model.tensor("a")), bytes_of(a_));
}

TEST_F(Sharded, MissingTensorsAndFolders) {
  const ShardedSafetensors model = ShardedSafetensors::open(temp_.path());
  const std::string expected = "ShardedSafetensors: " + temp_.path().string() +
                               ": tensor \"q\": got none, expected it among the folder's 3 tensors";
  EXPECT_EQ(error_of([&] { model.load("q"); }, ErrorCode::kIo), expected);
  EXPECT_EQ(error_of([&] { static_cast<void>(model.shard_of("q")); }, ErrorCode::kIo), expected);
  EXPECT_EQ(error_of([&] { ShardedSafetensors::open(temp_ / "none"); }, ErrorCode::kIo),
            "ShardedSafetensors: " + (temp_ / "none").string() +
                ": got neither model.safetensors nor model.safetensors.index.json, expected a "
                "folder with one of them");
}

TEST_F(Sharded, IndexAndShardsMustAgree) {
  write_index(R"({"a":"%1","b":"%1","c":"%2","lost":"%2"})");
  const ShardedSafetensors lost = ShardedSafetensors::open(temp_.path());
  EXPECT_EQ(error_of([&] { lost.load("c"); }, ErrorCode::kIo),
            "ShardedSafetensors: " + (temp_ / kSecond).string() +
                ": tensor \"lost\": got none, expected it in this shard by the index");
  EXPECT_EQ(bytes_of(lost.load("a")), bytes_of(a_));

  // Both shards hold "a": which one is meant?
  write_safetensors(temp_ / kSecond, std::vector<SafetensorsItem>{{"c", c_}, {"a", a_}});
  write_index(R"({"a":"%1","b":"%1","c":"%2"})");
  const ShardedSafetensors twice = ShardedSafetensors::open(temp_.path());
  EXPECT_EQ(error_of([&] { twice.load("c"); }, ErrorCode::kIo),
            "ShardedSafetensors: " + (temp_ / kSecond).string() +
                ": tensor \"a\": got it in this shard, expected it in \"" + kFirst +
                "\" alone by the index");
}

TEST_F(Sharded, DamagedShardsAreNamed) {
  const std::string bytes = read_bytes(temp_ / kSecond);
  write_bytes(temp_ / kSecond, std::string_view(bytes).substr(0, bytes.size() - 1));
  const ShardedSafetensors model = ShardedSafetensors::open(temp_.path());
  EXPECT_EQ(error_of([&] { static_cast<void>(model.tensor("c")); }, ErrorCode::kIo),
            "SafetensorsFile: " + (temp_ / kSecond).string() +
                ": tensor \"c\": got data_offsets [0, 8], expected a range within the file's 7 "
                "bytes of data");
}

TEST_F(Sharded, OtherFieldsOfTheIndexArePassedOver) {
  write_index(
      R"({"a":"%1"})",
      R"("metadata":{"total_size":1.5e3,"weight_map":{"x":[{"y":null}]}},"more":[[true]],)");
  EXPECT_EQ(ShardedSafetensors::open(temp_.path()).names(), Names{"a"});
  write_index("{}");
  EXPECT_EQ(ShardedSafetensors::open(temp_.path()).names(), Names());
  std::string deep = "\"metadata\":";
  deep += std::string(1'000'000, '[') + std::string(1'000'000, ']') + ",";
  write_index(R"({"a":"%1"})", deep);
  EXPECT_EQ(ShardedSafetensors::open(temp_.path()).names(), Names{"a"});
}

TEST_F(Sharded, WrongIndexes) {
  write_index("3");
  EXPECT_EQ(index_refusal(), "got 3 for weight_map, expected an object");
  write_index("[]");
  EXPECT_EQ(index_refusal(), "got an array for weight_map, expected an object");
  write_index("\"a\"");
  EXPECT_EQ(index_refusal(), "got the text \"a\" for weight_map, expected an object");
  write_index(R"({"a":1})");
  EXPECT_EQ(index_refusal(), "tensor \"a\": got 1, expected a shard's name");
  write_index(R"({"a":{}})");
  EXPECT_EQ(index_refusal(), "tensor \"a\": got an object, expected a shard's name");
  write_index(R"({"a":"%1","a":"%2"})");
  EXPECT_EQ(index_refusal(), "tensor \"a\": got it twice in weight_map, expected it once");
  write_index("{}", "\"weight_map\":{},");
  EXPECT_EQ(index_refusal(), "got weight_map twice, expected it once");
  for (const std::string name :
       {"", ".", "..", "../x", "/etc/passwd", "a/b", "a\\\\b", "a\\u0000"}) {
    write_index("{\"a\":\"" + name + "\"}");
    EXPECT_NE(index_refusal().find("expected the name of a file in the same folder"),
              std::string::npos)
        << name;
  }
  const std::filesystem::path index = temp_ / "model.safetensors.index.json";
  write_bytes(index, "{}");
  EXPECT_EQ(index_refusal(), "got no weight_map, expected one");
  write_bytes(index, "");
  EXPECT_EQ(index_refusal(),
            "index: got text that is not a JSON object, expected one that begins with '{'");
  write_bytes(index, "{\"weight_map\":{}");
  EXPECT_NE(index_refusal().find("got invalid JSON or UTF-8"), std::string::npos);
}

TEST_F(Sharded, ManyThreadsOpenOneShardOnce) {
  const ShardedSafetensors model = ShardedSafetensors::open(temp_.path());
  std::array<const SafetensorsFile*, 4> files{};
  std::vector<std::thread> threads;
  for (const SafetensorsFile*& file : files) {
    threads.emplace_back([&] { file = &model.file_of("a"); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const SafetensorsFile* file : files) EXPECT_EQ(file, files[0]);
}

}  // namespace
}  // namespace ladon
