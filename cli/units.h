// Numbers as people write and read them: "128k" tokens, "80GiB", "1.9 GiB".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ladon::cli {

/// "131072", "128k" or "1m": k is 1024, m is 1024 * 1024, as contexts are named. Throws UsageError
/// where it is not such a number, or not in [least, most].
std::int64_t parse_count(std::string_view text, std::int64_t least, std::int64_t most);

/// "80GiB", "512 MiB", "24GB", "1.5TiB", "4096": a unit of KiB and its powers of 1024, of kB and
/// its powers of 1000, or B, which may be left out. At least 1. Throws UsageError.
std::int64_t parse_bytes(std::string_view text);

/// "512 B", "1.50 KiB", "34.31 GiB".
std::string format_bytes(std::int64_t bytes);
/// "1,048,576".
std::string format_count(std::int64_t count);
/// "93.8 %".
std::string format_percent(double fraction);
/// A positive number with about four digits and no exponent: "1234", "56.78", "0.5".
std::string format_rate(double value);
/// What something took: "12 us", "3.4 ms", "1.5 s".
std::string format_time(double seconds);
/// What something may take: "40 s", "3 min", "2 h".
std::string format_duration(double seconds);
/// "3.9e-03"; "0" for 0.
std::string format_error(double value);

}  // namespace ladon::cli
