#include <algorithm>

#include "ops/moe/bf16_cuda/moe_few_rows_maps_cuda.cuh"

namespace fathom::cuda::few_tokens {
namespace {

CUtensorMap map_of(const void* matrix, std::span<const Axis> axes, bool e4m3) {
  return e4m3 ? e4m3_map(matrix, axes) : bf16_map(matrix, axes);
}

// Columns in 128 bytes.
int columns_of(bool e4m3) { return e4m3 ? 128 : 64; }

// Boxes of 1, 2, 4 and 8 times 8 rows of gate and the same of up.
void make_pair_maps(CUtensorMap* maps, const void* matrix, int64_t experts, int64_t inter,
                    int64_t hidden, bool e4m3) {
  const int columns = columns_of(e4m3);
  for (int size = 0; size < kPairMaps; ++size) {
    const Axis axes[] = {{columns, 1, columns},
                         {8, hidden, 8},
                         {hidden / columns, columns, kStageHalves},
                         {2, inter * hidden, 2},
                         // The last up's rows are the first one's, `inter` further: no box begins
                         // there.
                         {(2 * experts - 1) * inter / 8, 8 * hidden, 1 << size}};
    maps[size] = map_of(matrix, axes, e4m3);
  }
}

void make_row_maps(CUtensorMap* maps, const void* matrix, int64_t rows, int64_t all_columns,
                   int groups, bool e4m3) {
  const int columns = columns_of(e4m3);
  for (int i = 0; i < 2; ++i) {
    const Axis axes[] = {{columns, 1, columns},
                         {rows, all_columns, std::max(groups - i, 1) * kGroupRows},
                         {all_columns / columns, columns, kStageHalves}};
    maps[i] = map_of(matrix, axes, e4m3);
  }
}

}  // namespace

Maps make_maps(const MoeShape& shape, const Matrices& matrices, int hidden_groups) {
  Maps maps;
  const auto make = [&](Phase phase, int64_t experts, int64_t inter) {
    make_pair_maps(maps.gate_up[phase], matrices.gate_up[phase], experts, inter, shape.hidden,
                   matrices.e4m3);
    make_row_maps(maps.down[phase], matrices.down[phase], experts * shape.hidden, inter,
                  hidden_groups, matrices.e4m3);
  };
  make(kRouted, shape.num_experts, shape.inter);
  if (shape.shared_inter > 0) make(kShared, 1, shape.shared_inter);
  return maps;
}

}  // namespace fathom::cuda::few_tokens
