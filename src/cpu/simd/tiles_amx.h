// AMX: tiles of 16 rows of 64 bytes, and products of tiles of bf16 pairs summed in f32.
//
// In assembly, because GCC 12's intrinsics do not declare that they read and write memory.
#pragma once

#include <cstdint>

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kTileSide = 16;  // rows, pairs and sums of a tile

/// Sets up all eight tiles with 16 rows of 64 bytes.
inline void configure_tiles() {
  alignas(64) std::uint8_t configuration[64] = {};
  configuration[0] = 1;  // the palette
  for (int tile = 0; tile < 8; ++tile) {
    configuration[16 + 2 * tile] = 64;  // bytes of a row, a 16-bit field
    configuration[48 + tile] = 16;      // rows
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
}

/// Frees the tiles: while they are in use, every context switch saves them.
inline void release_tiles() { __asm__ volatile("tilerelease" : : : "memory"); }

/// Rows are `stride` bytes apart.
template <int kTile>
inline void read_tile(const void* from, std::int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0"
                   :
                   : "i"(kTile), "r"(from), "r"(stride)
                   : "memory");
}

template <int kTile>
inline void write_tile(void* to, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)"
                   :
                   : "i"(kTile), "r"(to), "r"(stride)
                   : "memory");
}

template <int kTile>
inline void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile) : "memory");
}

/// kSums[m][n] += sum over k of kA[m][k] . kB[k][n], where elements of kA and kB are bf16 pairs.
template <int kSums, int kA, int kB>
inline void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                   :
                   : "i"(kSums), "i"(kA), "i"(kB)
                   : "memory");
}

}  // namespace
}  // namespace ladon::cpu
