// Random cases over every option, on every instruction set, against the reference.
//
//   attention_fuzz [--cases N] [--seed S] [--isa NAME]
//
// Prints the worst error of each output as a multiple of its bound; exits with 1 on a failure,
// after printing how to repeat it.

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/run_case.h"

namespace {

struct Arguments {
  std::int64_t cases = 2000;
  std::uint64_t seed = 20261115;
  std::string isa;
};

Arguments parse(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string flag = values[i];
    if (i + 1 == count) throw std::invalid_argument(flag + " needs a value");
    const std::string value = values[++i];
    if (flag == "--cases") {
      arguments.cases = std::stoll(value);
    } else if (flag == "--seed") {
      arguments.seed = std::stoull(value);
    } else if (flag == "--isa") {
      arguments.isa = value;
    } else {
      throw std::invalid_argument("unknown flag " + flag);
    }
  }
  return arguments;
}

int fuzz(const Arguments& arguments) {
  using namespace ladon;
  std::vector<Isa> isas;
  for (const IsaInfo& info : list_isas()) {
    if (info.runnable && info.isa != Isa::kReference &&
        (arguments.isa.empty() || arguments.isa == info.name)) {
      isas.push_back(info.isa);
    }
  }
  // Thread counts differ from case to case; results may not.
  std::vector<Context> contexts;
  for (const Isa isa : isas) {
    for (const int threads : {1, 2, 3}) {
      contexts.emplace_back(ContextOptions{.num_threads = threads, .isa = isa});
    }
  }
  std::map<std::string, test::Ratios> worst;
  int failures = 0;
  for (std::int64_t i = 0; i < arguments.cases && failures < 10; ++i) {
    Random random(arguments.seed, static_cast<std::uint64_t>(i));
    const test::Case problem = test::random_case(random);
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
  std::cout << arguments.cases << " cases on " << isas.size()
            << " instruction sets; worst error as a multiple of its bound:\n";
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
