// Which backend a Context gets: the one file that knows all of them.

#include <memory>
#include <string>

#include "core/backend.h"
#include "core/fail.h"
#include "cpu/backend.h"
#include "cpu/dispatch.h"
#include "ladon/device.h"
#include "reference/backend.h"
#ifdef LADON_WITH_CUDA
#include "cuda/backend.h"
#include "cuda/device_list.h"
#include "cuda/pointer_owner.h"
#endif

namespace ladon {

std::unique_ptr<Backend> make_backend(const ContextOptions& options, Host& host) {
  constexpr std::string_view kOperation = "Context";
  switch (options.device) {
    case Device::kCpu: {
      if (options.device_index != 0) {
        fail(kOperation, "device_index",
             "got " + std::to_string(options.device_index) + ", expected 0: there is one CPU");
      }
      const Isa isa = cpu::choose_isa(options.isa);
      if (isa == Isa::kReference) return std::make_unique<reference::ReferenceBackend>(host);
      return std::make_unique<cpu::CpuBackend>(host, isa, options.chunk_invariant);
    }
    case Device::kCuda:
#ifdef LADON_WITH_CUDA
      cuda::check_device(kOperation, options.device_index);
      return std::make_unique<cuda::CudaBackend>(options, cpu::choose_isa(options.isa));
#else
      fail(ErrorCode::kUnsupported, kOperation, "device",
           "got cuda, expected cpu: this build has no CUDA backend");
#endif
  }
  fail(kOperation, "device",
       "got Device(" + std::to_string(static_cast<int>(options.device)) + "), expected a Device");
}

DeviceId owner_of([[maybe_unused]] const void* data, DeviceId claimed) noexcept {
#ifdef LADON_WITH_CUDA
  return cuda::owner_of(data, claimed);
#else
  return claimed;
#endif
}

DeviceList list_devices() {
#ifdef LADON_WITH_CUDA
  return cuda::list_devices();
#else
  return {{}, "this build has no CUDA backend"};
#endif
}

}  // namespace ladon
