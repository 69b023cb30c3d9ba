// Devices and streams: where arrays are, and in which order work on them runs.
//
// On a GPU calls return when they are enqueued on a stream. Which one is always known here: the one
// that a ladon.Context was given, else PyTorch's current stream where that has one, else CUDA's
// default stream. Arrays come in by DLPack's `stream`, and go out the same way.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>

#include "ladon/context.h"
#include "ladon/device.h"

namespace ladon::python {

namespace nb = nanobind;
struct Where;

/// Python's object of a stream, which is destroyed after what uses the stream.
struct StreamOwner {
  nb::object object;
};

/// A Context as Python holds it.
class BoundContext : private StreamOwner, public Context {
 public:
  /// On a GPU the stream must be given, and its object where it has one.
  explicit BoundContext(const ContextOptions& options, nb::object stream = {});
  ~BoundContext();
  BoundContext(const BoundContext&) = delete;
  BoundContext& operator=(const BoundContext&) = delete;

  /// A cudaStream_t; 0 is CUDA's default stream.
  std::uintptr_t stream() const noexcept { return stream_; }
  /// As DLPack counts: 1 is CUDA's default stream.
  std::uintptr_t dlpack_stream() const noexcept { return stream_ == 0 ? 1 : stream_; }

 private:
  std::uintptr_t stream_ = 0;
};

/// The CPU's, that all calls without a Context share. Made by the first call that needs it; it is
/// never destroyed, since threads of a program that ends may still be in a call.
const BoundContext& default_context();
/// The same for any device: on a GPU, on the stream that is current.
const BoundContext& context_of(DeviceId device);

/// Waits for everything that any Context of Python's has enqueued on the device.
void settle(DeviceId device);

/// "cpu", "cuda", "cuda:1", or a torch.device.
DeviceId to_device(nb::handle object, const Where& where);
/// An integer, a torch.cuda.Stream or a cupy.cuda.Stream.
std::uintptr_t to_stream(nb::handle object, const Where& where);

/// The torch module where it has been imported; else not valid.
nb::object imported_torch();
/// Whether PyTorch uses a GPU already.
bool torch_uses_gpu();
/// Makes PyTorch's current stream wait for what the Context has enqueued so far; on the CPU,
/// nothing.
void hand_over_to_torch(const BoundContext& context);

}  // namespace ladon::python
