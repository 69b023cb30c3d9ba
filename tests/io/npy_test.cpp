// read_npy(), write_npy() and read_npz(): other people's files, round trips, every spelling of a
// header, and files that cannot be trusted.
#include "ladon/npy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "io/io_support.h"
#include "io/memory_file.h"
#include "ladon/error.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using namespace test;

/// A file of the given version around the text of a dictionary.
std::string npy_bytes(const std::string& dictionary, const std::string& data, char version = 1) {
  std::string bytes("\x93NUMPY", 6);
  bytes += {version, '\0'};
  for (std::size_t i = 0; i < (version == 1 ? 2U : 4U); ++i) {
    bytes += static_cast<char>((dictionary.size() >> (8 * i)) & 0xffU);
  }
  return bytes + dictionary + data;
}

std::string dictionary(const std::string& descr, const std::string& order,
                       const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

class Npy : public testing::Test {
 protected:
  Tensor read(const std::string& bytes) {
    write_bytes(path_, bytes);
    return read_npy(path_);
  }
  std::string refusal(const std::string& bytes, ErrorCode code = ErrorCode::kIo) {
    write_bytes(path_, bytes);
    const std::string message = error_of([&] { read_npy(path_); }, code);
    const std::string prefix = "read_npy: " + path_.string() + ": ";
    EXPECT_TRUE(message.starts_with(prefix)) << message;
    return message.substr(std::min(prefix.size(), message.size()));
  }
  /// About a version 1 file without data.
  std::string header_refusal(const std::string& text, ErrorCode code = ErrorCode::kIo) {
    return refusal(npy_bytes(text, ""), code);
  }

  TempFolder temp_;
  std::filesystem::path path_ = temp_ / "x.npy";
};

TEST(NpyConformance, EveryFileBehavesAsTheIndexSays) {
  const std::filesystem::path folder = conformance_folder("npy_cases");
  const std::vector<IndexLine> lines = read_conformance_index(folder);
  if (lines.empty()) GTEST_SKIP() << "no cases in " << folder;
  for (const auto& [name, expected] : lines) {
    SCOPED_TRACE(name + ": " + expected);
    const std::filesystem::path path = folder / name;
    if (expected.starts_with("reject")) {
      // The object array is a sound file that holds what Ladon does not have.
      const bool is_object = name.find("objarr") != std::string::npos;
      error_of([&] { read_npy(path); }, is_object ? ErrorCode::kUnsupported : ErrorCode::kIo);
    } else if (name.ends_with(".npz")) {
      const std::map<std::string, Tensor> arrays = read_npz(path);
      ASSERT_EQ(arrays.size(), 2U);
      for (std::int64_t i = 0; i < 10; ++i) {
        EXPECT_EQ(arrays.at("x").data_as<std::int64_t>()[i], i);
        EXPECT_EQ(arrays.at("x_plus_one").data_as<std::int64_t>()[i], i + 1);
      }
    } else {
      const Tensor array = read_npy(path);
      ASSERT_EQ(array.shape(), Dims{10});
      for (std::int64_t i = 0; i < 10; ++i) EXPECT_EQ(array.data_as<std::int64_t>()[i], i);
    }
  }
}

TEST_F(Npy, EveryDTypeAndShapeComesBack) {
  for (const DType dtype : kAllDTypes) {
    for (const Dims& shape :
         {Dims{}, Dims{7}, Dims{2, 3}, Dims{3, 0, 5}, Dims{1, 2, 1, 2, 1, 2, 1, 2}}) {
      SCOPED_TRACE(name_of(dtype) + shape.to_string());
      const Tensor tensor = counting_bytes(dtype, shape, 5);
      write_npy(path_, tensor);
      const Tensor back = read_npy(path_);
      EXPECT_EQ(back.dtype(), dtype);
      EXPECT_EQ(back.shape(), shape);
      EXPECT_EQ(bytes_of(back), bytes_of(tensor));
      const std::string bytes = read_bytes(path_);
      EXPECT_EQ((bytes.size() - bytes_of(tensor).size()) % 64, 0U);
    }
  }
}

TEST_F(Npy, WritesWhatNumPyWrites) {
  write_npy(path_, Tensor::from_values(DType::kF32, {2, 3}, {0, 1, 2, 3, 4, 5}));
  const std::string text = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  EXPECT_EQ(read_bytes(path_).substr(0, 128), std::string("\x93NUMPY\1\0v\0", 10) + text +
                                                  std::string(117 - text.size(), ' ') + "\n");
  write_npy(path_, counting_bytes(DType::kBF16, {7}));
  EXPECT_NE(read_bytes(path_).find("{'descr': '<V2', 'fortran_order': False, 'shape': (7,), }"),
            std::string::npos);
  write_npy(path_, counting_bytes(DType::kBool, {}));
  EXPECT_NE(read_bytes(path_).find("{'descr': '|b1', 'fortran_order': False, 'shape': (), }"),
            std::string::npos);
}

TEST_F(Npy, StridedViews) {
  const Tensor tensor = counting_bytes(DType::kI32, {3, 4});
  const ConstTensorView view = tensor.view().transpose(0, 1).slice(0, 1, 3);
  write_npy(path_, view);
  EXPECT_EQ(bytes_of(read_npy(path_)), bytes_of(view));
  EXPECT_EQ(error_of([&] { write_npy(path_, {}); }),
            "write_npy: view: got none, expected a tensor");
}

TEST_F(Npy, BothByteOrders) {
  for (const auto& [little, big] :
       {std::pair("<f8", ">f8"), std::pair("<f4", ">f4"), std::pair("<f2", ">f2"),
        std::pair("<V2", ">V2"), std::pair("<i8", ">i8"), std::pair("<u8", ">u8"),
        std::pair("<i4", ">i4"), std::pair("<u4", ">u4"), std::pair("<i2", ">i2"),
        std::pair("<u2", ">u2")}) {
    const auto size = static_cast<std::size_t>(little[2] - '0');
    const std::string shape = std::string("(").append(std::to_string(24 / size)).append(",)");
    std::string data = "abcdefghijklmnopqrstuvwx";
    const Tensor from_little = read(npy_bytes(dictionary(little, "False", shape), data));
    EXPECT_EQ(bytes_of(from_little), data);
    for (std::size_t i = 0; i < data.size(); i += size) {
      std::reverse(data.begin() + static_cast<std::ptrdiff_t>(i),
                   data.begin() + static_cast<std::ptrdiff_t>(i + size));
    }
    const Tensor from_big = read(npy_bytes(dictionary(big, "False", shape), data));
    EXPECT_EQ(from_big.dtype(), from_little.dtype());
    EXPECT_EQ(bytes_of(from_big), bytes_of(from_little));
  }
  for (const char* descr : {"|i1", ">i1", "<i1", "=i1", "i1"}) {
    EXPECT_EQ(bytes_of(read(npy_bytes(dictionary(descr, "False", "(2,)"), "ab"))), "ab");
  }
}

TEST_F(Npy, FortranOrder) {
  // Element [i, j, k] of shape (2, 3, 2) is at i + 2 j + 6 k.
  const Tensor array = read(npy_bytes(dictionary("|u1", "True", "(2, 3, 2)"), "abcdefghijkl"));
  EXPECT_EQ(array.shape(), (Dims{2, 3, 2}));
  EXPECT_EQ(bytes_of(array), "agciekbhdjfl");
  EXPECT_EQ(bytes_of(read(npy_bytes(dictionary("|u1", "True", "(3,)"), "abc"))), "abc");
  EXPECT_EQ(bytes_of(read(npy_bytes(dictionary("|u1", "True", "()"), "a"))), "a");
  EXPECT_EQ(read(npy_bytes(dictionary("|u1", "True", "(2, 0)"), "")).shape(), (Dims{2, 0}));
  EXPECT_EQ(bytes_of(read(npy_bytes(dictionary(">u2", "True", "(2, 2)"), "badchgfe"))), "abghcdef");
}

TEST_F(Npy, VersionsAndSpellings) {
  for (const char version : {'\1', '\2', '\3'}) {
    EXPECT_EQ(bytes_of(read(npy_bytes(dictionary("|u1", "False", "(2,)"), "ab", version))), "ab");
  }
  for (const char* text :
       {"{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}",
        "{\"descr\":\"|u1\",\"fortran_order\":False,\"shape\":(2,)}",
        " { 'shape' : ( 2 , ) , 'descr' : '|u1' , 'fortran_order' : False , } \t\r\n  ",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (2L,), }\n",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2), }\n",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2,), }\n"}) {
    EXPECT_EQ(bytes_of(read(npy_bytes(text, "ab"))), "ab") << text;
  }
}

