// Files that cannot be trusted: each is refused by name, and none is read beyond its end.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "io/memory_file.h"
#include "ladon/safetensors.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using namespace test;

class SafetensorsErrors : public testing::Test {
 protected:
  /// The message about a file of these bytes, without what all of them begin with.
  std::string refusal(const std::string& bytes) {
    write_bytes(path_, bytes);
    const std::string message = error_of([&] { SafetensorsFile::open(path_); }, ErrorCode::kIo);
    const std::string prefix = "SafetensorsFile: " + path_.string() + ": ";
    EXPECT_TRUE(message.starts_with(prefix)) << message;
    return message.substr(std::min(prefix.size(), message.size()));
  }
  std::string header_refusal(const std::string& header, const std::string& data = "") {
    return refusal(safetensors_bytes(header, data));
  }
  /// About the one tensor "t", described by `fields`.
  std::string tensor_refusal(const std::string& fields, const std::string& data = "") {
    const std::string message = header_refusal("{\"t\":" + fields + "}", data);
    EXPECT_TRUE(message.starts_with("tensor \"t\": ")) << message;
    return message.substr(std::min<std::size_t>(12, message.size()));
  }

  TempFolder temp_;
  std::filesystem::path path_ = temp_ / "bad.safetensors";
};

TEST_F(SafetensorsErrors, LengthOfTheHeader) {
  EXPECT_EQ(refusal("1234567"),
            "got 7 bytes, expected 8 or more: the header's length stands there");
  EXPECT_EQ(refusal(std::string("\x05\0\0\0\0\0\0\0{}", 10)),
            "got a header of 5 bytes, expected at most the 2 that the file has left");
  EXPECT_EQ(refusal(std::string(8, '\xff')),
            "got a header of 18446744073709551615 bytes, expected at most 100000000");
}

TEST_F(SafetensorsErrors, HeadersThatAreNoObjects) {
  const std::string none =
      "header: got text that is not a JSON object, expected one that begins with '{'";
  for (const std::string header :
       {"", " ", "[]", "1", "null", "\"{}\"", "\xef\xbb\xbf{}", "\xff"}) {
    EXPECT_EQ(header_refusal(header), none) << header;
  }
  // A zero byte does not end the text.
  EXPECT_EQ(header_refusal(std::string("{}\0{", 4)), none);
  EXPECT_EQ(header_refusal("{} {}"),
            "got invalid JSON or UTF-8 at byte 4 of the header, expected a JSON object");
  for (const char* header : {"{", "{]", "{} x", "{'a':1}", "{\"\xc3\x28\":1}", "{\"\\ud800\":1}",
                             "{,}", "{\"__metadata__\":{},}", "{/**/}", "{\"a\":{\"shape\":[01]}}",
                             "{\"a\":{\"shape\":[1,]}}", "{\"a\"}", "{\"a\n\":1}"}) {
    EXPECT_NE(header_refusal(header).find("got invalid JSON or UTF-8 at byte"), std::string::npos)
        << header;
  }
}

TEST_F(SafetensorsErrors, Metadata) {
  EXPECT_EQ(header_refusal(R"({"__metadata__":1})"),
            "__metadata__: got 1, expected an object of texts");
  EXPECT_EQ(header_refusal(R"({"__metadata__":[]})"),
            "__metadata__: got an array, expected an object of texts");
  EXPECT_EQ(header_refusal(R"({"__metadata__":{"a":1}})"),
            "__metadata__: got 1 for \"a\", expected a text");
  EXPECT_EQ(header_refusal(R"({"__metadata__":{"a":{}}})"),
            "__metadata__: got an object for \"a\", expected a text");
  EXPECT_EQ(header_refusal(R"({"__metadata__":{"a":"b","a":"b"}})"),
            "__metadata__: got the key \"a\" twice, expected it once");
  EXPECT_EQ(header_refusal(R"({"__metadata__":{},"__metadata__":{}})"),
            "got __metadata__ twice, expected it once");
}

