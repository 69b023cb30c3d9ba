#include "cache/cache_file.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/context_impl.h"
#include "core/device_memory.h"
#include "core/fail.h"
#include "io/checksum.h"
#include "io/file.h"

namespace ladon {
namespace {

constexpr std::string_view kMagic = "LADONKVC";
constexpr std::uint32_t kVersion = 1;
constexpr std::string_view kLoad = "KvCache::load";
constexpr std::size_t kBufferBytes = std::size_t{1} << 20;

constexpr std::uint32_t kValuesInKeys = 256;

/// The code of a storage format; 0 for what no cache stores. Names all dtypes, so that the compiler
/// points here when there is a new one.
constexpr std::uint32_t code_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF64: return 1;
    case DType::kF32: return 2;
    case DType::kF16: return 3;
    case DType::kBF16: return 4;
    case DType::kI8: return 5;
    case DType::kF8E4M3: return 6;
    case DType::kBool:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64: break;
  }
  return 0;
}

std::uint32_t code_of(const KvCacheOptions& options) {
  return code_of(options.format.dtype) + (options.values_in_keys ? kValuesInKeys : 0);
}

/// What messages call a code.
std::string name_of_code(std::uint32_t code) {
  std::string name = "an unknown dtype";
  for (const DType dtype :
       {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3}) {
    if ((code & ~kValuesInKeys) == code_of(dtype)) name = std::string("dtype ") + name_of(dtype);
  }
  return name + ((code & kValuesInKeys) != 0 ? " with values in the keys" : "");
}

/// Gathers small pieces, and sums all of them up.
class Writer {
 public:
  Writer(std::string_view operation, const std::filesystem::path& path) : file_(operation, path) {
    buffer_.reserve(kBufferBytes);
  }

  void add(const void* data, std::size_t num_bytes) {
    sum_.add(data, num_bytes);
    const auto* bytes = static_cast<const std::byte*>(data);
    if (buffer_.size() + num_bytes > kBufferBytes) flush();
    if (num_bytes > kBufferBytes) return file_.write(bytes, num_bytes);
    buffer_.insert(buffer_.end(), bytes, bytes + num_bytes);
  }
  template <class Number>
  void add(Number number) {
    add(&number, sizeof number);
  }
  void finish() {
    add(sum_.value());
    flush();
    file_.commit();
  }

