#include "parallel/context_schemes.h"

#include <algorithm>

#include "core/compute_dtype.h"
#include "core/context_impl.h"

namespace ladon {

SchemeFunctions functions_of(ContextScheme scheme) {
  switch (scheme) {
    case ContextScheme::kUlysses: return {attend_exchanged, attend_exchanged_backward};
    case ContextScheme::kRing: return {attend_ring, attend_ring_backward};
    default: return {attend_gathered, attend_gathered_backward};
  }
}

std::int64_t heads_at_once(const ContextCall& own, std::int64_t heads, std::int64_t bytes) {
  constexpr std::int64_t kStages = 8;  // of which one is not hidden
  constexpr std::int64_t kMost = std::int64_t{64} << 20;
  // Between two ranks. 10 GbE moves 36 KB in the time of its latency, InfiniBand 150 KB.
  constexpr std::int64_t kLeastMessage = std::int64_t{256} << 10;
  const std::int64_t ranks = own.whole.ranks();
  const std::int64_t of_one = std::max<std::int64_t>(1, bytes);
  const std::int64_t for_latency = kLeastMessage * ranks / of_one;
  const std::int64_t for_stages = (heads + kStages - 1) / kStages;
  return std::max<std::int64_t>(1, std::min(kMost / of_one, std::max(for_latency, for_stages)));
}

std::vector<Range> stages_of(std::int64_t count, std::int64_t at_once) {
  std::vector<Range> stages;
  for (std::int64_t first = 0; first < count; first += at_once) {
    stages.push_back({first, std::min(first + at_once, count)});
  }
  return stages;
}

void add_to(const Context& context, const ConstTensorView& from, const TensorView& to) {
  if (from.num_elements() == 0) return;
  const auto accumulate = [&](void* target) {
    backend_of(context).accumulate(
        {.from = {const_cast<void*>(from.data()), from.dtype(), from.num_elements()},
         .to = {target, to.dtype(), to.num_elements()}});
  };
  if (to.is_contiguous()) return accumulate(to.data());
  Tensor sum = Tensor::uninitialized(context, to.dtype(), to.shape());
  copy(context, to, sum);
  accumulate(sum.data());
  copy(context, sum, to);
  context.synchronize();  // before `sum` is freed
}

SideGradients::SideGradients(const ContextCall& own, const AttentionOptions& options) : own_(own) {
  const DType dtype = compute_dtype(own.q.dtype());
  const auto make = [&](const TensorView& wanted, const ConstTensorView& like) {
    return wanted.absent() || like.absent()
               ? Tensor()
               : Tensor::uninitialized(own.context, dtype, like.shape());
  };
  dbias_ = make(own.wanted.dbias, options.bias);
  dsinks_ = make(own.wanted.dsinks, options.sinks);
}

void SideGradients::add_views(AttentionGradients& gradients) {
  if (dbias_.rank() != 0) gradients.dbias = dbias_;
  if (dsinks_.rank() != 0) gradients.dsinks = dsinks_;
}

void SideGradients::add(const QueryPiece& piece, const Range& heads, ContextGradients& sums,
                        std::int64_t first_key) {
  if (dsinks_.rank() != 0) {
    add_to(own_.context, dsinks_, sums.dsinks.view().slice(0, heads.begin, heads.end));
  }
  if (dbias_.rank() == 0) return;
  TensorView to = sums.dbias;
  const std::int64_t begins[] = {piece.sequence, heads.begin, piece.first, first_key};
  for (int dim = 0; dim < 4; ++dim) {
    if (to.size(dim) == 1) continue;
    to = to.slice(dim, begins[dim], begins[dim] + dbias_.size(dim));
  }
  add_to(own_.context, dbias_, to);
}

}  // namespace ladon
