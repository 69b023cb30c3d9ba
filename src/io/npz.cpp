// An .npz file is a zip archive of .npy files. np.savez stores them without compression, so that
// each is a region of the archive; that is all that is read here. The list at the archive's end
// (the central directory) is the truth about its members; the headers before each are only skipped.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "io/npy_region.h"
#include "ladon/npy.h"

namespace ladon {
namespace {

using io::in_quotes;
using io::InputFile;

constexpr std::uint64_t kEndSize = 22;
constexpr std::uint64_t kMaxComment = 65535;
constexpr std::size_t kMemberSize = 46;
constexpr std::size_t kLocalSize = 30;
constexpr std::uint64_t kMaxListBytes = 100'000'000;

/// A little-endian number; the caller has checked that it is within the bytes.
template <class Number>
Number number_at(const std::string& bytes, std::size_t offset) {
  Number value{};
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::string read_bytes(const InputFile& file, std::uint64_t offset, std::uint64_t size) {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  file.read_at(offset, bytes.data(), bytes.size());
  return bytes;
}

struct Archive {
  std::uint64_t num_members = 0;
  std::uint64_t list_size = 0;
  std::uint64_t list_begin = 0;
};

/// The record at the very end, before which a comment may stand.
Archive read_end(const InputFile& file) {
  const std::uint64_t size = std::min(file.size(), kEndSize + kMaxComment);
  const std::uint64_t begin = file.size() - size;
  const std::string tail = read_bytes(file, begin, size);
  const std::size_t found = tail.rfind("PK\x05\x06");
  if (found == std::string::npos || tail.size() - found < kEndSize) {
    file.refuse("got no end of a zip archive, expected an .npz file");
  }
  const Archive archive{.num_members = number_at<std::uint16_t>(tail, found + 10),
                        .list_size = number_at<std::uint32_t>(tail, found + 12),
                        .list_begin = number_at<std::uint32_t>(tail, found + 16)};
  if (archive.list_size == 0xffffffffU || archive.list_begin == 0xffffffffU) {
    file.refuse("got an archive of more than 4 GiB, expected a smaller one",
                ErrorCode::kUnsupported);
  }
  if (archive.list_begin + archive.list_size > begin + found || archive.list_size > kMaxListBytes) {
    file.refuse("got a list of members at bytes " + std::to_string(archive.list_begin) + " to " +
                std::to_string(archive.list_begin + archive.list_size) +
                ", expected it within the archive");
  }
  return archive;
}

struct Member {
  std::string name;
  std::uint64_t local_header = 0;
  std::uint64_t size = 0;
  std::uint32_t sum = 0;
};

/// The member at `offset` of the list; `offset` moves behind it.
Member read_member(const InputFile& file, const std::string& list, std::size_t& offset) {
  if (list.size() - offset < kMemberSize || list.compare(offset, 4, "PK\x01\x02") != 0) {
    file.refuse("got a malformed list of members, expected that of a zip archive");
  }
  const std::size_t name_size = number_at<std::uint16_t>(list, offset + 28);
  const std::size_t more = std::size_t{number_at<std::uint16_t>(list, offset + 30)} +
                           number_at<std::uint16_t>(list, offset + 32);
  if (list.size() - offset - kMemberSize < name_size + more) {
    file.refuse("got a malformed list of members, expected that of a zip archive");
  }
  Member member{.name = list.substr(offset + kMemberSize, name_size),
                .local_header = number_at<std::uint32_t>(list, offset + 42),
                .size = number_at<std::uint32_t>(list, offset + 24),
                .sum = number_at<std::uint32_t>(list, offset + 16)};
  const bool encrypted = (number_at<std::uint16_t>(list, offset + 8) & 1U) != 0;
  const auto method = number_at<std::uint16_t>(list, offset + 10);
  if (method != 0 || encrypted) {
    file.refuse("member " + in_quotes(member.name) + ": got " +
                    (encrypted ? "encrypted" : "compressed") +
                    " bytes, expected them as they are (np.savez)",
                ErrorCode::kUnsupported);
  }
  const std::uint64_t stored = number_at<std::uint32_t>(list, offset + 20);
  if (member.size == 0xffffffffU || stored == 0xffffffffU || member.local_header == 0xffffffffU) {
    file.refuse(
        "member " + in_quotes(member.name) + ": got more than 4 GiB, expected a smaller member",
        ErrorCode::kUnsupported);
  }
  if (stored != member.size) {
    file.refuse("member " + in_quotes(member.name) + ": got two sizes, " + std::to_string(stored) +
                " and " + std::to_string(member.size) + ", expected one");
  }
  offset += kMemberSize + name_size + more;
  return member;
}

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1U) * 0xedb88320U);
    table[i] = value;
  }
  return table;
}();