 private:
  void flush() {
    file_.write(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

  io::AtomicFile file_;
  io::Crc64 sum_;
  std::vector<std::byte> buffer_;
};

/// The reverse: pieces in the order in which they were written.
class Reader {
 public:
  Reader(std::string_view operation, const std::filesystem::path& path)
      : file_(operation, path),
        buffer_(static_cast<std::size_t>(std::min<std::uint64_t>(file_.size(), kBufferBytes))) {}

  const io::InputFile& file() const noexcept { return file_; }
  std::uint64_t left() const noexcept { return file_.size() - position_; }

  void take(void* to, std::size_t num_bytes) {
    copy_out(static_cast<std::byte*>(to), num_bytes);
    sum_.add(to, num_bytes);
  }
  template <class Number>
  Number take() {
    Number number{};
    take(&number, sizeof number);
    return number;
  }
  std::uint64_t sum() const noexcept { return sum_.value(); }

  /// Throws unless the file's last word is the checksum of all before it, wherever the reader
  /// stands. Reads it all: what is damaged is refused before anything is given up for it.
  void check_sum() {
    const std::uint64_t end = file_.size() - sizeof(std::uint64_t);
    io::Crc64 sum;
    begin_ = end_ = 0;  // the buffer is used for this
    for (std::uint64_t at = 0; at < end;) {
      const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(end - at, kBufferBytes));
      file_.read_at(at, buffer_.data(), count);
      sum.add(buffer_.data(), count);
      at += count;
    }
    std::uint64_t written = 0;
    file_.read_at(end, &written, sizeof written);
    if (written != sum.value()) refuse_sum();
  }
  [[noreturn]] void refuse_sum() const {
    file_.refuse("got bytes that do not fit their checksum, expected an undamaged file");
  }

 private:
  void copy_out(std::byte* to, std::size_t num_bytes) {
    while (num_bytes > 0) {
      if (begin_ == end_) {
        begin_ = 0;
        end_ = static_cast<std::size_t>(std::min<std::uint64_t>(left(), kBufferBytes));
        if (end_ == 0) file_.refuse("got the end of the file, expected more of a cache");
        file_.read_at(position_, buffer_.data(), end_);
      }
      const std::size_t count = std::min(num_bytes, end_ - begin_);
      std::copy_n(buffer_.data() + begin_, count, to);
      begin_ += count;
      position_ += count;
      to += count;
      num_bytes -= count;
    }
  }

  io::InputFile file_;
  io::Crc64 sum_;
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;  // of what the buffer still holds
  std::size_t end_ = 0;
  std::uint64_t position_ = 0;  // in the file
};

/// Calls visit(data, bytes) for the memory of all tokens of a sequence, in the file's order and in
/// pieces of at most kBufferBytes.
template <class Visit>
void visit_tokens(KvStorage& storage, const KvCache::Impl& cache, std::int64_t sequence,
                  std::int64_t begin, std::int64_t end, const Visit& visit) {
  for (Tensor* part : {&storage.k, &storage.v, &storage.k_scales, &storage.v_scales}) {
    if (part->rank() == 0) continue;
    const auto row =
        static_cast<std::size_t>(part->num_elements() / std::max<std::int64_t>(1, part->size(0))) *
        size_of(part->dtype());
    cache.for_each_run(
        sequence, begin, end, [&](std::int64_t, std::int64_t run, std::int64_t slot) {
          auto* data = static_cast<std::byte*>(part->data()) + static_cast<std::size_t>(slot) * row;
          for (std::size_t left = static_cast<std::size_t>(run) * row; left > 0;) {
            const std::size_t piece = std::min(left, kBufferBytes);
            visit(data, piece);
            data += piece;
            left -= piece;
          }
        });
  }
}

struct Header {
  std::vector<std::int64_t> first;
  std::vector<std::int64_t> lengths;
};

/// Everything before the tokens, and that the file is as long as it says. What is allocated until
/// here, and after, the file's own size bounds.
Header read_header(Reader& reader, const KvCacheOptions& options) {
  const io::InputFile& file = reader.file();
  constexpr std::uint64_t kFixed = 8 + 4 + 4 + 4 * 8 + 8;  // with the sum at the end
  if (file.size() < kFixed) {
    file.refuse("got " + std::to_string(file.size()) + " bytes, expected a cache of " +
                std::to_string(kFixed) + " or more");
  }
  std::array<char, 8> magic{};
  reader.take(magic.data(), magic.size());
  if (std::string_view(magic.data(), magic.size()) != kMagic) {
    file.refuse("got another beginning, expected a cache's, \"" + std::string(kMagic) + "\"");
  }
  const auto version = reader.take<std::uint32_t>();
  if (version != kVersion) {
    file.refuse("got version " + std::to_string(version) + ", expected " + std::to_string(kVersion),
                ErrorCode::kUnsupported);
  }
  const auto code = reader.take<std::uint32_t>();
  if (code != code_of(options)) {
    file.refuse("got " + name_of_code(code) + ", expected the cache's " +
                name_of_code(code_of(options)));
  }
  for (const auto& [name, expected] :
       {std::pair{"batch", options.batch}, std::pair{"num_kv_heads", options.num_kv_heads},
        std::pair{"head_dim", options.head_dim}, std::pair{"value_dim", options.value_dim}}) {
    const auto value = reader.take<std::int64_t>();
    if (value != expected) {
      file.refuse(std::string("got ") + name + " = " + std::to_string(value) +
                  ", expected the cache's " + std::to_string(expected));
    }
  }
  const auto batch = static_cast<std::uint64_t>(options.batch);
  if ((file.size() - kFixed) / 16 < batch) {
    file.refuse("got " + std::to_string(file.size()) + " bytes, expected the lengths of " +
                std::to_string(batch) + " sequences");
  }
  Header header;
  const std::uint64_t available = file.size() - kFixed - 16 * batch;
  const auto token_bytes = static_cast<std::uint64_t>(bytes_per_token(options));
  std::uint64_t tokens = 0;
  for (std::uint64_t b = 0; b < batch; ++b) {
    const auto first = reader.take<std::int64_t>();
    const auto length = reader.take<std::int64_t>();
    if (first < 0 || length < first || length > kMostTokens) {
      file.refuse("sequence " + std::to_string(b) + ": got tokens " + std::to_string(first) +
                  " to " + std::to_string(length) + ", expected a range");
    }
    tokens += static_cast<std::uint64_t>(length - first);
    if (tokens > available / token_bytes) break;
    header.first.push_back(first);
    header.lengths.push_back(length);
  }
  if (tokens > available / token_bytes || tokens * token_bytes != available) {
    file.refuse("got " + std::to_string(available) + " bytes of tokens, expected as many as its " +
                "lengths say, " + std::to_string(token_bytes) + " for each");
  }
  return header;
}

}  // namespace

