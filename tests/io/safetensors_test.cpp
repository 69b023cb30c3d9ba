// SafetensorsFile and write_safetensors(): other people's files, round trips, and what a view of a
// mapped file is.
#include "ladon/safetensors.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::host_context;

using namespace test;

using Names = std::vector<std::string>;

/// What each failure of the reference implementation is called there, and what we say.
const std::map<std::string, std::string> kMessages = {
    {"MetadataIncompleteBuffer", "bytes of data"},
    {"HeaderTooLarge", "expected at most 100000000"},
    {"HeaderTooSmall", "expected 8 or more"},
    {"InvalidHeaderLength", "that the file has left"},
    {"InvalidHeader", "not a JSON object"},
    {"InvalidHeaderDeserialization", "invalid JSON"},
    {"TensorInvalidInfo", "for I32 of shape [2, 2], expected 16 bytes"},
    {"ValidationOverflow", "64 bits"},
    {"InvalidOffset", "overlaps"},
};

/// Everything that can be asked of a file, for what must not crash.
void read_everything(const SafetensorsFile& file) {
  for (const SafetensorsEntry& entry : file.entries()) {
    if (!entry.dtype) continue;
    const Tensor loaded = file.load(entry.name);
    EXPECT_EQ(bytes_of(loaded).size(), entry.num_bytes);
    EXPECT_EQ(file.load(entry.name, DType::kF64).shape(), loaded.shape());
  }
}

TEST(SafetensorsConformance, EveryFileBehavesAsTheIndexSays) {
  const std::filesystem::path folder = conformance_folder("safetensors_cases");
  const std::vector<IndexLine> lines = read_conformance_index(folder);
  if (lines.empty()) GTEST_SKIP() << "no cases in " << folder;
  for (const auto& [name, expected] : lines) {
    SCOPED_TRACE(name + ": " + expected);
    const std::filesystem::path path = folder / name;
    if (expected.starts_with("OK")) {
      EXPECT_NO_THROW(read_everything(SafetensorsFile::open(path)));
      continue;
    }
    const std::string message = error_of([&] { SafetensorsFile::open(path); }, ErrorCode::kIo);
    EXPECT_TRUE(message.starts_with("SafetensorsFile: " + path.string() + ": ")) << message;
    if (name.starts_with("validation_overflow.")) {
      EXPECT_NE(message.find("tensor \"test\": got a size of 18446744073709551614, expected one"),
                std::string::npos)
          << message;
      continue;
    }
    const std::string kind = expected.substr(0, expected.find(' '));
    ASSERT_TRUE(kMessages.contains(kind));
    EXPECT_NE(message.find(kMessages.at(kind)), std::string::npos) << message;
  }
}

TEST(SafetensorsConformance, WritesTheReferenceImplementationsBytes) {
  const std::filesystem::path folder = conformance_folder("safetensors_cases");
  if (read_conformance_index(folder).empty()) GTEST_SKIP() << "no cases in " << folder;
  const TempFolder temp;
  const Tensor values = Tensor::from_values(DType::kF32, {1, 2, 3}, {0, 1, 2, 3, 4, 5});
  const SafetensorsItem item{"attn.0", values};
  const SafetensorsItem reshaped{"attn0", values.view().reshape({1, 1, 2, 3})};
  const auto written = [&](std::vector<SafetensorsItem> items,
                           const std::map<std::string, std::string>& metadata = {}) {
    write_safetensors(temp / "x", items, metadata);
    return read_bytes(temp / "x");
  };
  const auto wanted = [&](const char* name) { return read_bytes(folder / name); };
  EXPECT_EQ(written({item}), wanted("valid_serialization.safetensors"));
  EXPECT_EQ(written({reshaped}), wanted("valid_serialization_forced_alignement.safetensors"));
  EXPECT_EQ(written({}), wanted("valid_empty.safetensors"));
  EXPECT_EQ(written({}, {{"framework", "pt"}}), wanted("valid_empty_with_metadata.safetensors"));
}

