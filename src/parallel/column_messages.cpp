// Columns of matrices between ranks.

#include "core/compute_dtype.h"
#include "parallel/host_messages.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

Tensor gather_columns(const Context& context, CollectiveCall& call, const ConstTensorView& own,
                      std::int64_t width) {
  const std::int64_t rows = own.size(0);
  const Tensor mine = on_host(context, own);
  std::vector<Tensor> parts;
  for (int rank = 0; rank < call.size(); ++rank) {
    const std::int64_t length = share_of(width, rank, call.size()).length();
    parts.push_back(Tensor::uninitialized(own.dtype(), {rows, length}));
  }
  gather_bytes(call, host_bytes(mine), [&](int other) {
    return host_bytes(parts[static_cast<std::size_t>(other)].view());
  });
  Tensor all = Tensor::uninitialized(context, own.dtype(), {rows, width});
  for (int rank = 0; rank < call.size(); ++rank) {
    const Range share = share_of(width, rank, call.size());
    copy(context, parts[static_cast<std::size_t>(rank)],
         all.view().slice(1, share.begin, share.end));
  }
  context.synchronize();
  return all;
}

Tensor reduce_columns(const Context& context, CollectiveCall& call, const ConstTensorView& terms) {
  const std::int64_t rows = terms.size(0);
  std::vector<Tensor> outgoing;
  for (int rank = 0; rank < call.size(); ++rank) {
    const Range share = share_of(terms.size(1), rank, call.size());
    outgoing.push_back(on_host(context, terms.slice(1, share.begin, share.end)));
  }
  const std::int64_t own = share_of(terms.size(1), call.rank(), call.size()).length();
  Tensor arrived = Tensor::uninitialized(terms.dtype(), {call.size(), rows, own});
  exchange_bytes(
      call,
      [&](int other) {
        return host_bytes(std::as_const(outgoing[static_cast<std::size_t>(other)]));
      },
      [&](int other) { return host_bytes(arrived.view().select(0, other)); });
  return sum_in_order(context, arrived);
}

void sum_over_ranks(const Context& context, CollectiveCall& call, const TensorView& terms,
                    int first, int end) {
  if (terms.absent() || end - first == 1) return;
  if (end - first == call.size()) {
    copy(context, all_reduce_sums(context, call, terms), terms);
    return;
  }
  const Tensor own = on_host(context, terms);
  Tensor arrived = Tensor::uninitialized(terms.dtype(), {end - first, terms.num_elements()});
  const auto takes_part = [&](int other) { return other >= first && other < end; };
  exchange_bytes(
      call,
      [&](int other) { return takes_part(other) ? host_bytes(own) : std::span<const std::byte>(); },
      [&](int other) {
        return takes_part(other) ? host_bytes(arrived.view().select(0, other - first))
                                 : std::span<std::byte>();
      });
  const Tensor sum = sum_in_order(context, arrived);
  copy(context, sum.view().reshape(terms.shape()), terms);
  context.synchronize();
}

}  // namespace ladon
