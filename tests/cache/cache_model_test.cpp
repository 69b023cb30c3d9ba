// Thousands of random operations on several caches and forks at once, compared with the model of
// cache_fleet.h. Pools are small, so that they run out in the middle of a batch and evict all the
// time. A failure prints the seed and the step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "cache/cache_fleet.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/temp_folder.h"

namespace ladon::test {
namespace {

struct Setting {
  std::string name;
  FleetOptions fleet;
  int steps = 3000;
  Place place{};
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

class RandomRun {
 public:
  RandomRun(const Context& context, const FleetOptions& options, std::uint64_t seed)
      : context_(context), fleet_(context, options), random_(seed) {
    // Prompts that several requests begin with: they part at different places.
    for (std::int64_t p = 0; p < 5; ++p) {
      for (std::int64_t i = 0; i < 48; ++i) {
        push_token(prompts_[static_cast<std::size_t>(p)], i < 9 * p ? i : i + 100 * (1 + p % 3));
      }
    }
  }

  Fleet& fleet() { return fleet_; }
  const std::map<std::string, int>& done() const { return done_; }

  void step() {
    if (fleet_.members().empty() || chance(3)) {
      if (fleet_.members().size() < 6) fleet_.add(random_.below(4));
    }
    const std::size_t at = index_below(fleet_.members().size());
    Member& member = fleet_.members()[at];
    const std::int64_t what = random_.below(100);
    if (what < 40) {
      count("append", fleet_.append(member, random_chunk(member)));
    } else if (what < 48) {
      count("abandon",
            fleet_.abandon(member, random_chunk(member), [&] { refuse_while_busy(member); }));
    } else if (what < 52) {
      refuse(member);
    } else if (what < 58) {
      if (fleet_.members().size() < 6) count("fork"), fleet_.fork(at);
    } else if (what < 62) {
      count("destroy"), fleet_.remove(at);
    } else if (what < 67) {
      reorder(member);
    } else if (what < 68) {
      Member& to = fleet_.members()[index_below(fleet_.members().size())];
      if (to.tokens.size() == member.tokens.size()) {
        count("load", fleet_.copy_by_file(member, to, folder_ / "cache"));
      }
    } else if (what < 70) {
      count("reserve"), fleet_.reserve(member, random_.below(150));
    } else if (what < 71) {
      count("reset all"), fleet_.reset(member);
    } else if (fleet_.paged() && what == 71) {
      if (chance(30)) count("forget prefixes"), fleet_.forget_prefixes();
    } else if (!member.tokens.empty()) {
      on_one_sequence(member, index_below(member.tokens.size()), what);
    }
  }

 private:
  bool chance(std::int64_t percent) { return random_.below(100) < percent; }
  std::size_t index_below(std::size_t bound) {
    return static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(bound)));
  }
  void count(const std::string& what, bool ran = true) { ++done_[ran ? what : what + " refused"]; }

  void on_one_sequence(Member& member, std::size_t b, std::int64_t what) {
    if (what < 75) {
      count("reset"), fleet_.reset(member, b);
    } else if (fleet_.paged() && what < 84) {
      const std::size_t length = member.tokens[b].size();
      count("publish"), fleet_.publish(member, b, chance(70) ? length : index_below(length + 1));
    } else if (fleet_.paged() && what < 91) {
      if (!member.tokens[b].empty()) fleet_.reset(member, b);
      Tokens wanted = prompts_[index_below(prompts_.size())];
      if (chance(30)) wanted.resize(index_below(wanted.size() + 1));
      fleet_.adopt(member, b, wanted);
      count(member.tokens[b].empty() ? "adopt nothing" : "adopt");
    } else {
      const std::int64_t least = fleet_.shortest(member, b);
      // A few tokens as a rule, as rejected drafts are.
      const std::int64_t most = member.length(b) - least;
      const std::int64_t cut =
          random_.below(1 + (chance(60) ? std::min<std::int64_t>(most, 4) : most));
      count("truncate"), fleet_.truncate(member, b, member.length(b) - cut);
    }
  }

  void reorder(Member& member) {
    std::vector<std::int64_t> from;
    if (!member.tokens.empty()) {
      for (std::int64_t b = random_.below(5); b > 0; --b) {
        from.push_back(random_.below(static_cast<std::int64_t>(member.tokens.size())));
      }
    }
    count("reorder"), fleet_.reorder(member, from);
  }

  std::vector<std::int64_t> random_counts(std::size_t batch) {
    std::vector<std::int64_t> counts;
    const bool one = chance(40);  // decoding
    const std::int64_t most = 1 + random_.below(chance(20) ? 40 : 6);
    for (std::size_t b = 0; b < batch; ++b) counts.push_back(one ? 1 : random_.below(most + 1));
    return counts;
  }

