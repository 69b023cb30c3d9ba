// Optimisers as Python holds them: with the layers whose parameters they change.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "devices.h"
#include "ladon/optim.h"
#include "objects.h"

namespace ladon::python {

/// One layer or a list of them, each held once and in one order, so that their locks are too.
class Layers {
 public:
  Layers(nb::handle argument, const Where& where) {
    if (nb::isinstance<nb::list>(argument) || nb::isinstance<nb::tuple>(argument)) {
      for (const nb::handle item : argument) add(item, where);
    } else {
      add(argument, where);
    }
  }

  std::vector<Parameter*> parameters() const {
    std::vector<Parameter*> all;
    for (const auto& [layer, object] : layers_) {
      for (Parameter* parameter : layer->layer->parameters()) all.push_back(parameter);
    }
    return all;
  }

  bool is_only(const Layer& layer) const {
    return layers_.size() == 1 && layers_.front().first == &layer;
  }

  bool any_shared() const {
    return std::any_of(layers_.begin(), layers_.end(),
                       [](const auto& entry) { return entry.first->communicator != nullptr; });
  }

  /// Where they are; a mix of devices is refused by the library.
  DeviceId device() const {
    return layers_.empty() ? DeviceId() : layers_.front().first->layer->device();
  }

  template <class Work>
  decltype(auto) changing_all(Work&& work) const {
    const nb::gil_scoped_release release;
    std::vector<std::unique_lock<std::shared_mutex>> locks;
    for (const auto& [layer, object] : layers_) {
      locks.push_back(lock_object<std::unique_lock<std::shared_mutex>>(layer->mutex));
    }
    return std::forward<Work>(work)();
  }

 private:
  void add(nb::handle item, const Where& where) {
    Layer* const layer = &object_in<Layer>(item, where, "a layer or a list of layers");
    const auto place = std::lower_bound(
        layers_.begin(), layers_.end(), layer,
        [](const auto& entry, const Layer* wanted) { return entry.first < wanted; });
    if (place != layers_.end() && place->first == layer) return;
    layers_.emplace(place, layer, nb::borrow(item));
  }

  std::vector<std::pair<Layer*, nb::object>> layers_;
};

template <class Optimiser>
struct Holder {
  template <class Options>
  Holder(Layers&& held, const Options& options)
      : layers(std::move(held)),
        optimiser(context_of(layers.device()), layers.parameters(), options) {}
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  Layers layers;
  Optimiser optimiser;
};

using SgdHolder = Holder<Sgd>;
using AdamWHolder = Holder<AdamW>;

}  // namespace ladon::python
