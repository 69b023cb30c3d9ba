#include "cpu/simd/vec_avx512_bf16.h"

// The kernels need the vectors above.
#include "cpu/kernels/tile_projection.inl"

namespace ladon::cpu {
namespace {

// Decoding converts bf16 to f32: whether pairs are faster on these processors' vectors is not
// measured yet.
constexpr KernelTable make_table() {
  KernelTable table = make_kernel_table_of_pairs<F32, F64, TileEngine>();
  table.bf16.project = project_by_tiles;
  table.bf16.project_scratch = project_by_tiles_scratch;
  table.bf16.project_columns = kTileColumns;
  return table;
}

}  // namespace

namespace kernels {

extern const KernelTable kAmx;
constexpr KernelTable kAmx = make_table();

}  // namespace kernels
}  // namespace ladon::cpu
