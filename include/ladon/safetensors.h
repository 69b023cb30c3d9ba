// Checkpoints in the safetensors format: read without copying, models in several files, written
// whole or not at all.
//
// A file is checked when it is opened: its header, every shape and every offset. What does not hold
// is refused with Error (kIo) that names the file, the tensor and what was expected. Opening reads
// the header alone; the tensors are read on request.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/dtype.h"
#include "ladon/export.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// What a file says about one of its tensors.
struct SafetensorsEntry {
  std::string name;
  /// As the format spells it: "BF16", "F8_E4M3".
  std::string_view dtype_name;
  /// None for the format's types that Ladon does not have: such a tensor is listed, not read.
  std::optional<DType> dtype;
  /// May have more dimensions than kMaxRank: such a tensor too is listed, not read.
  std::vector<std::int64_t> shape;
  /// Offset of its bytes from the start of the file.
  std::uint64_t file_offset = 0;
  std::uint64_t num_bytes = 0;
};

/// One file, mapped into memory. Const calls may run in many threads at once. A file that has been
/// moved from can only be assigned to or destroyed.
///
/// Views of the mapping read the file itself: replace it by renaming another over it, as
/// write_safetensors() does, and never shorten it in place, which ends a program that reads there
/// (SIGBUS). load() reads by the file's descriptor, and gives an Error even then.
class LADON_API SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;

  const std::filesystem::path& path() const noexcept;
  /// The tensors in the order of their bytes in the file.
  std::span<const SafetensorsEntry> entries() const noexcept;
  std::vector<std::string> names() const;
  /// The free texts under "__metadata__".
  const std::map<std::string, std::string>& metadata() const noexcept;

  bool has(std::string_view name) const noexcept;
  /// Throws Error (kIo) when the file has no such tensor, as all of the following do.
  const SafetensorsEntry& entry(std::string_view name) const;

  /// A view into the mapping, valid as long as this object. Throws Error (kUnsupported) when Ladon
  /// has no such dtype, or when the bytes are not aligned for it (files by old writers): load()
  /// reads those.
  ConstTensorView tensor(std::string_view name) const&;
  ConstTensorView tensor(std::string_view name) && = delete;

  /// A copy, in the file's dtype or converted as copy() does.
  Tensor load(std::string_view name) const;
  Tensor load(std::string_view name, DType dtype) const;

 private:
  class Impl;
  explicit SafetensorsFile(std::unique_ptr<const Impl> impl) noexcept;
  std::unique_ptr<const Impl> impl_;
};

/// The weights of a model folder: "model.safetensors", or else several files (shards) by
/// "model.safetensors.index.json". A shard is opened when one of its tensors is first requested,
/// and is then checked against the index. Const calls may run in many threads at once.
class LADON_API ShardedSafetensors {
 public:
  static ShardedSafetensors open(const std::filesystem::path& folder);
  ~ShardedSafetensors();
  ShardedSafetensors(ShardedSafetensors&& other) noexcept;
  ShardedSafetensors& operator=(ShardedSafetensors&& other) noexcept;

  const std::filesystem::path& folder() const noexcept;
  /// All tensors, sorted by name.
  std::vector<std::string> names() const;
  /// The files' names, sorted.
  std::vector<std::string> shards() const;
  bool has(std::string_view name) const noexcept;
  /// The name of the file that holds the tensor. Throws Error (kIo) when no file does, as all of
  /// the following do.
  const std::string& shard_of(std::string_view name) const;

  /// The file that holds the tensor, opened if it was not. Lives as long as this object.
  const SafetensorsFile& file_of(std::string_view name) const&;
  const SafetensorsEntry& entry(std::string_view name) const&;
  /// As SafetensorsFile::tensor() and load().
  ConstTensorView tensor(std::string_view name) const&;
  ConstTensorView tensor(std::string_view name) && = delete;
  Tensor load(std::string_view name) const;
  Tensor load(std::string_view name, DType dtype) const;

 private:
  class Impl;
  explicit ShardedSafetensors(std::unique_ptr<const Impl> impl) noexcept;
  std::unique_ptr<const Impl> impl_;
};

/// A tensor to write, and its name in the file.
struct SafetensorsItem {
  std::string name;
  ConstTensorView view;
};

/// Writes a file as the format's own library does: tensors by falling size of their elements, then
/// by name; the header padded so that all of them are aligned. Views may be strided. Written next
/// to `path` and renamed: when this throws, an older file of that name is as it was.
LADON_API void write_safetensors(const std::filesystem::path& path,
                                 std::span<const SafetensorsItem> tensors,
                                 const std::map<std::string, std::string>& metadata = {});

}  // namespace ladon
