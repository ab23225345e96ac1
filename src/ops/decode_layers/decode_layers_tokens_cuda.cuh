// Tokens of a launch of several: which of them are of one sequence, and the order in which the
// sequences' keys come through the ring (SharedOfRows in decode_layers_memory_cuda.cuh).
#pragma once

#include "ops/decode_layers/decode_layers_memory_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// Writes what is known of token r from the arguments. part: the CTA's share of the keys.
template <typename L>
__device__ inline void place_token(Shared<L>& shared, const DecodeLayersArguments& a, int r,
                                   int part) {
  auto& tokens = shared.of_rows;
  const auto is_of_same = [&](int other) { return a.table_starts[other] == a.table_starts[r]; };
  int first = r, end = r + 1;
  if (r < a.rows) {
    while (first > 0 && is_of_same(first - 1)) --first;
    while (end < a.rows && is_of_same(end)) ++end;
  }
  const int cached = r < a.rows ? a.positions[first] : 0;
  tokens.positions[r] = r < a.rows ? a.positions[r] : 0;
  tokens.cached[r] = cached;
  tokens.first[r] = first;
  tokens.count[r] = end - first;
  tokens.runs[r] = r == first && r < a.rows ? key_runs_of(cached + end - first, part) : 0;
}

template <typename L>
__device__ inline int num_runs(const Shared<L>& shared) {
  int all = 0;
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) all += shared.of_rows.runs[r];
  return all;
}

// Place among all runs of a sequence's run; `first`: its first token. Sequences take turns while
// they have runs.
template <typename L>
__device__ inline int place_of_run(const Shared<L>& shared, int first, int run) {
  int before = 0;
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) before += min(shared.of_rows.runs[r], run + (r < first));
  return before;
}

// Lists the runs of token r, by `threads` threads.
template <typename L>
__device__ inline void list_runs(Shared<L>& shared, int r, int thread, int threads) {
  for (int run = thread; run < shared.of_rows.runs[r]; run += threads) {
    shared.of_rows.run_order[place_of_run(shared, r, run)] =
        static_cast<uint16_t>(run * L::kRows + r);
  }
}

}  // namespace fathom::cuda::decode_layers_kernel
