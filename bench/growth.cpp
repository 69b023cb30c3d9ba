#include "growth.h"

#include <cmath>
#include <cstddef>
#include <memory>

#include "pinning.h"

namespace ladon::bench {
namespace {

// A share may differ by this much from its neighbour's.
constexpr double kNear = 0.10;

Shape with_length(const Shape& shape, std::int64_t length) {
  Shape result = shape;
  result.kv_len = length;
  if (shape.query_len != 1) result.query_len = length;
  return result;
}

Shape decode_shape() {
  return {
      .dtype = DType::kBF16, .query_len = 1, .kv_len = 32768, .num_heads = 32, .num_kv_heads = 8};
}

/// Cases of one instruction set that take turns, each behind the ceiling: for cases that memory
/// bounds it also empties the caches of what the one before left there.
class Group {
 public:
  Group(Session& session, Isa isa) : session_(session), context_(session.make_context(isa)) {}

  /// False where the case is wrong, which has then been said.
  bool add(const Case& one) {
    workloads_.push_back(make_workload(*context_, one));
    if (!session_.passes(one, *workloads_.back(), *context_)) return false;
    const Limit limit = limit_here(*context_, one.limit);
    pieces_.push_back(session_.ceiling(*context_, limit, one.dtype()));
    pieces_.push_back(Session::work_of(one, *workloads_.back(), *context_));
    return true;
  }

  void run() {
    const PinnedThreads pinned(*context_);
    timed_ = time_in_turns(pieces_, session_.limits());
  }

  const Timing& timing(std::size_t index) const { return timed_.pieces[2 * index + 1]; }
  double share(std::size_t index) const {
    return timing(index).rate / timed_.pieces[2 * index].rate;
  }
  bool disturbed() const { return timed_.disturbed; }

 private:
  Session& session_;
  std::unique_ptr<Context> context_;
  std::vector<std::unique_ptr<Workload>> workloads_;
  std::vector<Work> pieces_;
  TimedPieces timed_;
};

}  // namespace

double fitted_exponent(std::span<const double> x, std::span<const double> y) {
  const auto count = static_cast<double>(x.size());
  double mean_x = 0;
  double mean_y = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    mean_x += std::log(x[i]) / count;
    mean_y += std::log(y[i]) / count;
  }
  double products = 0;
  double squares = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double distance = std::log(x[i]) - mean_x;
    products += distance * (std::log(y[i]) - mean_y);
    squares += distance * distance;
  }
  return products / squares;
}

std::string Series::name() const {
  // The shape's own name, but for its length.
  std::string text = shape.name();
  const std::size_t begin = text.find(" S");
  text.erase(begin, text.find(' ', begin + 1) - begin);
  return "exponent " + std::string(ladon::name_of(isa)) + " " + text;
}

std::vector<Series> list_series(Isa isa, bool quick) {
  const auto lengths = [&](std::int64_t longest) {
    std::vector<std::int64_t> all{longest / 8, longest / 4, longest / 2, longest};
    if (quick) all.pop_back();
    return all;
  };
  std::vector<Series> all;
  const auto add = [&](const Shape& shape, std::int64_t longest, double expected) {
    all.push_back({isa, shape, lengths(longest), expected});
  };
  add({}, 4096, 2);
  add({.causal = true}, 4096, 2);
  add({.dtype = DType::kBF16}, 4096, 2);
  add({.pass = Pass::kBackward}, 4096, 2);
  add(decode_shape(), 65536, 1);
  return all;
}

void fit_exponent(Session& session, const Series& series) {
  session.listener().begin(series.name());
  Group group(session, series.isa);
  Exponent result{.name = series.name().substr(std::string_view("exponent ").size()),
                  .expected = series.expected};
  for (const std::int64_t length : series.lengths) {
    if (!group.add(case_of(series.isa, with_length(series.shape, length)))) return;
  }
  group.run();
  std::vector<double> x;
  std::vector<double> y;
  for (std::size_t i = 0; i < series.lengths.size(); ++i) {
    x.push_back(static_cast<double>(series.lengths[i]));
    y.push_back(group.timing(i).median_ms);
    result.points.push_back({series.lengths[i], group.timing(i).median_ms});
  }
  result.exponent = fitted_exponent(x, y);
  result.disturbed = group.disturbed();
  session.results().exponents.push_back(result);
}

std::vector<Neighbourhood> list_neighbourhoods(Isa isa, bool quick) {
  using Sizes = std::vector<std::int64_t>;
  std::vector<Neighbourhood> all;
  const auto add = [&](const Shape& shape, std::int64_t shorter, std::int64_t longer) {
    Neighbourhood one{.center = case_of(isa, shape)};
    for (const std::int64_t length : quick ? Sizes{longer} : Sizes{shorter, longer}) {
      one.others.push_back(case_of(isa, with_length(shape, length)));
    }
    for (const std::int64_t head_dim : quick ? Sizes{136} : Sizes{120, 136}) {
      Shape other = shape;
      other.head_dim = head_dim;
      one.others.push_back(case_of(isa, other));
    }
    all.push_back(one);
  };
  add({}, 2000, 2100);
  add({.causal = true}, 2000, 2100);
  add({.dtype = DType::kBF16}, 2000, 2100);
  add({.pass = Pass::kBackward}, 2000, 2100);
  add({.pass = Pass::kBackward, .dtype = DType::kBF16}, 2000, 2100);
  add(decode_shape(), 32000, 33000);
  return all;
}

void compare_neighbours(Session& session, const Neighbourhood& neighbourhood) {
  session.listener().begin(neighbourhood.name());
  const Isa isa = neighbourhood.center.isa;
  Group group(session, isa);
  if (!group.add(neighbourhood.center)) return;
  for (const Case& other : neighbourhood.others) {
    if (!group.add(other)) return;
  }
  group.run();
  for (std::size_t i = 0; i < neighbourhood.others.size(); ++i) {
    session.results().neighbours.push_back({.name = neighbourhood.others[i].name(),
                                            .of = neighbourhood.center.name(),
                                            .isa = ladon::name_of(isa),
                                            .ratio = group.share(i + 1) / group.share(0),
                                            .target = 1 - kNear,
                                            .disturbed = group.disturbed()});
  }
}

}  // namespace ladon::bench