TEST_F(SafetensorsErrors, FieldsOfATensor) {
  const std::string three = "dtype, shape and data_offsets";
  EXPECT_EQ(tensor_refusal("3"), "got 3, expected an object with " + three);
  EXPECT_EQ(tensor_refusal("null"), "got null, expected an object with " + three);
  EXPECT_EQ(tensor_refusal("{}"), "got no dtype, expected " + three);
  EXPECT_EQ(tensor_refusal(R"({"dtype":"U8","data_offsets":[0,0]})"),
            "got no shape, expected " + three);
  EXPECT_EQ(tensor_refusal(R"({"dtype":"U8","shape":[0]})"),
            "got no data_offsets, expected " + three);
  EXPECT_EQ(tensor_refusal(R"({"dtype":"U8","strides":[1]})"),
            "got the field \"strides\", expected " + three);
  EXPECT_EQ(tensor_refusal(R"({"dtype":"U8","dtype":"U8"})"), "got dtype twice, expected it once");
  EXPECT_EQ(tensor_refusal(R"({"shape":[],"shape":[]})"), "got shape twice, expected it once");
  EXPECT_EQ(tensor_refusal(R"({"dtype":"F99"})"),
            "got dtype \"F99\", expected one of the format's");
  EXPECT_EQ(tensor_refusal(R"({"dtype":"f32"})"),
            "got dtype \"f32\", expected one of the format's");
  EXPECT_EQ(tensor_refusal(R"({"dtype":7})"), "got 7 for dtype, expected a text");
  EXPECT_EQ(tensor_refusal(R"({"dtype":["U8"]})"), "got an array for dtype, expected a text");
  EXPECT_EQ(tensor_refusal(R"({"shape":"2"})"), "got the text \"2\" for shape, expected an array");
  EXPECT_EQ(tensor_refusal(R"({"shape":{}})"), "got an object for shape, expected an array");
  EXPECT_EQ(tensor_refusal(R"({"shape":[-1]})"), "got -1 in shape, expected whole numbers");
  EXPECT_EQ(tensor_refusal(R"({"shape":[1.5]})"),
            "got the number \"1.5\" in shape, expected whole numbers");
  EXPECT_EQ(tensor_refusal(R"({"shape":[1e2]})"),
            "got the number \"1e2\" in shape, expected whole numbers");
  EXPECT_EQ(tensor_refusal(R"({"shape":[18446744073709551616]})"),
            "got the number \"18446744073709551616\" in shape, expected whole numbers");
  EXPECT_EQ(tensor_refusal(R"({"shape":[true]})"), "got true in shape, expected whole numbers");
  EXPECT_EQ(tensor_refusal(R"({"shape":[[1]]})"), "got an array in shape, expected whole numbers");
  EXPECT_EQ(tensor_refusal(R"({"data_offsets":[0,0,0]})"),
            "got more than two data_offsets, expected a begin and an end");
  EXPECT_EQ(tensor_refusal(R"({"dtype":"U8","shape":[0],"data_offsets":[0]})"),
            "got 1 data_offsets, expected a begin and an end");
  std::string ones = "1";
  for (int i = 1; i < 65; ++i) ones += ",1";
  EXPECT_EQ(tensor_refusal("{\"shape\":[" + ones + "]}"),
            "got more than 64 dimensions, expected at most 64");
}

TEST_F(SafetensorsErrors, SizesAndOffsets) {
  const auto refuse = [&](const std::string& dtype, const std::string& shape,
                          const std::string& offsets, const std::string& data) {
    return tensor_refusal("{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
                              "],\"data_offsets\":[" + offsets + "]}",
                          data);
  };
  EXPECT_EQ(refuse("U8", "2", "2,0", "ab"),
            "got data_offsets [2, 0], expected a range within the file's 2 bytes of data");
  EXPECT_EQ(refuse("U8", "3", "0,3", "ab"),
            "got data_offsets [0, 3], expected a range within the file's 2 bytes of data");
  EXPECT_EQ(
      refuse("U8", "0", "18446744073709551615,18446744073709551615", "a"),
      "got data_offsets [18446744073709551615, 18446744073709551615], expected a range within "
      "the file's 1 bytes of data");
  EXPECT_EQ(refuse("I16", "1", "0,1", "a"),
            "got data_offsets [0, 1] for I16 of shape [1], expected 2 bytes");
  EXPECT_EQ(refuse("I16", "", "0,1", "a"),
            "got data_offsets [0, 1] for I16 of shape [], expected 2 bytes");
  EXPECT_EQ(refuse("F4", "3", "0,1", "a"),
            "got F4 of shape [3], expected a whole number of bytes that fits 64 bits");
  for (const char* shape :
       {"2, 9223372036854775807", "4294967296, 4294967296", "0, 9223372036854775807",
        "3037000500, 0, 3037000500", "9223372036854775807"}) {
    EXPECT_EQ(refuse("F64", shape, "0,0", ""),
              "got F64 of shape [" + std::string(shape) +
                  "], expected a whole number of bytes that fits 64 bits");
  }
  EXPECT_EQ(refuse("U8", "9223372036854775808", "0,0", ""),
            "got a size of 9223372036854775808, expected one that fits 63 bits");
}

