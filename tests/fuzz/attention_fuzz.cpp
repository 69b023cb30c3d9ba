// Random cases over every option, in every place, against the reference.
//
//   attention_fuzz [--cases N] [--seed S] [--isa NAME | --device cuda]
//
// Without --isa or --device, in all places that tests/support/places.h finds. Prints the worst
// error of each output as a multiple of its bound; exits with 1 on a failure, after printing how to
// repeat it.

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "support/places.h"
#include "support/run_case.h"

namespace {

using ladon::test::Place;

struct Arguments {
  std::int64_t cases = 2000;
  std::uint64_t seed = 20261115;
  std::vector<Place> places;
};

template <class Integer>
Integer parse_number(const std::string& flag, const std::string& value) {
  Integer number{};
  const char* const end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{} || stop != end) {
    throw std::invalid_argument(flag + ": '" + value + "' is not a number");
  }
  return number;
}

Place parse_isa(const std::string& name) {
  const std::optional<ladon::Isa> isa = ladon::isa_from_name(name);
  if (!isa) throw std::invalid_argument("--isa: unknown instruction set '" + name + "'");
  return {.isa = *isa};
}

Place parse_device(const std::string& name) {
  if (name != "cuda") throw std::invalid_argument("--device: '" + name + "' is not cuda");
  return {.isa = ladon::test::runnable_isas().back(), .kind = Place::Kind::kCuda};
}

/// The reference is what the kernels are compared with: it runs only when it is asked for.
std::vector<Place> default_places() {
  std::vector<Place> places = ladon::test::places();
  if (places.size() > 1) std::erase_if(places, [](const Place& one) { return one.is_reference(); });
  return places;
}

Arguments parse(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string flag = values[i];
    if (i + 1 == count) throw std::invalid_argument(flag + " needs a value");
    const std::string value = values[++i];
    if (flag == "--cases") {
      arguments.cases = parse_number<std::int64_t>(flag, value);
    } else if (flag == "--seed") {
      arguments.seed = parse_number<std::uint64_t>(flag, value);
    } else if (flag == "--isa") {
      arguments.places = {parse_isa(value)};
    } else if (flag == "--device") {
      arguments.places = {parse_device(value)};
    } else {
      throw std::invalid_argument("unknown flag " + flag);
    }
  }
  if (arguments.cases < 1) throw std::invalid_argument("--cases: wants at least 1");
  if (arguments.places.empty()) arguments.places = default_places();
  return arguments;
}

int fuzz(const Arguments& arguments) {
  using namespace ladon;
  // Thread counts differ from case to case; results may not.
  std::vector<Context> contexts;
  for (const Place& place : arguments.places) {
    for (const int threads : {1, 2, 3}) contexts.push_back(place.context(threads));
  }
  std::map<std::string, test::Ratios> worst;
  int failures = 0;
  for (std::int64_t i = 0; i < arguments.cases && failures < 10; ++i) {
    Random random(arguments.seed, static_cast<std::uint64_t>(i));
    test::Case problem = test::random_case(random);
    if (i % 5 == 0) test::make_shard(random, problem);
    const test::CaseData data(problem);
    const test::Truth truth = test::truth_of(data);
    for (std::size_t c = static_cast<std::size_t>(i % 3); c < contexts.size(); c += 3) {
      const std::string wrong =
          test::check_case(contexts[c], data, truth, &worst[name_of(problem.dtype)]);
      if (wrong.empty()) continue;
      ++failures;
      std::cout << "case " << i << " of seed " << arguments.seed << ": " << wrong << std::endl;
    }
  }
  std::cout << arguments.cases << " cases on " << arguments.places.size()
            << " places; worst error as a multiple of its bound:\n";
  for (const auto& [dtype, ratios] : worst) {
    std::cout << "  " << dtype << ": " << ratios.describe() << '\n';
  }
  std::cout << failures << " failures" << std::endl;
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** values) {
  try {
    return fuzz(parse(count, values));
  } catch (const std::exception& error) {
    std::cerr << "attention_fuzz: " << error.what() << '\n';
    return 2;
  }
}
