// Messages between all ranks, and sums of what they bring, inside a CollectiveCall. Memory is the
// host's; tensors of a device are copied there and back.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "ladon/context.h"
#include "ladon/tensor.h"
#include "parallel/collective_call.h"

namespace ladon {

/// The bytes of a contiguous view on the host.
inline std::span<const std::byte> host_bytes(const ConstTensorView& view) {
  return {static_cast<const std::byte*>(view.data()),
          static_cast<std::size_t>(view.num_elements()) * size_of(view.dtype())};
}
inline std::span<std::byte> host_bytes(const TensorView& view) {
  return {static_cast<std::byte*>(view.data()),
          static_cast<std::size_t>(view.num_elements()) * size_of(view.dtype())};
}
inline std::span<const std::byte> host_bytes(const Tensor& tensor) {
  return host_bytes(tensor.view());
}

inline void copy_bytes(std::span<const std::byte> from, std::span<std::byte> to) {
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

/// A contiguous copy on the host, and one on the Context's device.
Tensor on_host(const Context& context, const ConstTensorView& view);
Tensor on_device(const Context& context, const ConstTensorView& view);

/// outgoing(r) goes to rank r, whose bytes arrive in incoming(r). Empty ones are left out; this
/// rank's own bytes are copied.
template <class Outgoing, class Incoming>
void begin_exchange(CollectiveCall& call, const Outgoing& outgoing, const Incoming& incoming) {
  std::vector<Send> sends;
  std::vector<Receive> receives;
  copy_bytes(outgoing(call.rank()), incoming(call.rank()));
  for (const int other : call.others()) {
    const std::span<const std::byte> out = outgoing(other);
    const std::span<std::byte> in = incoming(other);
    if (!out.empty()) sends.push_back({other, out});
    if (!in.empty()) receives.push_back({other, in});
  }
  call.begin(sends, receives);
}

template <class Outgoing, class Incoming>
void exchange_bytes(CollectiveCall& call, const Outgoing& outgoing, const Incoming& incoming) {
  begin_exchange(call, outgoing, incoming);
  call.wait();
}

/// The same for a message to and from each rank. Ranks for which there is none have an empty
/// Tensor.
void begin_exchange(CollectiveCall& call, const std::vector<Tensor>& outgoing,
                    std::vector<Tensor>& incoming);

/// The same bytes to every rank.
template <class Incoming>
void gather_bytes(CollectiveCall& call, std::span<const std::byte> own, const Incoming& incoming) {
  exchange_bytes(
      call, [&](int /*other*/) { return own; }, incoming);
}

/// terms[0] + terms[1] + ... in this order, on the Context's device. `terms` are f32 or f64 on the
/// host.
Tensor sum_in_order(const Context& context, const Tensor& terms);

/// The sum over ranks, in their order, of f32 or f64 tensors on the Context's device: the same bits
/// on every rank. On the host.
Tensor all_reduce_sums(const Context& context, CollectiveCall& call, const ConstTensorView& terms);

}  // namespace ladon
