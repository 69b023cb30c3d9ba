// Calibration: sums of inputs and of their products. x^T x is what a projection's weight gradient
// computes, so its kernels do the work; rows are added in blocks of a fixed size, so that the order
// of each sum depends only on what was added.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "convert/calibration_impl.h"
#include "convert/host_context.h"
#include "core/checks.h"
#include "core/fail.h"
#include "ladon/safetensors.h"
#include "layers/projection.h"

namespace ladon {
namespace {

constexpr std::string_view kAdd = "Calibration::add";
constexpr std::string_view kLoad = "Calibration::load";
constexpr std::int64_t kMaxWidth = 1 << 20;
constexpr std::int64_t kBlock = 1024;  // rows: 32 MiB of f64 at a width of 4096

void check_finite_rows(const Tensor& rows) {
  const auto* const first = rows.data_as<double>();
  const auto* const last = first + rows.num_elements();
  const auto* const found = std::find_if(first, last, [](double v) { return !std::isfinite(v); });
  if (found == last) return;
  fail(kAdd, "x", "got " + text_of(*found) + ", expected finite numbers");
}

/// A number of the file's metadata.
std::int64_t read_count(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.metadata().find(name);
  std::int64_t value = 0;
  if (found != file.metadata().end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size() && value > 0) return value;
  }
  fail(ErrorCode::kIo, kLoad, file.path().string(),
       "got no positive number as " + name + ", expected a file by Calibration::save()");
}

Tensor read_sums(const SafetensorsFile& file, const std::string& name, int rank) {
  const auto refuse = [&](const std::string& what) {
    fail(ErrorCode::kIo, kLoad, file.path().string(), name + ": " + what);
  };
  const SafetensorsEntry& entry = file.entry(name);
  const auto& shape = entry.shape;
  const bool square = shape.size() == 1 || (shape.size() == 2 && shape[0] == shape[1]);
  if (entry.dtype != DType::kF64 || std::cmp_not_equal(shape.size(), rank) || !square) {
    refuse("got dtype " + std::string(entry.dtype_name) + " and " + std::to_string(shape.size()) +
           " dimensions, expected F64 and " + std::to_string(rank) + " of one size");
  }
  Tensor tensor = file.load(name);
  const auto* const first = tensor.data_as<double>();
  if (!std::all_of(first, first + tensor.num_elements(),
                   [](double v) { return std::isfinite(v); })) {
    refuse("got numbers that are not finite");
  }
  return tensor;
}

}  // namespace

Calibration::Impl::Impl(std::int64_t width)
    : products(DType::kF64, {width, width}), sums(DType::kF64, {width}) {}

Calibration::Calibration(std::int64_t width) {
  if (width < 1 || width > kMaxWidth) {
    fail("Calibration", "width",
         "got " + std::to_string(width) + ", expected 1 to " + std::to_string(kMaxWidth));
  }
  impl_ = std::make_unique<Impl>(width);
}
Calibration::~Calibration() = default;
Calibration::Calibration(Calibration&&) noexcept = default;
Calibration& Calibration::operator=(Calibration&&) noexcept = default;

std::int64_t Calibration::width() const noexcept { return impl_->sums.size(0); }
std::int64_t Calibration::tokens() const noexcept { return impl_->tokens; }
std::int64_t Calibration::longest() const noexcept { return impl_->longest; }

void Calibration::add(const Context& context, const ConstTensorView& x) {
  check_present(kAdd, {"x", x});
  const int rank = x.rank();
  if ((rank != 2 && rank != 3) || x.size(rank - 1) != width()) {
    fail(kAdd, "x",
         got_shape(x) + ", expected [seq, " + std::to_string(width()) + "] or [batch, seq, " +
             std::to_string(width()) + "]");
  }
  const Operation operation(kAdd, x.device().is_cpu() ? DeviceId() : context.device());
  check_strided_view(operation, {"x", x}, rank);
  check_float(operation, {"x", x});
  const std::int64_t rows = x.num_elements() / width();
  if (rows == 0) fail(kAdd, "x", got_shape(x) + ", expected at least one token");

  const convert::HostContext host(context);
  // One sequence of a batch after the other, so that a strided batch needs no copy of the whole.
  const std::int64_t sequences = rank == 3 ? x.size(0) : 1;
  const std::int64_t seq = rows / sequences;
  const auto for_each_block = [&](auto&& take) {
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
      const ConstTensorView whole = rank == 3 ? x.select(0, sequence) : x;
      for (std::int64_t first = 0; first < seq; first += kBlock) {
        const ConstTensorView block = whole.slice(0, first, std::min(first + kBlock, seq));
        Tensor wide = Tensor::copy_of(context, block, DType::kF64);
        take(x.device().is_cpu() ? std::move(wide) : wide.to_host());
      }
    }
  };
  for_each_block(check_finite_rows);
  // Into copies, so that a failure in between leaves the sums as they were.
  Tensor products = Tensor::copy_of(host, impl_->products);
  Tensor sums = Tensor::copy_of(host, impl_->sums);
  for_each_block(
      [&](const Tensor& block) { add_weight_gradient(host, block, block, products, sums); });
  impl_->products = std::move(products);
  impl_->sums = std::move(sums);
  impl_->tokens += rows;
  impl_->longest = std::max(impl_->longest, seq);
}

void Calibration::merge(const Calibration& other) {
  if (other.width() != width()) {
    fail("Calibration::merge", "other",
         "got a width of " + std::to_string(other.width()) + ", expected " +
             std::to_string(width()));
  }
  const auto add_all = [](Tensor& to, const Tensor& from) {
    auto* const sum = to.data_as<double>();
    const auto* const term = from.data_as<double>();
    for (std::int64_t i = 0; i < to.num_elements(); ++i) sum[i] += term[i];
  };
  add_all(impl_->products, other.impl_->products);
  add_all(impl_->sums, other.impl_->sums);
  impl_->tokens += other.impl_->tokens;
  impl_->longest = std::max(impl_->longest, other.impl_->longest);
}

void Calibration::save(const std::filesystem::path& path) const {
  if (tokens() == 0) fail("Calibration::save", "tokens", "got 0, expected something to save");
  const SafetensorsItem items[] = {{"products", impl_->products}, {"sums", impl_->sums}};
  write_safetensors(path, items,
                    {{"format", "ladon calibration"},
                     {"tokens", std::to_string(tokens())},
                     {"longest", std::to_string(longest())}});
}

Calibration Calibration::load(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const std::int64_t tokens = read_count(file, "tokens");
  const std::int64_t longest = read_count(file, "longest");
  Tensor sums = read_sums(file, "sums", 1);
  Tensor products = read_sums(file, "products", 2);
  if (products.size(0) != sums.size(0)) {
    fail(ErrorCode::kIo, kLoad, path.string(),
         "got products of " + std::to_string(products.size(0)) + " and sums of " +
             std::to_string(sums.size(0)) + ", expected one width");
  }
  Calibration calibration(sums.size(0));
  calibration.impl_->sums = std::move(sums);
  calibration.impl_->products = std::move(products);
  calibration.impl_->tokens = tokens;
  calibration.impl_->longest = longest;
  return calibration;
}

}  // namespace ladon
