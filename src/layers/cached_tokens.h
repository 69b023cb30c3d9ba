// The new tokens of a call with a cache, as one list of rows whatever the sequences' lengths: so
// projections waste nothing on padding. Temporaries live in one workspace of the Context, so that
// decoding allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/workspace.h"
#include "ladon/attention_layer.h"

namespace ladon {

struct CachedTokens {
  std::int64_t batch = 0;
  std::int64_t seq = 0;    // of each sequence, where all have the same
  std::int64_t total = 0;  // of all sequences
  bool packed = false;     // x has the tokens of all sequences one after the other
  std::span<const std::int64_t> lengths;

  std::int64_t count(std::int64_t sequence) const {
    return lengths.empty() ? seq : lengths[static_cast<std::size_t>(sequence)];
  }
  /// x has rows that are padding.
  bool padded() const { return !packed && total != batch * seq; }
};

/// Checks x, out and the cache against the layer and each other.
CachedTokens check_cached_call(std::string_view operation, const AttentionLayer& layer,
                               const ConstTensorView& x, const KvCache& cache,
                               const CachedCall& call, const TensorView& out);

/// Rows of a call, and room for what becomes of them.
class CachedRows {
 public:
  /// `bytes`: what all take()s together will want, alignment aside.
  CachedRows(const Context& context, const CachedTokens& tokens, const KvCache& cache,
             std::size_t bytes);

  /// [rows, width], content unspecified.
  TensorView take(std::int64_t rows, std::int64_t width, DType dtype);

  /// x as [total, width]: as it lies where it can be, else copied.
  ConstTensorView input(const ConstTensorView& x);
  /// Where to write rows of out: out itself where its rows follow each other, else room for them,
  /// which finish() then copies. Padding becomes 0.
  TensorView output(const TensorView& out);
  void finish(const ConstTensorView& rows, const TensorView& out) const;

  /// Bytes for the rows of input() and output(), which a caller adds to its own.
  static std::size_t bytes_of_rows(const CachedTokens& tokens, std::int64_t width, DType dtype);

  std::span<const std::int64_t> positions() const { return positions_; }  // of each row
  std::span<const std::int64_t> offsets() const { return offsets_; }  // first row of each sequence
  std::span<const std::int64_t> counts() const { return counts_; }    // rows of each sequence

 private:
  std::byte* take_bytes(std::size_t size);
  std::span<std::int64_t> take_numbers(std::int64_t count);

  const CachedTokens& tokens_;
  Workspace workspace_;
  std::size_t used_ = 0;
  std::span<std::int64_t> positions_, offsets_, counts_;
};

}  // namespace ladon