TEST_F(SafetensorsErrors, HolesOverlapsAndDuplicates) {
  const auto two = [](const std::string& first, const std::string& second,
                      const std::string& name = "b") {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[)" + first + "]},\"" + name +
           R"(":{"dtype":"U8","shape":[2],"data_offsets":[)" + second + "]}}";
  };
  EXPECT_EQ(header_refusal(two("1,3", "3,5"), "abcde"),
            "tensor \"a\": got data that begins at byte 1, expected 0 (nothing describes the bytes "
            "before it)");
  EXPECT_EQ(header_refusal(two("0,2", "3,5"), "abcde"),
            "tensor \"b\": got data that begins at byte 3, expected 2 (nothing describes the bytes "
            "before it)");
  EXPECT_EQ(header_refusal(two("0,2", "1,3"), "abc"),
            "tensor \"b\": got data that begins at byte 1, expected 2 (it overlaps the tensor "
            "before it)");
  EXPECT_EQ(header_refusal(two("0,2", "2,4"), "abcde"),
            "got 5 bytes of data, expected 4 by the header");
  EXPECT_EQ(header_refusal("{}", "x"), "got 1 bytes of data, expected 0 by the header");
  EXPECT_EQ(header_refusal(two("0,2", "2,4", "a"), "abcd"),
            "tensor \"a\": got it twice, expected it once");
  EXPECT_EQ(header_refusal(two("0,2", "2,4", "\\u0061"), "abcd"),
            "tensor \"a\": got it twice, expected it once");
}

TEST_F(SafetensorsErrors, NamesInMessagesAreShortAndPrintable) {
  const std::string message =
      header_refusal("{\"\\n\\u001b[31m" + std::string(71, 'x') + "\xc3\xbc\xc3\xbc\xc3\xbc\":1}");
  EXPECT_EQ(message, "tensor \"\\x0a\\x1b[31m" + std::string(71, 'x') +
                         "\xc3\xbc...\": got 1, expected an object with dtype, shape and "
                         "data_offsets");
}

TEST_F(SafetensorsErrors, DeepNestingEndsAtOnce) {
  const std::string deep(5'000'000, '[');
  EXPECT_EQ(header_refusal("{\"a\":" + deep),
            "tensor \"a\": got an array, expected an object with "
            "dtype, shape and data_offsets");
  EXPECT_EQ(tensor_refusal("{\"shape\":" + deep), "got an array in shape, expected whole numbers");
}

TEST_F(SafetensorsErrors, WhatIsNoFile) {
  EXPECT_EQ(error_of([&] { SafetensorsFile::open(temp_ / "none"); }, ErrorCode::kIo),
            "SafetensorsFile: " + (temp_ / "none").string() +
                ": got \"No such file or directory\", expected a file that can be read");
  EXPECT_EQ(
      error_of([&] { SafetensorsFile::open(temp_.path()); }, ErrorCode::kIo),
      "SafetensorsFile: " + temp_.path().string() + ": got a folder, expected a regular file");
  EXPECT_EQ(error_of([&] { SafetensorsFile::open("/dev/zero"); }, ErrorCode::kIo),
            "SafetensorsFile: /dev/zero: got a pipe, device or socket, expected a regular file");
}

TEST_F(SafetensorsErrors, MissingTensors) {
  write_bytes(path_, safetensors_bytes("{}"));
  const SafetensorsFile file = SafetensorsFile::open(path_);
  const std::string expected = "SafetensorsFile: " + path_.string() +
                               ": tensor \"q\": got none, expected it among the file's 0 tensors";
  EXPECT_EQ(error_of([&] { static_cast<void>(file.tensor("q")); }, ErrorCode::kIo), expected);
  EXPECT_EQ(error_of([&] { file.load("q"); }, ErrorCode::kIo), expected);
  EXPECT_EQ(error_of([&] { static_cast<void>(file.entry("q")); }, ErrorCode::kIo), expected);
}

