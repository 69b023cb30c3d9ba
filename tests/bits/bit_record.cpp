// Bits that must not change unnoticed: hashes of the results of random problems, for each
// instruction set, compared with those that recorded.txt holds.
//
//   bit_record --compare FILE    every instruction set that runs here; 1 if one differs
//   bit_record --write FILE      records them; sets that do not run here keep what FILE has; with -
//                                to standard output
//   bit_record --details CASE    the hash of each result of one case, such as multi_head.3
//
// With LADON_ISA set, on that one alone. Results depend on the compiler and on the C library's exp
// and log too: where they are others than FILE says, --compare says so and exits with 77.

#include <gnu/libc-version.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bits/bit_cases.h"
#include "support/runnable_isas.h"

namespace {

using namespace ladon;
using namespace ladon::test;

constexpr std::uint64_t kSeed = 20261116;
constexpr int kSkipped = 77;

/// [case][instruction set] -> hash, as text.
using Table = std::map<std::string, std::map<std::string, std::string>>;

struct Record {
  std::string environment;
  Table table;
};

std::string environment() {
#if defined(__clang__)
  const std::string compiler = "clang " + std::to_string(__clang_major__);
#else
  const std::string compiler = "gcc " + std::to_string(__GNUC__);
#endif
  return compiler + ", glibc " + gnu_get_libc_version();
}

std::string case_name(const BitFamily& family, int index) {
  std::string number = std::to_string(index);
  if (number.size() < 2) number.insert(0, "0");
  return std::string(family.name) + "." + number;
}

BitHashes run_case(const Context& context, const BitFamily& family, int index) {
  std::uint64_t stream = static_cast<std::uint64_t>(index) << 8;
  for (const char letter : family.name) stream = stream * 31 + static_cast<unsigned char>(letter);
  Random random(kSeed, stream);
  BitHashes hashes;
  try {
    family.run(context, random, hashes);
  } catch (const std::exception& error) {
    throw std::runtime_error(case_name(family, index) + ": " + error.what());
  }
  return hashes;
}

Table run_all() {
  Table table;
  for (const Isa isa : runnable_isas()) {
    const Context context(ContextOptions{.num_threads = 2, .isa = isa});
    for (const BitFamily& family : bit_families()) {
      for (int i = 0; i < family.count; ++i) {
        char text[16];
        std::snprintf(text, sizeof text, "%08x", run_case(context, family, i).total());
        table[case_name(family, i)][name_of(isa)] = text;
      }
    }
  }
  return table;
}

/// "# environment", "case isa isa ...", and a line for each case; "-" where there is no hash.
Record read(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  Record record;
  std::string line;
  std::getline(file, line);
  record.environment = line.substr(line.find(' ') + 1);
  std::getline(file, line);
  std::istringstream header(line);
  std::string word;
  header >> word;
  std::vector<std::string> isas;
  while (header >> word) isas.push_back(word);
  while (std::getline(file, line)) {
    std::istringstream row(line);
    std::string name;
    row >> name;
    for (const std::string& isa : isas) {
      if (row >> word && word != "-") record.table[name][isa] = word;
    }
  }
  return record;
}

void write(std::ostream& file, const Table& table) {
  file << "# " << environment() << "\ncase";
  for (const IsaInfo& info : list_isas()) file << ' ' << info.name;
  file << '\n';
  for (const auto& [name, hashes] : table) {
    file << name;
    for (const IsaInfo& info : list_isas()) {
      const auto found = hashes.find(info.name);
      file << ' ' << (found == hashes.end() ? "-" : found->second);
    }
    file << '\n';
  }
}

int write_record(const std::string& path) {
  Table table = run_all();
  if (path == "-") {
    write(std::cout, table);
    return 0;
  }
  if (std::ifstream(path)) {
    for (const auto& [name, hashes] : read(path).table) {
      if (table.contains(name)) table[name].insert(hashes.begin(), hashes.end());
    }
  }
  std::ofstream file(path);
  write(file, table);
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
  std::cout << table.size() << " cases written\n";
  return 0;
}

int compare_record(const std::string& path) {
  const Record record = read(path);
  if (record.environment != environment()) {
    std::cout << "skipped: recorded with " << record.environment << ", this is " << environment()
              << '\n';
    return kSkipped;
  }
  int compared = 0;
  int different = 0;
  std::map<std::string, int> unknown;
  for (const auto& [name, hashes] : run_all()) {
    const auto row = record.table.find(name);
    for (const auto& [isa, hash] : hashes) {
      if (row == record.table.end() || !row->second.contains(isa)) {
        ++unknown[isa];
        continue;
      }
      ++compared;
      if (row->second.at(isa) == hash) continue;
      ++different;
      std::cout << name << " on " << isa << ": " << hash << ", recorded " << row->second.at(isa)
                << '\n';
    }
  }
  for (const auto& [isa, count] : unknown) {
    std::cout << count << " cases on " << isa << " have no record\n";
  }
  std::cout << compared << " compared, " << different << " different\n";
  return different == 0 && compared > 0 ? 0 : 1;
}

int print_details(const std::string& wanted) {
  for (const BitFamily& family : bit_families()) {
    for (int i = 0; i < family.count; ++i) {
      if (case_name(family, i) != wanted) continue;
      for (const Isa isa : runnable_isas()) {
        const Context context(ContextOptions{.num_threads = 2, .isa = isa});
        const BitHashes hashes = run_case(context, family, i);
        for (const BitHashes::Entry& entry : hashes.entries()) {
          std::printf("%s %s %016llx\n", name_of(isa), entry.name.c_str(),
                      static_cast<unsigned long long>(entry.hash));
        }
      }
      return 0;
    }
  }
  throw std::invalid_argument("no case " + wanted);
}

}  // namespace

int main(int count, char** values) {
  try {
    const std::string mode = count == 3 ? values[1] : "";
    if (mode == "--compare") return compare_record(values[2]);
    if (mode == "--write") return write_record(values[2]);
    if (mode == "--details") return print_details(values[2]);
    throw std::invalid_argument("usage: bit_record --compare FILE | --write FILE | --details CASE");
  } catch (const std::exception& error) {
    std::cerr << "bit_record: " << error.what() << '\n';
    return 2;
  }
}
