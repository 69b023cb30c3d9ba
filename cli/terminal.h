// What standard output can show: how wide it is, and whether in colour.
#pragma once

#include <optional>

namespace ladon::cli {

/// Columns of the terminal that standard output is, or what the variable COLUMNS says; empty where
/// lines may be of any length.
std::optional<int> terminal_width();

/// A terminal that understands colours, and NO_COLOR is not set.
bool shows_colours();

}  // namespace ladon::cli
