#include "cache/gather.h"

#include <algorithm>
#include <cstdint>

#include "cache/kv_storage.h"
#include "core/arena.h"
#include "core/context_impl.h"
#include "core/integer.h"

namespace ladon {
namespace {

struct RunList {
  RunList(Arena& arena, std::int64_t count) : runs(arena.take<KvRun>(count)) {}
  KvRun* runs;
};

/// function(token, count, slot) for all tokens, as many at a time as have consecutive slots.
template <class Function>
void for_each_run(const KvCacheView& cache, const KvSequenceView& sequence,
                  const Function& function) {
  for (std::int64_t token = 0; token < sequence.length;) {
    std::int64_t count = sequence.length - token;
    std::int64_t slot = sequence.first_slot + token;
    if (cache.page_size != 0) {
      const std::int64_t place = token % cache.page_size;
      slot = sequence.pages[token / cache.page_size] * cache.page_size + place;
      count = std::min(count, cache.page_size - place);
    } else if (cache.ring_slots != 0) {
      const std::int64_t place = (sequence.ring_start + token) % cache.ring_slots;
      slot = sequence.first_slot + place;
      count = std::min(count, cache.ring_slots - place);
    }
    function(token, count, slot);
    token += count;
  }
}

Operand rows_operand(const TensorView& rows, std::int64_t dim) {
  if (rows.absent()) return {};
  return {rows.data(), rows.dtype(), rows.stride(0), dim};
}

}  // namespace

void gather_sequence(const Context& context, const KvCacheView& cache, std::size_t sequence,
                     const TensorView& keys, const TensorView& values) {
  const KvSequenceView& held = cache.sequences[sequence];
  const std::int64_t most_runs =
      cache.page_size != 0 ? ceil_div(held.length, cache.page_size) : 2;  // a ring wraps once
  const InWorkspace<RunList> list(context.impl().host_scratch(), most_runs);
  KvRowsParams params = kv_rows_params(cache);
  params.runs = list->runs;
  params.k = rows_operand(keys, cache.head_dim);
  params.v = rows_operand(values, cache.value_dim);
  for_each_run(cache, held, [&](std::int64_t token, std::int64_t count, std::int64_t slot) {
    list->runs[params.num_runs++] = {.slot = slot,
                                     .count = count,
                                     .k = token * params.k.token_stride,
                                     .v = token * params.v.token_stride};
  });
  backend_of(context).gather_kv(params);
}

}  // namespace ladon
