// Sparse absorbed attention: every row has a list of keys, which its heads share. The arithmetic is
// absorbed_wave.cc's, over the list's entries as dense attention has it over positions.
#include <algorithm>

#include "ops/attention/cpu/absorbed_wave.h"

namespace fathom::cpu {

int64_t sparse_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                         int num_threads, int64_t rope_dim) {
  return AbsorbedWave::bytes(rows * num_heads, latent_dim, rope_dim, num_threads);
}

void sparse_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_latent,
                      ConstTensorView q_rope, const PagedBatch& batch,
                      std::span<const SparseRow> rows, ConstTensorView keys,
                      const LatentPages& pages, float softmax_scale, TensorView out, TensorView lse,
                      std::span<std::byte> workspace) {
  const Absorbed op = make_absorbed(isa, q_latent, q_rope, pages, softmax_scale, out, lse);
  AbsorbedWave wave(pool, op, q_latent.size(0) * op.heads(), workspace);
  for (size_t i = 0; i < rows.size(); ++i) {
    const SparseRow& row = rows[i];
    // The hidden positions count as entries: the list of all keys is split as dense attention
    // splits them.
    const int64_t seen = batch.first_key + count_keys(row, batch.first_key, keys.size(1));
    const KeySplit split = split_keys(seen);
    for (int64_t first = 0; first < op.heads(); first += kGroupRows) {
      wave.add({.keys = {batch.pages(row.sequence), keys.row<int32_t>(static_cast<int64_t>(i)),
                         batch.first_key},
                .query = row.row,
                .seen = seen,
                .first_row = first,
                .rows = std::min(kGroupRows, op.heads() - first)},
               split);
    }
  }
  wave.run();
}

}  // namespace fathom::cpu
