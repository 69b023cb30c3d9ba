// Communicator: what all engines share, and the collectives above them.

#include "ladon/communicator.h"

#include <algorithm>
#include <array>
#include <thread>
#include <tuple>
#include <utility>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "parallel/collective_call.h"
#include "parallel/host_messages.h"

namespace ladon {
namespace {

void check_sums(std::string_view operation, const NamedView& argument) {
  const DType dtype = argument.view.dtype();
  if (dtype == DType::kF32 || dtype == DType::kF64) return;
  fail(
      operation, argument.name,
      std::string("got dtype ") + name_of(dtype) + ", expected f32 or f64, which sums are kept in");
}

/// [size, ...shape].
Dims one_for_each(int size, const Dims& shape) {
  std::array<std::int64_t, kMaxRank> sizes{size};
  std::copy(shape.begin(), shape.end(), sizes.begin() + 1);
  return Dims(std::span(sizes.data(), static_cast<std::size_t>(shape.rank()) + 1));
}

/// `single` is one rank's, `all` has one for each.
void check_collective(const Operation& operation, const Communicator& communicator,
                      const NamedView& single, const NamedView& all) {
  check_strided_view(operation, single, single.view.rank());
  if (single.view.rank() >= kMaxRank) {
    fail(operation, single.name,
         got_shape(single.view) + ", expected at most " + std::to_string(kMaxRank - 1) +
             " dimensions");
  }
  check_strided_view(operation, all, single.view.rank() + 1);
  check_dtype(operation, all, single.view.dtype());
  check_shape(operation, all, one_for_each(communicator.size(), single.view.shape()));
}

void check_written(const Operation& operation, const NamedView& output, const NamedView& input) {
  const NamedView outputs[] = {output};
  const NamedView inputs[] = {input};
  check_no_overlap(operation, outputs, inputs);
}

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options) : options_(options) {
  if (options.deadline.count() > 0) return;
  fail("Communicator", "deadline",
       "got " + std::to_string(options.deadline.count()) + " ms, expected more than 0");
}

double Communicator::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Communicator::pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  std::unique_ptr<Communicator> made;
  run_collective(
      *this, "Communicator::split",
      [&](CallSignature& /*signature*/) {
        if (color >= 0) return;
        fail("Communicator::split", "color",
             "got " + std::to_string(color) + ", expected 0 or more");
      },
      [&](CollectiveCall& call) {
        const std::array<std::int32_t, 2> own{color, key};
        std::vector<std::array<std::int32_t, 2>> all(static_cast<std::size_t>(size()));
        gather_bytes(call, std::as_bytes(std::span(own)), [&](int other) {
          return std::as_writable_bytes(std::span(all[static_cast<std::size_t>(other)]));
        });
        std::vector<std::pair<std::int32_t, int>> members;  // key, rank
        for (int other = 0; other < size(); ++other) {
          const auto& [other_color, other_key] = all[static_cast<std::size_t>(other)];
          if (other_color == color) members.emplace_back(other_key, other);
        }
        std::sort(members.begin(), members.end());
        std::vector<int> group;
        group.reserve(members.size());
        for (const auto& member : members) group.push_back(member.second);
        made = call.make_group(group, color, key);
      },
      [] {});
  return made;
}

void barrier(Communicator& communicator) {
  run_collective(
      communicator, "barrier", [](CallSignature&) {}, [](CollectiveCall&) {}, [] {});
}

void all_gather(const Context& context, Communicator& communicator, const ConstTensorView& part,
                const TensorView& all) {
  const Operation operation("all_gather", context);
  Tensor received;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        check_collective(operation, communicator, {"part", part}, {"all", all});
        check_written(operation, {"all", all}, {"part", part});
        signature.add("part", part);
      },
      [&](CollectiveCall& call) {
        const Tensor own = on_host(context, part);
        received = Tensor::uninitialized(all.dtype(), all.shape());
        gather_bytes(call, host_bytes(own),
                     [&](int other) { return host_bytes(received.view().select(0, other)); });
      },
      [&] { copy(context, received, all); });
}

void all_to_all(const Context& context, Communicator& communicator, const ConstTensorView& parts,
                const TensorView& received) {
  const Operation operation("all_to_all", context);
  Tensor arrived;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        check_strided_view(operation, {"parts", parts}, parts.rank());
        check_strided_view(operation, {"received", received}, parts.rank());
        check_dtype(operation, {"received", received}, parts.dtype());
        check_shape(operation, {"received", received}, parts.shape());
        if (parts.rank() == 0 || parts.size(0) != communicator.size()) {
          fail(operation, "parts",
               got_shape(parts) + ", expected one part for each of " +
                   std::to_string(communicator.size()) + " ranks");
        }
        check_written(operation, {"received", received}, {"parts", parts});
        signature.add("parts", parts);
      },
      [&](CollectiveCall& call) {
        const Tensor own = on_host(context, parts);
        arrived = Tensor::uninitialized(parts.dtype(), parts.shape());
        exchange_bytes(
            call, [&](int other) { return host_bytes(own.view().select(0, other)); },
            [&](int other) { return host_bytes(arrived.view().select(0, other)); });
      },
      [&] { copy(context, arrived, received); });
}

void reduce_scatter(const Context& context, Communicator& communicator,
                    const ConstTensorView& parts, const TensorView& sum) {
  const Operation operation("reduce_scatter", context);
  Tensor total;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        check_collective(operation, communicator, {"sum", sum}, {"parts", parts});
        check_sums(operation, {"parts", parts});
        check_written(operation, {"sum", sum}, {"parts", parts});
        signature.add("parts", parts);
      },
      [&](CollectiveCall& call) {
        const Tensor own = on_host(context, parts);
        Tensor arrived = Tensor::uninitialized(parts.dtype(), parts.shape());
        exchange_bytes(
            call, [&](int other) { return host_bytes(own.view().select(0, other)); },
            [&](int other) { return host_bytes(arrived.view().select(0, other)); });
        total = sum_in_order(context, arrived);
      },
      [&] { copy(context, total, sum); });
}

void all_reduce(const Context& context, Communicator& communicator, const ConstTensorView& terms,
                const TensorView& sum) {
  const Operation operation("all_reduce", context);
  Tensor total;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        check_strided_view(operation, {"terms", terms}, terms.rank());
        check_strided_view(operation, {"sum", sum}, terms.rank());
        check_sums(operation, {"terms", terms});
        check_dtype(operation, {"sum", sum}, terms.dtype());
        check_shape(operation, {"sum", sum}, terms.shape());
        check_written(operation, {"sum", sum}, {"terms", terms});
        signature.add("terms", terms);
      },
      [&](CollectiveCall& call) { total = all_reduce_sums(context, call, terms); },
      [&] { copy(context, total, sum); });
}

}  // namespace ladon
