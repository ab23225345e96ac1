// Dense absorbed attention: which rows share a group, and how a row's keys are split. The
// arithmetic is absorbed_wave.cc's.
#include <algorithm>

#include "ops/attention/cpu/absorbed_wave.h"

namespace fathom::cpu {
namespace {

// The split of a row's keys: by what the row itself sees, so that it has the same bits alone and
// among the rows of a chunk or a draft window.
KeySplit split_of(const PagedBatch& batch, int32_t sequence, int64_t query) {
  return split_keys(batch.context_lens[sequence] + query + 1);
}

// Rows a group: as many as fit, which read a key once, unless threads would have nothing to do.
// The kernels take rows by fours. A row's bits do not depend on its group.
int64_t rows_a_group(const PagedBatch& batch, int64_t heads, std::span<const int32_t> sequences,
                     int threads) {
  constexpr int64_t kFewestRows = 4;
  int64_t items = 0, rows = 0;  // items: of whole groups
  for (const int32_t sequence : sequences) {
    const int64_t of_sequence = batch.num_queries(sequence) * heads;
    items += ceil_div(of_sequence, kGroupRows) * split_of(batch, sequence, 0).splits;
    rows = std::max(rows, std::min(of_sequence, kGroupRows));
  }
  if (items == 0 || items >= threads) return kGroupRows;
  return std::max(kFewestRows, round_up(ceil_div(rows * items, threads), kFewestRows));
}

// How many rows from `first` on are split in this way, at most `most`.
int64_t rows_alike(const PagedBatch& batch, int64_t heads, int32_t sequence, int64_t first,
                   KeySplit split, int64_t most) {
  const int64_t sequence_rows = batch.num_queries(sequence) * heads;
  const int64_t last = std::min(first + most, sequence_rows);
  int64_t end = first;
  while (end < last && split_of(batch, sequence, end / heads) == split) {
    end = std::min(last, (end / heads + 1) * heads);
  }
  return end - first;
}

}  // namespace

int64_t absorbed_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                           int num_threads, int64_t rope_dim) {
  return AbsorbedWave::bytes(rows * num_heads, latent_dim, rope_dim, num_threads);
}

void absorbed_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_latent,
                        ConstTensorView q_rope, const PagedBatch& batch,
                        std::span<const int32_t> sequences, const LatentPages& pages,
                        float softmax_scale, TensorView out, std::span<std::byte> workspace) {
  const Absorbed op = make_absorbed(isa, q_latent, q_rope, pages, softmax_scale, out, {});
  AbsorbedWave wave(pool, op, q_latent.size(0) * op.heads(), workspace);
  const int64_t most = rows_a_group(batch, op.heads(), sequences, pool.num_threads());
  for (const int32_t sequence : sequences) {
    const int64_t sequence_rows = batch.num_queries(sequence) * op.heads();
    for (int64_t first = 0; first < sequence_rows;) {
      const KeySplit split = split_of(batch, sequence, first / op.heads());
      const int64_t count = rows_alike(batch, op.heads(), sequence, first, split, most);
      wave.add({.keys = {batch.pages(sequence), nullptr, batch.first_key},
                .query = batch.query_start[sequence],
                .seen = batch.context_lens[sequence] + int64_t{1},
                .first_row = first,
                .rows = count},
               split);
      first += count;
    }
  }
  wave.run();
}

}  // namespace fathom::cpu
