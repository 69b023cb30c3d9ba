// Arena: aligned parts of one block, and that a layout which takes more than it counted is an
// error, not a write past the block.
#include "core/arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "core/context_impl.h"
#include "ladon/context.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::error_of;

class ArenaTest : public testing::Test {
 protected:
  WorkspacePool& pool() { return context_.impl().host_scratch(); }
  Context context_{ContextOptions{.num_threads = 1}};
};

struct Parts {
  explicit Parts(Arena& arena)
      : bytes(arena.take<std::uint8_t>(3)),
        none(arena.take<double>(0)),
        rows(arena.take_rows(5, 7, DType::kBF16)),
        numbers(arena.take<double>(9)) {}
  std::uint8_t* bytes;
  double* none;
  TensorView rows;
  double* numbers;
};

TEST_F(ArenaTest, PartsAreAlignedAndApart) {
  InWorkspace<Parts> parts(pool());
  const auto address = [](const void* part) { return reinterpret_cast<std::uintptr_t>(part); };
  for (const void* part :
       {static_cast<const void*>(parts->bytes), static_cast<const void*>(parts->rows.data()),
        static_cast<const void*>(parts->numbers)}) {
    EXPECT_EQ(address(part) % Arena::kAlignment, 0);
  }
  EXPECT_EQ(address(parts->rows.data()) - address(parts->bytes), 64);
  EXPECT_EQ(address(parts->numbers) - address(parts->bytes), 64 + 128);
  EXPECT_EQ(parts->rows.shape(), (Dims{5, 7}));
  Arena counter{DeviceId()};
  const Parts counted(counter);
  EXPECT_EQ(counted.bytes, nullptr);
  EXPECT_EQ(counter.used(), 64 + 128 + 128);
}

/// Takes eight more elements each time it is made.
struct Growing {
  Growing(Arena& arena, std::int64_t* const& count) : elements(arena.take<double>(8 * ++*count)) {}
  double* elements;
};

TEST_F(ArenaTest, MoreThanWasCountedIsAnError) {
  std::int64_t count = 0;
  std::int64_t* const counts = &count;
  EXPECT_EQ(error_of([&] { InWorkspace<Growing>(pool(), counts); }, ErrorCode::kOutOfMemory),
            "workspace: size: got 64 bytes, expected 128: a layout has taken more than it counted, "
            "which is an error in Ladon");
  EXPECT_EQ(count, 2);
  // The block of the pool may be larger than what was counted; it is an error all the same.
  { const Workspace large(pool(), 4096); }
  count = 0;
  error_of([&] { InWorkspace<Growing>(pool(), counts); }, ErrorCode::kOutOfMemory);
}

struct Huge {
  Huge(Arena& arena, std::int64_t count)
      : first(arena.take<double>(count)), second(arena.take<double>(count)) {}
  double* first;
  double* second;
};

TEST_F(ArenaTest, SizesThatCannotBeCountedAreOutOfMemory) {
  for (const std::int64_t count :
       {std::numeric_limits<std::int64_t>::max(), std::int64_t{1} << 60, std::int64_t{-1}}) {
    error_of([&] { InWorkspace<Huge>(pool(), count); }, ErrorCode::kOutOfMemory);
  }
}

}  // namespace
}  // namespace ladon