  Chunk random_chunk(const Member& member) {
    Chunk chunk;
    chunk.after = member.tokens;
    const std::size_t batch = member.tokens.size();
    chunk.counts = random_counts(batch);
    chunk.with_lengths = batch != 0 && chance(70);
    if (!chunk.with_lengths && batch != 0) {
      std::fill(chunk.counts.begin(), chunk.counts.end(), chunk.counts.front());
    }
    std::int64_t total = 0;
    std::int64_t longest = 0;
    for (std::size_t b = 0; b < batch; ++b) {
      const Tokens& prompt = prompts_[index_below(prompts_.size())];
      for (std::int64_t t = 0; t < chunk.counts[b]; ++t) {
        const std::size_t position = chunk.after[b].size();
        // What follows a prompt goes on with it, more often than not.
        const bool follows = position < prompt.size() && (position == 0 || chance(95));
        push_token(chunk.after[b], follows ? prompt[position].id : 10000 + next_id_++);
      }
      total += chunk.counts[b];
      longest = std::max(longest, chunk.counts[b]);
    }
    const bool packed = chunk.with_lengths && chance(50);
    fill(chunk, packed, packed ? total : longest + (chunk.with_lengths ? random_.below(3) : 0));
    return chunk;
  }

  /// Writes the new tokens into k and v, [batch, columns] or packed, NaN elsewhere.
  void fill(Chunk& chunk, bool packed, std::int64_t columns) {
    constexpr std::array kSources = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
    const DType source = kSources[index_below(kSources.size())];
    const auto batch = static_cast<std::int64_t>(chunk.after.size());
    for (const bool value : {false, true}) {
      Tensor& tensor = value ? chunk.v : chunk.k;
      const std::int64_t dim = value ? 2 : 3;
      tensor = Tensor(source, {packed ? 1 : batch, columns, 2, dim + 1});
      for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
        store_element(tensor.data(), source, i, std::nan(""));
      }
      std::int64_t packed_row = 0;
      for (std::int64_t b = 0; b < batch; ++b) {
        const auto i = static_cast<std::size_t>(b);
        for (std::int64_t t = 0; t < chunk.counts[i]; ++t) {
          const std::size_t position =
              chunk.after[i].size() - static_cast<std::size_t>(chunk.counts[i] - t);
          const std::int64_t row = packed ? packed_row++ : b * columns + t;
          for (std::int64_t n = 0; n < 2 * dim; ++n) {
            store_element(tensor.data(), source, (row * 2 + n / dim) * (dim + 1) + n % dim,
                          number_of(chunk.after[i][position], value, n / dim, n % dim));
          }
        }
      }
      tensor = tensor.to(context_);
      (value ? chunk.v_view : chunk.k_view) = tensor.view().slice(3, 0, dim);
    }
  }

  /// What a cache must refuse at any time.
  void refuse(Member& member) {
    KvCache& cache = member.cache;
    const std::int64_t batch = cache.batch();
    const Chunk chunk = random_chunk(member);
    count("refused");
    expect_refused([&] { cache.truncate(batch, 0); });
    expect_refused([&] { cache.reset(-1); });
    expect_refused([&] { cache.reserve(context_, -1); });
    expect_refused([&] { cache.reorder(context_, std::vector<std::int64_t>{batch}); });
    expect_refused([&] { cache.load(context_, folder_ / "none"); }, ErrorCode::kIo);
    expect_refused([&] { cache.append(context_, chunk.v_view, chunk.v_view, chunk.lengths()); });
    std::vector<std::int64_t> lengths = chunk.counts;
    lengths.push_back(0);
    expect_refused([&] { cache.append(context_, chunk.k_view, chunk.v_view, lengths); });
    if (batch == 0) return;
    lengths.pop_back();
    lengths.back() = -1;
    expect_refused([&] { cache.append(context_, chunk.k_view, chunk.v_view, lengths); });
    const std::size_t b = index_below(member.tokens.size());
    const auto sequence = static_cast<std::int64_t>(b);
    expect_refused([&] { cache.truncate(sequence, member.length(b) + 1); });
    expect_refused([&] { cache.truncate(sequence, fleet_.shortest(member, b) - 1); });
    const std::vector<std::int64_t> ids(static_cast<std::size_t>(member.length(b)) + 1, 7);
    const ErrorCode code = fleet_.paged() ? ErrorCode::kInvalidArgument : ErrorCode::kUnsupported;
    expect_refused([&] { cache.publish_prefix(sequence, ids); }, code);
    if (!fleet_.paged() || member.length(b) > 0) {
      expect_refused([&] { static_cast<void>(cache.adopt_prefix(sequence, ids)); }, code);
    }
  }

