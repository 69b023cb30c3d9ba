// A small model and an input in a folder, for `ladon run`.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "ladon/npy.h"
#include "ladon/random.h"
#include "models/model_folder.h"
#include "support/host_context.h"

namespace ladon::test {

/// A folder with a small model in it, and an input.
class CliRun : public testing::Test {
 protected:
  static constexpr std::int64_t kLength = 13;

  void SetUp() override {
    std::filesystem::create_directory(temp_ / "files");
    write_case("llama3");
    save_input({2, kLength, 20}, DType::kF32);
  }

  void write_case(const std::string& name) {
    std::filesystem::remove_all(temp_ / "model");
    std::filesystem::create_directory(temp_ / "model");
    write_model(temp_ / "model", family_case(name), DType::kF32);
  }

  void save_input(const Dims& shape, DType dtype) {
    input_ = Tensor(dtype, shape);
    if (is_float(dtype)) fill_normal(host_context(), input_, 0, 1, 1);
    write_npy(file("x.npy"), input_);
  }

  std::string model() const { return (temp_ / "model").string(); }
  std::string file(const std::string& name) const { return (temp_ / "files" / name).string(); }
  /// Names in the folder of files.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(temp_ / "files")) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::vector<std::string> arguments(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all{"run",     "--model",     model(),    "--layer",    "1",
                                 "--input", file("x.npy"), "--output", file("y.npy")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  Tensor expected() const {
    const auto layer = load_attention(host_context(), model(), 1, {.dtype = DType::kF32});
    return layer->forward(Context(), input_);
  }

  static double difference(const Tensor& a, const Tensor& b) {
    EXPECT_EQ(a.shape(), b.shape());
    const Tensor x = Tensor::copy_of(host_context(), a, DType::kF64);
    const Tensor y = Tensor::copy_of(host_context(), b, DType::kF64);
    double most = 0;
    for (std::int64_t i = 0; i < x.num_elements(); ++i) {
      most = std::max(most, std::abs(x.data_as<double>()[i] - y.data_as<double>()[i]));
    }
    return most;
  }

  TempFolder temp_;
  Tensor input_;
};

}  // namespace ladon::test