TEST(Safetensors, EveryDTypeAndShapeComesBack) {
  const TempFolder temp;
  std::vector<Tensor> tensors;
  std::vector<SafetensorsItem> items;
  for (const Dims& shape :
       {Dims{}, Dims{7}, Dims{2, 3}, Dims{3, 0, 5}, Dims{1, 2, 1, 2, 1, 2, 1, 2}}) {
    for (const DType dtype : kAllDTypes) {
      tensors.push_back(counting_bytes(dtype, shape, static_cast<unsigned>(tensors.size())));
    }
  }
  for (const Tensor& tensor : tensors) {
    items.push_back({std::string(name_of(tensor.dtype())) + tensor.shape().to_string(), tensor});
  }
  const std::map<std::string, std::string> metadata = {
      {"format", "pt"}, {"quotes \" and \\ and \n\t\x01", "gr\xc3\xbc\xc3\x9f"}, {"", ""}};
  write_safetensors(temp / "all.safetensors", items, metadata);

  const SafetensorsFile file = SafetensorsFile::open(temp / "all.safetensors");
  EXPECT_EQ(file.path(), temp / "all.safetensors");
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.entries().size(), items.size());
  EXPECT_EQ(file.names().size(), items.size());
  for (const SafetensorsItem& item : items) {
    SCOPED_TRACE(item.name);
    ASSERT_TRUE(file.has(item.name));
    EXPECT_EQ(file.entry(item.name).dtype, item.view.dtype());
    const ConstTensorView view = file.tensor(item.name);
    EXPECT_EQ(view.dtype(), item.view.dtype());
    EXPECT_EQ(view.shape(), item.view.shape());
    EXPECT_EQ(bytes_of(view), bytes_of(item.view));
    EXPECT_FALSE(view.absent());
    const Tensor loaded = file.load(item.name);
    EXPECT_EQ(loaded.dtype(), item.view.dtype());
    EXPECT_EQ(loaded.shape(), item.view.shape());
    EXPECT_EQ(bytes_of(loaded), bytes_of(item.view));
    for (const DType dtype : kAllDTypes) {
      EXPECT_EQ(bytes_of(file.load(item.name, dtype)),
                bytes_of(Tensor::copy_of(host_context(), item.view, dtype)));
    }
  }
  EXPECT_FALSE(file.has("absent"));
  EXPECT_FALSE(file.has(""));
}

TEST(Safetensors, TensorsLieByTypeAndThenByName) {
  const TempFolder temp;
  std::vector<SafetensorsItem> items;
  std::vector<Tensor> tensors;
  for (const DType dtype : kAllDTypes) tensors.emplace_back(dtype, Dims{2});
  for (const Tensor& tensor : tensors) {
    items.push_back({std::string("b_") + name_of(tensor.dtype()), tensor});
    items.push_back({std::string("a_") + name_of(tensor.dtype()), tensor});
  }
  write_safetensors(temp / "x", items);
  Names expected;
  // The order of the reference implementation's list of types, from its end.
  for (const char* name : {"u64", "i64", "f64", "f32", "u32", "i32", "bf16", "f16", "u16", "i16",
                           "i8", "u8", "bool"}) {
    expected.push_back(std::string("a_") + name);
    expected.push_back(std::string("b_") + name);
  }
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  EXPECT_EQ(file.names(), expected);
  EXPECT_EQ(file.entries().front().file_offset % 8, 0U);
}

TEST(Safetensors, StridedViewsAndOddBoolsAreWrittenDense) {
  const TempFolder temp;
  const Tensor values = Tensor::from_values(DType::kF32, {2, 3}, {0, 1, 2, 3, 4, 5});
  const std::array<std::uint8_t, 4> bytes = {0, 1, 2, 255};
  const std::vector<SafetensorsItem> items = {
      {"transposed", values.view().transpose(0, 1)},
      {"row", ConstTensorView(values.data(), DType::kF32, {2, 3}, {0, 1})},
      {"bools", ConstTensorView(bytes.data(), DType::kBool, {4})}};
  write_safetensors(temp / "x", items);
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  for (const SafetensorsItem& item : std::span(items).first(2)) {
    EXPECT_EQ(bytes_of(file.tensor(item.name)), bytes_of(item.view));
  }
  EXPECT_EQ(bytes_of(file.tensor("bools")), std::string("\0\1\1\1", 4));
}

TEST(Safetensors, ViewsAreTheMappingItself) {
  const TempFolder temp;
  const Tensor values = counting_bytes(DType::kI16, {5});
  const std::vector<SafetensorsItem> items = {{"a", values}, {"b", values}};
  write_safetensors(temp / "x", items);
  SafetensorsFile file = SafetensorsFile::open(temp / "x");
  const ConstTensorView a = file.tensor("a");
  const ConstTensorView b = file.tensor("b");
  EXPECT_EQ(a.data(), file.tensor("a").data());
  EXPECT_EQ(static_cast<const char*>(a.data()) + 10, b.data());
  // Moving the object moves no memory; nor does replacing the file by another of its name.
  const SafetensorsFile moved = std::move(file);
  EXPECT_EQ(moved.tensor("a").data(), a.data());
  const std::string before = bytes_of(a);
  const Tensor other(DType::kI16, {5});
  write_safetensors(temp / "x", std::vector<SafetensorsItem>{{"a", other}});
  EXPECT_EQ(bytes_of(a), before);
  EXPECT_EQ(bytes_of(moved.load("b")), before);
}

