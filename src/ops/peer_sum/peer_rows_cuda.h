// peer_sum() for many rows: each rank sums a share of them out of the others' memory and writes the
// results into all ranks' memory, so that a value crosses the links twice and not once to each
// rank. Between the launches of a step each rank has the residual of its own share only.
//
// Bits are those of peer_sum().
#pragma once

#include "device/cuda/peer_group.h"
#include "ops/peer_sum/peer_sum_cuda.h"
#include "ops/scaled_linear/quantized_rows_cuda.h"

namespace fathom::cuda {

// One rank's rows, in its device's memory.
struct PeerRows {
  float* residual = nullptr;     // [rows, n]
  const void* delta = nullptr;   // [rows, n] bf16: this rank's part of the sum
  void* out = nullptr;           // [rows, n] bf16; null: not written
  QuantizedRows quantized = {};  // values null: not written
};

struct PeerRowsArguments {
  PeerRows ranks[kMostPeers] = {};
  const float* weight = nullptr;  // [n], this rank's
  float eps = 1e-6f;
  int64_t rows = 0, n = 0;
  // As in AddRmsNormArguments: row i of the results comes from row row_ids[i] of `divided_rows`
  // rows, whose residuals are divided over the ranks. Every rank computes all of them, for itself:
  // `gathered`, and the outputs of its own entry of `ranks`.
  const int32_t* row_ids = nullptr;
  float* gathered = nullptr;  // [rows, n]
  int64_t divided_rows = 0;
  PeerRank peers = {};
  // SMs that the launch may use, as for peer_sum().
  int sms = DeviceContext::current().num_multiprocessors();
};

// The rows whose residual a rank has: as many to each, in order, fewer or none to the last.
constexpr int64_t rows_of_each(int64_t rows, int ranks) { return (rows + ranks - 1) / ranks; }

// residual += sum over ranks of delta; out = norm of the residual. All ranks of the group enqueue
// the same exchanges in the same order. n as for peer_sum().
void peer_sum_rows(const PeerRowsArguments& arguments, GpuStream stream);

// Columns of all ranks, gathered on the first.
struct PeerColumnsArguments {
  const float* from = nullptr;    // [rows, columns], this rank's, columns contiguous
  int64_t from_stride = 0;        // elements, a multiple of 4
  float* to = nullptr;            // the first rank's, at this rank's first column; 16-byte aligned
  int64_t to_stride = 0;          // elements, a multiple of 4
  int64_t rows = 0, columns = 0;  // columns: a multiple of 4. 0 or from == to: nothing to copy
  PeerRank peers = {};
  int sms = DeviceContext::current().num_multiprocessors();
};

// After this launch the first rank has the columns of all.
void gather_columns(const PeerColumnsArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
