#include "parallel/host_messages.h"

#include "core/context_impl.h"

namespace ladon {

Tensor sum_in_order(const Context& context, const Tensor& terms) {
  const auto term = [&](std::int64_t r) { return terms.view().select(0, r); };
  Tensor sum = Tensor::uninitialized(context, terms.dtype(), term(0).shape());
  copy(context, term(0), sum);
  const bool is_host = context.device() == DeviceId();
  Tensor next;
  for (std::int64_t r = 1; r < terms.size(0); ++r) {
    ConstTensorView from = term(r);
    if (!is_host) {
      next = Tensor::uninitialized(context, terms.dtype(), sum.shape());
      copy(context, from, next);
      from = next;
    }
    backend_of(context).accumulate(
        {.from = {const_cast<void*>(from.data()), from.dtype(), from.num_elements()},
         .to = {sum.data(), sum.dtype(), sum.num_elements()}});
  }
  context.synchronize();  // before `next` is freed
  return sum;
}

Tensor all_reduce_sums(const Context& context, CollectiveCall& call, const ConstTensorView& terms) {
  Tensor own = Tensor::uninitialized(terms.dtype(), terms.shape());
  copy(context, terms, own);
  const std::int64_t count = terms.num_elements();
  // Rank r sums elements [begin(r), begin(r + 1)).
  const auto begin = [&](int r) { return count * r / call.size(); };
  const auto share = [&](auto&& view, int r) {
    return view.reshape({count}).slice(0, begin(r), begin(r + 1));
  };
  const std::int64_t length = begin(call.rank() + 1) - begin(call.rank());
  Tensor arrived = Tensor::uninitialized(terms.dtype(), {call.size(), length});
  const Tensor& sent = own;
  exchange_bytes(
      call, [&](int other) { return host_bytes(share(sent.view(), other)); },
      [&](int other) { return host_bytes(arrived.view().select(0, other)); });
  const Tensor summed = sum_in_order(context, arrived).to_host();
  Tensor all = Tensor::uninitialized(terms.dtype(), terms.shape());
  gather_bytes(call, host_bytes(summed),
               [&](int other) { return host_bytes(share(all.view(), other)); });
  return all;
}

}  // namespace ladon
