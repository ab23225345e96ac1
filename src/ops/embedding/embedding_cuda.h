// embedding (ops/embedding/embedding.h) on a Hopper GPU. Ids are read from device memory: the
// previous step may have sampled them, and the host has not seen them yet.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/planted_fault.h"
#include "device/most_peers.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// Rows of a table that ranks divide among themselves.
struct EmbeddingShard {
  const void* table = nullptr;  // [count, n], in the memory of any device that this one can reach
  int64_t count = 0;            // rows, after those of the shards before
};

// All pointers are device memory; rows are aligned to 16 bytes and n is a multiple of 8.
struct EmbeddingArguments {
  const int32_t* ids = nullptr;            // [rows]; below 0: sampled[-1 - id]
  const int32_t* sampled = nullptr;        // may be null if no id is below 0
  EmbeddingShard shards[kMostPeers] = {};  // together the table of [vocab, n]
  int num_shards = 1;
  DType table_type = DType::kBF16;  // or kF32
  float* out = nullptr;             // [rows, n]: the residual
  int64_t rows = 0, n = 0;
  FATHOM_PLANTED_FAULT
};

// An id outside the vocabulary (a padding row's, or the -1 of a row without a sampled token) gives
// zeros.
void embedding(const EmbeddingArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
