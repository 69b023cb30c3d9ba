// SpreadKvCache as Python holds it.
#pragma once

#include <memory>
#include <shared_mutex>
#include <utility>

#include "ladon/spread_cache.h"

namespace ladon::python {

struct SpreadCache {
  SpreadCache(std::shared_ptr<Communicator> end, KvCache&& local)
      : communicator(std::move(end)), cache(*communicator, std::move(local)) {}

  std::shared_ptr<Communicator> communicator;
  SpreadKvCache cache;
  mutable std::shared_mutex mutex;
};

}  // namespace ladon::python
