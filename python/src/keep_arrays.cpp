#include "keep_arrays.h"

namespace ladon::python {
namespace {

thread_local KeepArrays* keeper = nullptr;

}  // namespace

KeepArrays::KeepArrays() noexcept : outer_(keeper) { keeper = this; }

KeepArrays::~KeepArrays() { keeper = outer_; }

void KeepArrays::add(nb::handle object) {
  if (keeper != nullptr) keeper->objects_.push_back(nb::borrow(object));
}

}  // namespace ladon::python
