// The format of cache files: its exact bytes, its checksum, and headers that lie.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_file_support.h"
#include "cache/cache_support.h"
#include "io/checksum.h"
#include "io/io_support.h"
#include "io/memory_file.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

TEST(Checksum, TestVector) {
  // CRC-64/XZ, as the catalogue of parametrised CRC algorithms lists it.
  io::Crc64 whole;
  whole.add("123456789", 9);
  EXPECT_EQ(whole.value(), 0x995DC9BBDF1939FAU);
  EXPECT_EQ(io::Crc64().value(), 0U);
  // However the bytes come; the eight at a time and the rest agree.
  const std::string text = "The quick brown fox jumps over the lazy dog, and then some more.";
  io::Crc64 at_once;
  at_once.add(text.data(), text.size());
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    io::Crc64 in_two;
    in_two.add(text.data(), cut);
    in_two.add(text.data() + cut, text.size() - cut);
    EXPECT_EQ(in_two.value(), at_once.value()) << cut;
  }
}

/// Every one of these has a checksum that fits.
class CacheHeaders : public testing::Test {
 protected:
  /// What load() says of a file, without its beginning.
  std::string refusal(const std::string& bytes, ErrorCode code = ErrorCode::kIo) {
    file_.set(bytes);
    const CacheState before = state_of(cache_);
    const std::string message = error_of([&] { cache_.load(host_context(), file_.path()); }, code);
    EXPECT_EQ(state_of(cache_), before);
    const std::string beginning = "KvCache::load: " + file_.path() + ": ";
    EXPECT_TRUE(message.starts_with(beginning)) << message;
    return message.substr(std::min(message.size(), beginning.size()));
  }

  MemoryFile file_;
  KvCache cache_ = [] {
    KvCache cache = KvCache::contiguous(
        host_context(),
        {.batch = 2, .num_kv_heads = 1, .head_dim = 2, .value_dim = 1, .format = DType::kF32});
    append_random(cache, {3, 1}, 1);
    return cache;
  }();
  const CacheFile sound_ = {.sizes = {2, 1, 2, 1},
                            .sequences = {{0, 1}, {0, 1}},
                            .tokens = std::string(2 * 3 * 4, '\x11')};
};

TEST_F(CacheHeaders, SayWhatIsWrong) {
  file_.set(sound_.bytes());
  EXPECT_NO_THROW(cache_.load(host_context(), file_.path()));
  CacheFile other = sound_;
  other.magic = "LADONKVD";
  EXPECT_EQ(refusal(other.bytes()), "got another beginning, expected a cache's, \"LADONKVC\"");
  other = sound_;
  other.version = 2;
  EXPECT_EQ(refusal(other.bytes(), ErrorCode::kUnsupported), "got version 2, expected 1");
  other = sound_;
  other.dtype = 4;
  EXPECT_EQ(refusal(other.bytes()), "got dtype bf16, expected the cache's dtype f32");
  other.dtype = 0;
  EXPECT_EQ(refusal(other.bytes()), "got an unknown dtype, expected the cache's dtype f32");
  const char* const names[] = {"batch", "num_kv_heads", "head_dim", "value_dim"};
  for (std::size_t i = 0; i < 4; ++i) {
    for (const std::int64_t value : {std::int64_t{0}, std::int64_t{7}, std::int64_t{-1},
                                     std::numeric_limits<std::int64_t>::max()}) {
      other = sound_;
      other.sizes[i] = value;
      EXPECT_EQ(refusal(other.bytes()), std::string("got ") + names[i] + " = " +
                                            std::to_string(value) + ", expected the cache's " +
                                            std::to_string(sound_.sizes[i]));
    }
  }
  EXPECT_EQ(refusal("LADONKVC"), "got 8 bytes, expected a cache of 56 or more");
  other = sound_;
  other.sequences.pop_back();
  other.tokens.clear();
  EXPECT_EQ(refusal(other.bytes()), "got 72 bytes, expected the lengths of 2 sequences");
  std::string wrong_sum = sound_.bytes();
  wrong_sum.back() = static_cast<char>(wrong_sum.back() + 1);
  EXPECT_EQ(refusal(wrong_sum),
            "got bytes that do not fit their checksum, expected an undamaged file");
}

