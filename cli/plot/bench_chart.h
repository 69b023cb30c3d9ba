// The picture of `ladon bench`: a bar for each case.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "plot/canvas.h"
#include "results.h"

namespace ladon::cli {

/// Each case's share of its ceiling as a bar, with a mark at its target, and behind it how many
/// times as fast as each peer it was, where that was measured.
std::unique_ptr<Canvas> draw_bench_chart(const std::filesystem::path& path,
                                         std::span<const bench::Row> rows,
                                         const std::string& machine);

}  // namespace ladon::cli