TEST(Safetensors, UnalignedDataIsLoadedAndNotMapped) {
  const TempFolder temp;
  write_bytes(temp / "x",
              safetensors_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                R"("b":{"dtype":"I32","shape":[1],"data_offsets":[1,5]},)"
                                R"("c":{"dtype":"I32","shape":[0],"data_offsets":[5,5]}} )",
                                std::string("\7\1\0\0\0", 5)));
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  EXPECT_EQ(bytes_of(file.tensor("a")), "\7");
  const std::uint64_t offset = file.entry("b").file_offset;
  ASSERT_NE(offset % 4, 0U);
  EXPECT_EQ(error_of([&] { static_cast<void>(file.tensor("b")); }, ErrorCode::kUnsupported),
            "SafetensorsFile: " + (temp / "x").string() + ": tensor \"b\": got data at byte " +
                std::to_string(offset) +
                " of the file, expected a multiple of 4 (load() copies it)");
  EXPECT_EQ(*file.load("b").data_as<std::int32_t>(), 1);
  EXPECT_EQ(*file.load("b", DType::kF64).data_as<double>(), 1);
  EXPECT_EQ(file.tensor("c").shape(), Dims{0});
}

TEST(Safetensors, OtherTypesAndHigherRanksAreListed) {
  const TempFolder temp;
  const std::string header =
      R"({"q":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[0,4]},)"
      R"("n":{"dtype":"F4","shape":[6],"data_offsets":[4,7]},)"
      R"("r":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[7,8]}})";
  write_bytes(temp / "x", safetensors_bytes(header, "12345678"));
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  const std::string prefix = "SafetensorsFile: " + (temp / "x").string() + ": tensor ";
  EXPECT_EQ(file.entry("q").dtype_name, "F8_E4M3");
  EXPECT_EQ(file.entry("q").dtype, std::nullopt);
  EXPECT_EQ(file.entry("q").num_bytes, 4U);
  EXPECT_EQ(file.entry("n").num_bytes, 3U);
  EXPECT_EQ(file.entry("r").shape.size(), 9U);
  const std::string expected =
      prefix +
      "\"q\": got dtype F8_E4M3, which is not supported, expected F64, F32, F16, BF16, "
      "BOOL or an integer";
  EXPECT_EQ(error_of([&] { static_cast<void>(file.tensor("q")); }, ErrorCode::kUnsupported),
            expected);
  EXPECT_EQ(error_of([&] { file.load("q"); }, ErrorCode::kUnsupported), expected);
  EXPECT_EQ(error_of([&] { file.load("q", DType::kF32); }, ErrorCode::kUnsupported), expected);
  EXPECT_EQ(error_of([&] { file.load("r"); }, ErrorCode::kUnsupported),
            prefix + "\"r\": got 9 dimensions, expected at most 8");
}

TEST(Safetensors, NamesAreInTheOrderOfTheBytes) {
  const TempFolder temp;
  const std::string header = R"({"late":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},)"
                             R"("none":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},)"
                             R"("also none":{"dtype":"U8","shape":[4,0],"data_offsets":[2,2]},)"
                             R"("early":{"data_offsets":[0,2],"dtype":"U8","shape":[2]}})";
  write_bytes(temp / "x", safetensors_bytes(header, "abc"));
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  EXPECT_EQ(file.names(), (Names{"early", "none", "also none", "late"}));
  EXPECT_EQ(bytes_of(file.tensor("early")), "ab");
  EXPECT_EQ(bytes_of(file.tensor("late")), "c");
}

TEST(Safetensors, LargeTensorsAreConvertedByPieces) {
  const TempFolder temp;
  Tensor values(DType::kI32, {3, 50021});
  auto* numbers = values.data_as<std::int32_t>();
  for (int i = 0; i < values.num_elements(); ++i) numbers[i] = i * 7919;
  write_safetensors(temp / "x", std::vector<SafetensorsItem>{{"a", values}});
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  EXPECT_EQ(bytes_of(file.load("a", DType::kF64)),
            bytes_of(Tensor::copy_of(host_context(), values, DType::kF64)));
}

TEST(Safetensors, ConstUseFromManyThreads) {
  const TempFolder temp;
  const Tensor values = counting_bytes(DType::kF32, {1000});
  write_safetensors(temp / "x", std::vector<SafetensorsItem>{{"a", values}, {"b", values}});
  const SafetensorsFile file = SafetensorsFile::open(temp / "x");
  const std::string expected = bytes_of(values);
  std::vector<std::thread> threads;
  std::array<int, 4> good{};
  for (int& count : good) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        count += bytes_of(file.load("a")) == expected && bytes_of(file.tensor("b")) == expected;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : good) EXPECT_EQ(count, 20);
}

}  // namespace
}  // namespace ladon