TEST_F(CacheHeaders, HostileLengths) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  for (const auto& [first, length] : {std::pair<std::int64_t, std::int64_t>{-1, 0},
                                      {0, -1},
                                      {2, 1},
                                      {0, kMax},
                                      {kMax, kMax},
                                      {kMin, kMax},
                                      {kMin, kMin},
                                      {kMax, kMin},
                                      {0, kMost + 1}}) {
    CacheFile file = sound_;
    file.sequences[1] = {first, length};
    EXPECT_EQ(refusal(file.bytes()), "sequence 1: got tokens " + std::to_string(first) + " to " +
                                         std::to_string(length) + ", expected a range");
  }
  // More than the file has, by a little, by much, and so that a product or a sum wraps around.
  for (const auto& [a, b] : {std::pair<std::int64_t, std::int64_t>{1, 2},
                             {1, 0},
                             {0, 0},
                             {kMost, kMost},
                             {0, kMost},
                             {std::int64_t{1} << 38, 2}}) {
    CacheFile file = sound_;
    file.sequences = {{0, a}, {0, b}};
    EXPECT_EQ(refusal(file.bytes()),
              "got 24 bytes of tokens, expected as many as its lengths say, 12 for each");
  }
  // Sums up, but nothing can be without what came before.
  CacheFile file = sound_;
  file.sequences = {{kMost - 1, kMost}, {0, 1}};
  EXPECT_EQ(refusal(file.bytes()),
            "got sequences whose first tokens were dropped, expected all that a contiguous cache "
            "with its window can see");
  // A window can: it has come far, and goes on to the last token there may be.
  KvCache window = KvCache::window(host_context(), cache_.options(), 1);
  EXPECT_NO_THROW(window.load(host_context(), file_.path()));
  EXPECT_EQ(window.length(0), kMost);
  const Tensor k(DType::kF32, {2, 1, 1, 2});
  const Tensor v(DType::kF32, {2, 1, 1, 1});
  error_of([&] { window.append(host_context(), k, v); });
}

/// A file byte by byte. What this test holds fast, other versions of the library can read.
TEST(CacheFile, GoldenBytes) {
  const TempFolder folder;
  const std::string bytes(
      "LADONKVC"
      "\x01\0\0\0"                                  // version
      "\x05\0\0\0"                                  // i8
      "\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"        // batch, num_kv_heads
      "\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0"        // head_dim, value_dim
      "\x04\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0"        // sequence 0: tokens 4 and 5
      "\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"          // sequence 1: token 0
      "\x7f\x02\x7f\xfe"                            // sequence 0: keys
      "\x01\x02\x7f\x04\x05\x81"                    // its values
      "\0\0\x80\x3f\0\0\0\x40"                      // scales of the keys, 1 and 2
      "\0\0\0\x3f\0\0\x80\x3e"                      // scales of the values, 0.5 and 0.25
      "\x7f\x81\x7f\0\x01\0\0\x80\x3f\0\0\x80\x40"  // sequence 1, with scales 1 and 4
      "\xaa\xb3\x53\xb7\x73\x09\xab\xcc",           // computed elsewhere
      119 + 8);
  write_bytes(folder / "golden", bytes);
  const KvCacheOptions options{
      .batch = 2, .num_kv_heads = 1, .head_dim = 2, .value_dim = 3, .format = DType::kI8};
  KvCache cache = KvCache::window(host_context(), options, 2);
  cache.load(host_context(), folder / "golden");
  EXPECT_EQ(cache.length(0), 6);
  EXPECT_EQ(cache.held(0), 2);
  EXPECT_EQ(cache.length(1), 1);
  EXPECT_EQ(content_of(cache, 0),
            (std::vector<double>{127, 2, 0.5, 1, 63.5, 254, -4, 1, 1.25, -31.75}));
  EXPECT_EQ(content_of(cache, 1), (std::vector<double>{127, -127, 508, 0, 4}));
  cache.save(host_context(), folder / "again");
  EXPECT_EQ(read_bytes(folder / "again"), bytes);
}

}  // namespace
}  // namespace ladon::test