void save_cache(const Context& context, const KvCache::Impl& cache,
                const std::filesystem::path& path) {
  const KvCacheOptions& options = cache.options();
  Writer writer("KvCache::save", path);
  writer.add(kMagic.data(), kMagic.size());
  writer.add(kVersion);
  writer.add(code_of(options));
  for (const std::int64_t size :
       {options.batch, options.num_kv_heads, options.head_dim, options.value_dim}) {
    writer.add(size);
  }
  for (std::int64_t b = 0; b < options.batch; ++b) {
    writer.add(cache.first_held(b));
    writer.add(cache.length(b));
  }
  // Not changed: the visitor only reads.
  auto& storage = const_cast<KvStorage&>(cache.storage());
  DeviceMemory& memory = *backend_of(context).memory();
  std::vector<std::byte> piece(kBufferBytes);
  for (std::int64_t b = 0; b < options.batch; ++b) {
    visit_tokens(storage, cache, b, cache.first_held(b), cache.length(b),
                 [&](const void* data, std::size_t num_bytes) {
                   memory.download(piece.data(), data, num_bytes);
                   writer.add(piece.data(), num_bytes);
                 });
  }
  writer.finish();
}

std::unique_ptr<KvCache::Impl> load_cache(const Context& context, const KvCache::Impl& like,
                                          const std::filesystem::path& path) {
  Reader reader(kLoad, path);
  const Header header = read_header(reader, like.options());
  // Before slots are allocated: a pool evicts kept prefixes for them, which would not come back.
  reader.check_sum();
  std::unique_ptr<KvCache::Impl> cache = like.empty_at(context, header.first, header.lengths);
  if (cache == nullptr) {
    reader.file().refuse("got sequences whose first tokens were dropped, expected all that a " +
                         std::string(like.kind()) + " cache with its window can see");
  }
  std::vector<std::int64_t> counts = header.lengths;
  for (std::size_t b = 0; b < counts.size(); ++b) counts[b] -= header.first[b];
  DeviceMemory& memory = *backend_of(context).memory();
  std::vector<std::byte> piece(kBufferBytes);
  cache->begin_raw(context, kLoad, counts);
  try {
    for (std::int64_t b = 0; b < like.options().batch; ++b) {
      const auto i = static_cast<std::size_t>(b);
      visit_tokens(cache->storage(), *cache, b, header.first[i], header.lengths[i],
                   [&](void* data, std::size_t num_bytes) {
                     reader.take(piece.data(), num_bytes);
                     memory.upload(data, piece.data(), num_bytes);
                   });
    }
    const std::uint64_t sum = reader.sum();
    if (reader.take<std::uint64_t>() != sum) reader.refuse_sum();  // has changed meanwhile
  } catch (...) {
    cache->abandon();
    throw;
  }
  cache->commit(context);
  return cache;
}

}  // namespace ladon