/// The archive keeps a checksum of each member: CRC-32, as in every zip file.
void check_sum(const io::NpyRegion& region, std::uint32_t expected) {
  std::uint32_t sum = 0xffffffffU;
  std::array<unsigned char, 16384> buffer{};
  for (std::uint64_t done = 0; done < region.size;) {
    const std::uint64_t count = std::min<std::uint64_t>(region.size - done, buffer.size());
    region.file.read_at(region.begin + done, buffer.data(), static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < count; ++i) {
      sum = kCrcTable[(sum ^ buffer[i]) & 0xffU] ^ (sum >> 8);
    }
    done += count;
  }
  if ((sum ^ 0xffffffffU) != expected) {
    region.refuse("got bytes that do not fit their checksum, expected an undamaged archive");
  }
}

/// Where the member's bytes are: behind a local header, which ends before the list does.
io::NpyRegion region_of(const InputFile& file, const Member& member, std::uint64_t limit) {
  const std::string label = "member " + in_quotes(member.name) + ": ";
  const auto outside = [&] {
    file.refuse(label + "got bytes outside of the archive, expected them before its list");
  };
  if (member.local_header > limit || limit - member.local_header < kLocalSize) outside();
  const std::string local = read_bytes(file, member.local_header, kLocalSize);
  if (local.compare(0, 4, "PK\x03\x04") != 0) {
    file.refuse(label + "got no header before its bytes, expected one");
  }
  const std::uint64_t begin = member.local_header + kLocalSize +
                              number_at<std::uint16_t>(local, 26) +
                              number_at<std::uint16_t>(local, 28);
  if (begin > limit || limit - begin < member.size) outside();
  return {.file = file, .begin = begin, .size = member.size, .label = label};
}

/// "x.npy" is the array x.
std::string array_name(const std::string& member_name) {
  constexpr std::string_view kEnding = ".npy";
  if (!std::string_view(member_name).ends_with(kEnding)) return member_name;
  return member_name.substr(0, member_name.size() - kEnding.size());
}

/// Members that share bytes would let a small file unfold into a large one.
void check_apart(const InputFile& file, const std::vector<io::NpyRegion>& regions) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  ranges.reserve(regions.size());
  for (const io::NpyRegion& region : regions) {
    ranges.emplace_back(region.begin, region.begin + region.size);
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) {
      file.refuse("got members that share bytes, expected each to have its own");
    }
  }
}

}  // namespace

std::map<std::string, Tensor> read_npz(const std::filesystem::path& path) {
  const InputFile file("read_npz", path);
  const Archive archive = read_end(file);
  const std::string list = read_bytes(file, archive.list_begin, archive.list_size);
  std::vector<Member> members;
  std::vector<io::NpyRegion> regions;
  for (std::size_t offset = 0; offset < list.size();) {
    members.push_back(read_member(file, list, offset));
    regions.push_back(region_of(file, members.back(), archive.list_begin));
  }
  if (regions.size() != archive.num_members) {
    file.refuse("got a list of " + std::to_string(regions.size()) + " members, expected " +
                std::to_string(archive.num_members) + " by the archive's end");
  }
  check_apart(file, regions);
  std::map<std::string, Tensor> arrays;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    check_sum(regions[i], members[i].sum);
    const std::string name = array_name(members[i].name);
    if (!arrays.emplace(name, io::read_npy_region(regions[i])).second) {
      file.refuse("array " + in_quotes(name) + ": got it twice, expected it once");
    }
  }
  return arrays;
}

}  // namespace ladon