  /// What it must refuse while an append has not ended.
  void refuse_while_busy(Member& member) {
    KvCache& cache = member.cache;
    const Chunk chunk = random_chunk(member);
    expect_refused([&] { cache.append(context_, chunk.k_view, chunk.v_view, chunk.lengths()); });
    expect_refused(
        [&] { const KvAppend more(context_, cache, chunk.k_view, chunk.v_view, chunk.lengths()); });
    expect_refused([&] { cache.truncate(0, 0); });
    expect_refused([&] { cache.reset(); });
    expect_refused([&] { cache.reset(0); });
    expect_refused([&] { cache.reserve(context_, 9); });
    expect_refused([&] { cache.reorder(context_, {}); });
    expect_refused([&] { static_cast<void>(cache.fork(context_)); });
    expect_refused([&] { static_cast<void>(cache.view()); });
    expect_refused([&] { cache.save(context_, folder_ / "busy"); });
    expect_refused([&] { cache.load(context_, folder_ / "busy"); });
    if (!fleet_.paged()) return;
    expect_refused([&] { cache.publish_prefix(0, {}); });
    expect_refused([&] { static_cast<void>(cache.adopt_prefix(0, {})); });
  }

  const Context& context_;
  Fleet fleet_;
  Random random_;
  TempFolder folder_;
  std::array<Tokens, 5> prompts_;
  std::int64_t next_id_ = 0;
  std::map<std::string, int> done_;
};

class CacheModel : public testing::TestWithParam<Setting> {};

TEST_P(CacheModel, RandomOperationsKeepToTheModel) {
  const Context context = GetParam().place.context(1);
  std::map<std::string, int> done;
  std::int64_t evictions = 0;
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    RandomRun run(context, GetParam().fleet, seed);
    Fleet& fleet = run.fleet();
    for (int step = 0; step < GetParam().steps && !HasFailure(); ++step) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", step " + std::to_string(step));
      run.step();
      fleet.check();
    }
    for (const auto& [what, count] : run.done()) done[what] += count;
    while (!fleet.members().empty()) fleet.remove(fleet.members().size() - 1);
    if (!fleet.paged()) continue;
    PagePool::Statistics left = fleet.pool().statistics();
    evictions += left.evictions;
    EXPECT_EQ(left.used_pages, 0);
    EXPECT_EQ(left.free_pages + left.kept_pages, left.num_pages);
    fleet.forget_prefixes();
    left = fleet.pool().statistics();
    EXPECT_EQ(left.free_pages, left.num_pages);
    EXPECT_EQ(left.published_pages, 0);
  }
  // Everything happened, or the test is not what it seems.
  std::vector<std::string> wanted = {"append", "abandon",  "destroy",  "fork",
                                     "load",   "refused",  "reorder",  "reserve",
                                     "reset",  "truncate", "reset all"};
  if (GetParam().fleet.kind == "paged") {
    wanted.insert(wanted.end(), {"append refused", "abandon refused", "publish", "adopt",
                                 "adopt nothing", "forget prefixes"});
    EXPECT_GT(evictions, 20);
  }
  for (const std::string& what : wanted) {
    EXPECT_GT(done[what], 5) << what;
  }
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const DType dtype : {DType::kF32, DType::kI8, DType::kF8E4M3}) {
    const std::string name = name_of(dtype);
    for (const auto& [page_size, num_pages] : {std::pair{1, 80}, {3, 30}, {7, 15}, {16, 9}}) {
      all.push_back(
          {"paged_" + std::to_string(page_size) + "_" + name,
           {.kind = "paged", .dtype = dtype, .page_size = page_size, .num_pages = num_pages}});
    }
    all.push_back({"contiguous_" + name, {.kind = "contiguous", .dtype = dtype}, 1000});
    all.push_back({"fixed_" + name, {.kind = "contiguous", .dtype = dtype, .capacity = 30}, 1000});
    for (const auto& [window, spare] : {std::pair{5, 0}, {8, 4}, {0, 0}, {0, 3}, {1, 0}}) {
      all.push_back({"window_" + std::to_string(window) + "_" + std::to_string(spare) + "_" + name,
                     {.kind = "window", .dtype = dtype, .window_left = window, .spare = spare},
                     600});
    }
  }
  all.push_back({"paged_3_bf16",
                 {.kind = "paged", .dtype = DType::kBF16, .page_size = 3, .num_pages = 30},
                 1500});
  all.push_back({"window_4_2_f16",
                 {.kind = "window", .dtype = DType::kF16, .window_left = 4, .spare = 2},
                 600});
  return all;
}

/// On the fastest kernels and on the devices.
std::vector<Setting> settings_in_places() {
  std::vector<Setting> all;
  for (const Place& place : fastest_places()) {
    for (Setting setting : settings()) {
      if (!place.is_cpu()) setting.name += "_" + place.name();
      setting.place = place;
      all.push_back(setting);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Settings, CacheModel, testing::ValuesIn(settings_in_places()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace ladon::test