TEST_F(Npy, MalformedFiles) {
  EXPECT_EQ(refusal("short"), "got 5 bytes, expected a .npy file");
  EXPECT_EQ(refusal(std::string("\x93NUMPY\2\0\0\0", 10)), "got 10 bytes, expected a .npy file");
  EXPECT_EQ(refusal("\x93NUMPX\1\1\1\1"),
            "got other first bytes, expected \"\\x93NUMPY\" as in every .npy file");
  EXPECT_EQ(refusal(npy_bytes("{}", "", 4)), "got version 4.0, expected 1.0, 2.0 or 3.0");
  EXPECT_EQ(refusal(std::string("\x93NUMPY\1\0\x05\0{}", 12)),
            "got a header of 5 bytes, expected at most 2");
  EXPECT_EQ(refusal(npy_bytes(std::string(70000, ' '), "", 2)),
            "got a header of 70000 bytes, expected at most 65536");
  EXPECT_EQ(header_refusal("{}"),
            "got a header without descr, expected descr, fortran_order and shape");
  EXPECT_EQ(header_refusal("{'descr': '<f4', 'shape': (1,)}"),
            "got a header without fortran_order, expected descr, fortran_order and shape");
  EXPECT_EQ(header_refusal("{'descr': '<f4', 'fortran_order': True}"),
            "got a header without shape, expected descr, fortran_order and shape");
  EXPECT_EQ(header_refusal("{'x': 1}"),
            "got the key \"x\", expected descr, fortran_order and shape");
  EXPECT_EQ(header_refusal("{'descr': '<f4', 'descr': '<f4'}"),
            "got descr twice, expected it once");
  EXPECT_EQ(header_refusal("[]"), "got a malformed header at its byte 0, expected '{'");
  EXPECT_EQ(header_refusal("{'descr': '<f4'"),
            "got a malformed header at its byte 15, expected '}'");
  EXPECT_EQ(header_refusal("{'descr' '<f4'}"),
            "got a malformed header at its byte 9, expected ':'");
  EXPECT_EQ(header_refusal("{descr: 1}"),
            "got a malformed header at its byte 1, expected a key in quotes");
  EXPECT_EQ(header_refusal("{'descr': 1}"),
            "got a malformed header at its byte 10, expected a type in quotes");
  EXPECT_EQ(header_refusal("{'descr': '\\x3cf4'}"),
            "got a malformed header at its byte 10, expected a type in quotes");
  EXPECT_EQ(header_refusal("{'descr"),
            "got a malformed header at its byte 1, expected a key in quotes");
  EXPECT_EQ(header_refusal("{'fortran_order': 1}"),
            "got a malformed header at its byte 18, expected True or False");
  EXPECT_EQ(header_refusal("{'shape': [2]}"),
            "got a malformed header at its byte 10, expected '('");
  EXPECT_EQ(header_refusal("{'shape': (2)}"),
            "got a malformed header at its byte 12, expected a comma: a tuple of one");
  EXPECT_EQ(header_refusal("{'shape': (-2,)}"),
            "got a malformed header at its byte 11, expected sizes of 0 or more");
  EXPECT_EQ(header_refusal("{'shape': (x,)}"),
            "got a malformed header at its byte 11, expected sizes of 0 or more");
  EXPECT_EQ(header_refusal("{'shape': (9223372036854775808,)}"),
            "got a malformed header at its byte 11, expected sizes that fit 63 bits");
  EXPECT_EQ(header_refusal(dictionary("<f4", "True", "(0,)") + "x"),
            "got a malformed header at its byte 57, expected nothing after the dictionary");
}