TEST_F(SafetensorsErrors, AFileThatIsShortenedLaterGivesAnErrorToLoad) {
  write_safetensors(path_, std::vector<SafetensorsItem>{{"a", counting_bytes(DType::kF32, {9})}});
  const SafetensorsFile file = SafetensorsFile::open(path_);
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 4);
  const std::string message = error_of([&] { file.load("a"); }, ErrorCode::kIo);
  EXPECT_NE(message.find("got the end of the file at byte"), std::string::npos) << message;
  EXPECT_NE(message.find("expected 4 more bytes"), std::string::npos) << message;
}

class SafetensorsDamage : public SafetensorsErrors {
 protected:
  /// Opened and read, or refused as a file: nothing else.
  void survives(const std::string& bytes) {
    memory_.set(bytes);
    try {
      const SafetensorsFile file = SafetensorsFile::open(memory_.path());
      for (const std::string& name : file.names()) {
        if (file.entry(name).dtype) file.load(name, DType::kF64);
      }
    } catch (const Error& error) {
      ASSERT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kUnsupported)
          << error.what();
    }
  }
  std::string sound_file() {
    const Tensor a = counting_bytes(DType::kF32, {2, 3});
    const Tensor b = counting_bytes(DType::kBF16, {5});
    write_safetensors(path_, std::vector<SafetensorsItem>{{"a", a}, {"b.weight", b}},
                      {{"format", "pt"}});
    return read_bytes(path_);
  }

  MemoryFile memory_;
};

TEST_F(SafetensorsDamage, EveryTruncationIsRefused) {
  const std::string sound = sound_file();
  for (std::size_t length = 0; length < sound.size(); ++length) {
    EXPECT_NE(refusal(sound.substr(0, length)), "") << length;
  }
  EXPECT_NE(refusal(sound + '\0'), "");
}

TEST_F(SafetensorsDamage, NoChangedByteCrashes) {
  const std::string sound = sound_file();
  const std::size_t header_end = sound.find("]}}") + 3;
  for (std::size_t i = 0; i < header_end; ++i) {
    std::string changed = sound;
    for (int bit = 0; bit < 8; ++bit) {
      changed[i] = static_cast<char>(sound[i] ^ (1 << bit));
      survives(changed);
    }
    for (const char byte : {'\0', '\xff', '0', '9', '"', '{', ']'}) {
      changed[i] = byte;
      survives(changed);
    }
    if (HasFatalFailure()) return;
  }
}

class WriteSafetensorsErrors : public SafetensorsErrors {
 protected:
  std::string write_refusal(const std::vector<SafetensorsItem>& items,
                            const std::map<std::string, std::string>& metadata = {}) {
    const std::string message = error_of([&] { write_safetensors(path_, items, metadata); });
    EXPECT_EQ(temp_.files(), std::vector<std::string>());
    return message;
  }
  Tensor sound_ = Tensor(DType::kF32, {2});
};

TEST_F(WriteSafetensorsErrors, Arguments) {
  EXPECT_EQ(write_refusal({{"a", {}}}),
            "write_safetensors: tensor \"a\": got none, expected a tensor");
  EXPECT_EQ(write_refusal({{"a", ConstTensorView(nullptr, DType::kF32, {2})}}),
            "write_safetensors: tensor \"a\": got a null pointer, expected data");
  EXPECT_EQ(write_refusal({{"a", sound_}, {"b", sound_}, {"a", sound_}}),
            "write_safetensors: tensor \"a\": got it twice, expected it once");
  EXPECT_EQ(write_refusal({{"__metadata__", sound_}}),
            "write_safetensors: tensor \"__metadata__\": got the format's own name for texts, "
            "expected another");
  EXPECT_EQ(write_refusal({{"\xff", sound_}}),
            "write_safetensors: tensors: got \"\xff\", expected valid UTF-8");
  EXPECT_EQ(write_refusal({}, {{"a", "\x80"}}),
            "write_safetensors: metadata: got \"\x80\", expected valid UTF-8");
  EXPECT_EQ(error_of([&] {
              const ConstTensorView cuda(sound_.data(), DType::kF32, {2}, Device::kCuda);
              write_safetensors(path_, std::vector<SafetensorsItem>{{"a", cuda}});
            }),
            "write_safetensors: tensor \"a\": got memory of cuda:0, expected memory of cpu, where "
            "the call runs");
}

}  // namespace
}  // namespace ladon
