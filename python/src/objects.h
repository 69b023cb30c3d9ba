// Caches and layers as Python holds them. Calls run without the GIL, so two Python threads can be
// in one object at the same time: each has a lock, shared by calls that only read.
//
// Locks are taken after the GIL is given up, layers before caches, and given back before it is
// taken again: no thread waits for a lock while it holds the GIL, so there is no deadlock. A long
// call does take it for a moment, locks in hand, for signal handlers (interrupt.h): those may use
// any object but the call's own.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include "interrupt.h"
#include "keywords.h"
#include "ladon/attention_layer.h"
#include "ladon/communicator.h"
#include "ladon/kv_cache.h"

namespace ladon::python {

struct Cache {
  explicit Cache(KvCache&& made, std::int64_t own_capacity = 0, std::int64_t own_spare = 0)
      : cache(std::move(made)), capacity(own_capacity), spare(own_spare) {}

  KvCache cache;
  // What it was made with, for copies and pickles.
  std::int64_t capacity;
  std::int64_t spare;
  mutable std::shared_mutex mutex;
};

struct Layer {
  explicit Layer(std::unique_ptr<AttentionLayer>&& made, std::shared_ptr<Communicator> ranks = {})
      : communicator(std::move(ranks)), layer(std::move(made)) {}

  std::shared_ptr<Communicator> communicator;  // of a layer that ranks share
  std::unique_ptr<AttentionLayer> layer;
  mutable std::shared_mutex mutex;
};

struct MultiHeadLayer : Layer {
  using Layer::Layer;
};

struct LatentLayer : Layer {
  using Layer::Layer;
};

/// Throws instead of waiting for the call in whose middle this signal handler runs.
template <class Lock, class Mutex>
Lock lock_object(Mutex& mutex) {
  if (!in_signal_handler()) return Lock(mutex);
  Lock lock(mutex, std::try_to_lock);
  if (!lock) {
    throw std::runtime_error(
        "a signal handler used a ladon object in the middle of a call that uses it too");
  }
  return lock;
}

/// Runs work that only reads the object.
template <class Object, class Work>
decltype(auto) reading(const Object& object, Work&& work) {
  const nb::gil_scoped_release release;
  const auto lock = lock_object<std::shared_lock<std::shared_mutex>>(object.mutex);
  return std::forward<Work>(work)();
}

/// Runs work that changes the object.
template <class Object, class Work>
decltype(auto) changing(Object& object, Work&& work) {
  const nb::gil_scoped_release release;
  const auto lock = lock_object<std::unique_lock<std::shared_mutex>>(object.mutex);
  return std::forward<Work>(work)();
}

/// A new Python object of the layer's own class.
nb::object wrap_layer(std::unique_ptr<AttentionLayer>&& layer);
/// With every default filled in.
nb::dict layer_options(const Layer& self);
/// A separate layer with the same weights, gradients and mode.
nb::object copy_layer(const Layer& self);

/// The object in the argument. Throws TypeError.
template <class Object>
Object& object_in(nb::handle argument, const Where& where, std::string_view expected) {
  Object* object = nullptr;
  if (!nb::try_cast(argument, object, /*convert=*/false) || object == nullptr) {
    throw_type_error(where, argument, expected);
  }
  return *object;
}

}  // namespace ladon::python