TEST_F(Npy, SizesAreCheckedBeforeMemoryIsTaken) {
  EXPECT_EQ(refusal(npy_bytes(dictionary("<f4", "False", "(3,)"), "12345678")),
            "got 8 bytes of elements, expected 12 for f32 of shape [3]");
  EXPECT_EQ(refusal(npy_bytes(dictionary("<f4", "False", "(1,)"), "12345678")),
            "got 8 bytes of elements, expected 4 for f32 of shape [1]");
  EXPECT_EQ(refusal(npy_bytes(dictionary("<f8", "False", "(1000000000000,)"), "12345678")),
            "got 8 bytes of elements, expected 8000000000000 for f64 of shape [1000000000000]");
  for (const char* shape : {"(4294967296, 4294967296)", "(0, 9223372036854775807, 9)"}) {
    EXPECT_NE(refusal(npy_bytes(dictionary("<f4", "True", shape), "")).find("more than a file can"),
              std::string::npos);
  }
}

TEST_F(Npy, WhatLadonDoesNotHave) {
  for (const char* descr : {"|O", "<c8", "<U5", "|S1", "<M8[ns]", "<f16", "<V4", "", "<", "<i3"}) {
    EXPECT_EQ(header_refusal(dictionary(descr, "False", "(0,)"), ErrorCode::kUnsupported),
              "got elements of type \"" + std::string(descr) +
                  "\", expected f8, f4, f2, V2 (bfloat16), b1, or i or u with 1, 2, 4 or 8");
  }
  EXPECT_EQ(header_refusal("{'descr': [('a', '<f4')]}", ErrorCode::kUnsupported),
            "got an array of records, expected one number for each element");
  EXPECT_EQ(
      header_refusal(dictionary("<f4", "False", "(1,1,1,1,1,1,1,1,1)"), ErrorCode::kUnsupported),
      "got 9 dimensions, expected at most 8");
  EXPECT_EQ(error_of([&] { read_npy(temp_ / "none"); }, ErrorCode::kIo),
            "read_npy: " + (temp_ / "none").string() +
                ": got \"No such file or directory\", expected a file that can be read");
}

