#include "parallel/host_messages.h"

#include "core/context_impl.h"
#include "parallel/share.h"

namespace ladon {

Tensor on_host(const Context& context, const ConstTensorView& view) {
  Tensor copied = Tensor::uninitialized(view.dtype(), view.shape());
  copy(context, view, copied);
  return copied;
}

Tensor on_device(const Context& context, const ConstTensorView& view) {
  Tensor copied = Tensor::uninitialized(context, view.dtype(), view.shape());
  copy(context, view, copied);
  return copied;
}

void begin_exchange(CollectiveCall& call, const std::vector<Tensor>& outgoing,
                    std::vector<Tensor>& incoming) {
  begin_exchange(
      call,
      [&](int other) {
        const Tensor& message = outgoing[static_cast<std::size_t>(other)];
        return message.rank() == 0 ? std::span<const std::byte>() : host_bytes(message);
      },
      [&](int other) {
        Tensor& message = incoming[static_cast<std::size_t>(other)];
        return message.rank() == 0 ? std::span<std::byte>() : host_bytes(message.view());
      });
}

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
  const Tensor sent = on_host(context, terms);
  const std::int64_t count = terms.num_elements();
  // Each rank sums its share of the elements.
  const auto share = [&](auto&& view, int r) {
    const Range range = share_of(count, r, call.size());
    return view.reshape({count}).slice(0, range.begin, range.end);
  };
  Tensor arrived = Tensor::uninitialized(
      terms.dtype(), {call.size(), share_of(count, call.rank(), call.size()).length()});
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
