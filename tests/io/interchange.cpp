// The C++ side of interchange.py: `interchange write FOLDER` writes files for Python to read,
// `interchange check FOLDER` reads what Python wrote and compares it.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/io_support.h"
#include "ladon/npy.h"
#include "ladon/safetensors.h"

namespace ladon::test {
namespace {

struct Made {
  std::string name;
  Tensor tensor;
};

/// Element i of every tensor is i % 2 for bool, else i: both sides know it.
std::vector<Made> make_tensors() {
  std::vector<Made> made;
  for (const DType dtype : kAllDTypes) {
    for (const auto& [suffix, shape] :
         {std::pair("scalar", Dims{}), std::pair("row", Dims{7}), std::pair("box", Dims{2, 3, 4}),
          std::pair("empty", Dims{3, 0})}) {
      Tensor tensor(dtype, shape);
      std::vector<double> values;
      for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
        values.push_back(static_cast<double>(dtype == DType::kBool ? i % 2 : i));
      }
      made.push_back(
          {std::string(name_of(dtype)) + "_" + suffix, Tensor::from_values(dtype, shape, values)});
    }
  }
  return made;
}

void write_all(const std::filesystem::path& folder) {
  const std::vector<Made> made = make_tensors();
  std::vector<SafetensorsItem> items;
  for (const auto& [name, tensor] : made) {
    items.push_back({name, tensor});
    write_npy(folder / (name + ".npy"), tensor);
  }
  write_safetensors(folder / "ours.safetensors", items, {{"by", "ladon"}});
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what + " differs");
}

void check_all(const std::filesystem::path& folder) {
  const SafetensorsFile file = SafetensorsFile::open(folder / "theirs.safetensors");
  const std::map<std::string, Tensor> archive = read_npz(folder / "theirs.npz");
  expect(file.metadata() == std::map<std::string, std::string>{{"by", "python"}}, "metadata");
  const std::vector<Made> made = make_tensors();
  expect(file.entries().size() == made.size(), "the number of tensors");
  for (const Made& entry : made) {
    const std::string& name = entry.name;
    const Tensor& tensor = entry.tensor;
    const auto same = [&](const ConstTensorView& view, const std::string& where) {
      expect(view.dtype() == tensor.dtype(), name + "'s dtype in " + where);
      expect(view.shape() == tensor.shape(), name + "'s shape in " + where);
      expect(bytes_of(view) == bytes_of(tensor), name + " in " + where);
    };
    same(file.tensor(name), "theirs.safetensors");
    same(file.load(name), "theirs.safetensors");
    same(archive.at(name), "theirs.npz");
    for (const char* kind : {"c_little", "c_big", "f_little", "f_big", "version2", "version3"}) {
      const std::string path = name + "." + kind + ".npy";
      same(read_npy(folder / path), path);
    }
  }
}

}  // namespace
}  // namespace ladon::test

int main(int argc, char** argv) {
  try {
    if (argc == 3 && std::string_view(argv[1]) == "write") {
      ladon::test::write_all(argv[2]);
    } else if (argc == 3 && std::string_view(argv[1]) == "check") {
      ladon::test::check_all(argv[2]);
    } else {
      std::fprintf(stderr, "usage: interchange write|check FOLDER\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "interchange: %s\n", error.what());
    return 1;
  }
  return 0;
}
