// The conversions that need linear algebra, in a build without it (LADON_CONVERT=OFF).
#include <string_view>

#include "core/fail.h"
#include "ladon/convert.h"

namespace ladon {
namespace {

[[noreturn]] void refuse(std::string_view operation) {
  fail(ErrorCode::kUnsupported, operation, "LADON_CONVERT",
       "got a build without Eigen, expected one with it");
}

}  // namespace

class OutputFit::Impl {};

MultiHeadAttention to_mha(const Context&, const LatentAttention&) { refuse("to_mha"); }
MultiHeadAttention to_mqa(const Context&, const LatentAttention&) { refuse("to_mqa"); }
ConvertedMultiHead to_gqa(const Context&, const MultiHeadAttention&, const GqaConversion&,
                          const Calibration*) {
  refuse("to_gqa");
}
ConvertedLatent to_mla(const Context&, const MultiHeadAttention&, const MlaConversion&,
                       const Calibration*) {
  refuse("to_mla");
}
ConvertedLatent reduce_rank(const Context&, const LatentAttention&, std::int64_t,
                            const Calibration*) {
  refuse("reduce_rank");
}
BalancedMultiHead balance_channels(const Context&, const MultiHeadAttention&, const Calibration*) {
  refuse("balance_channels");
}
OutputFit::OutputFit(const AttentionLayer&, const AttentionLayer&) { refuse("OutputFit"); }
OutputFit::~OutputFit() = default;
OutputFit::OutputFit(OutputFit&&) noexcept = default;
OutputFit& OutputFit::operator=(OutputFit&&) noexcept = default;
void OutputFit::add(const Context&, const ConstTensorView&) { refuse("OutputFit::add"); }
void OutputFit::apply(const Context&, AttentionLayer&, std::optional<double>) const {
  refuse("OutputFit::apply");
}

}  // namespace ladon