TEST_F(Npy, EveryTruncationIsRefusedAndNoChangedByteCrashes) {
  write_npy(path_, counting_bytes(DType::kF32, {2, 3}));
  const std::string sound = read_bytes(path_);
  for (std::size_t length = 0; length < sound.size(); ++length) {
    EXPECT_NE(refusal(sound.substr(0, length)), "") << length;
  }
  MemoryFile memory;
  for (std::size_t i = 0; i < sound.size(); ++i) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = sound;
      changed[i] = static_cast<char>(value);
      memory.set(changed);
      try {
        read_npy(memory.path());
      } catch (const Error&) {
      }
    }
  }
}

class Npz : public Npy {
 protected:
  std::string npz_refusal(const std::string& bytes, ErrorCode code = ErrorCode::kIo) {
    write_bytes(path_, bytes);
    const std::string message = error_of([&] { read_npz(path_); }, code);
    const std::string prefix = "read_npz: " + path_.string() + ": ";
    EXPECT_TRUE(message.starts_with(prefix)) << message;
    return message.substr(std::min(prefix.size(), message.size()));
  }
};

TEST_F(Npz, DamagedArchives) {
  const std::filesystem::path source = conformance_folder("npy_cases") / "candle_test.npz";
  if (!std::filesystem::exists(source)) GTEST_SKIP() << "no " << source;
  const std::string sound = read_bytes(source);
  for (std::size_t length = 0; length < sound.size(); ++length) {
    EXPECT_NE(npz_refusal(sound.substr(0, length)), "") << length;
  }
  const auto changed = [&](std::size_t at, char value) {
    std::string bytes = sound;
    bytes[at] = value;
    return bytes;
  };
  EXPECT_EQ(npz_refusal(changed(100, 'x')),
            "member \"x.npy\": got bytes that do not fit their checksum, expected an undamaged "
            "archive");
  const std::size_t list = sound.find("PK\x01\x02");
  EXPECT_EQ(npz_refusal(changed(list + 10, 8), ErrorCode::kUnsupported),
            "member \"x.npy\": got compressed bytes, expected them as they are (np.savez)");
  EXPECT_EQ(npz_refusal(changed(list + 8, 1), ErrorCode::kUnsupported),
            "member \"x.npy\": got encrypted bytes, expected them as they are (np.savez)");
  EXPECT_EQ(npz_refusal(changed(list + 20, 1)),
            "member \"x.npy\": got two sizes, 1 and 208, expected one");
  EXPECT_EQ(npz_refusal(changed(list + 42, 1)),
            "member \"x.npy\": got no header before its bytes, expected one");
  EXPECT_EQ(npz_refusal(changed(list + 44, 1)),
            "member \"x.npy\": got bytes outside of the archive, expected them before its list");
  EXPECT_EQ(npz_refusal(changed(list, 'x')),
            "got a malformed list of members, expected that of a zip archive");
  EXPECT_EQ(npz_refusal("no archive"), "got no end of a zip archive, expected an .npz file");
  MemoryFile memory;
  for (std::size_t i = 0; i < sound.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      memory.set(changed(i, static_cast<char>(sound[i] ^ (1 << bit))));
      try {
        read_npz(memory.path());
      } catch (const Error&) {
      }
    }
  }
}

}  // namespace
}  // namespace ladon
