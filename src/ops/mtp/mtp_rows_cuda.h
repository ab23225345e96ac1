// The rows around the MTP layer on a Hopper GPU: its input, and the main model's states that later
// steps read.
//
// A state is the main model's normed last row of a token, [n] bf16. Pages keep the states of some
// of their tokens (KeptStates). n is a multiple of 8, up to 16,384; all rows are aligned to 16
// bytes.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/planted_fault.h"
#include "ops/embedding/embedding_cuda.h"
#include "ops/mtp/kept_states.h"

namespace fathom::cuda {

// All pointers are device memory.
struct MtpInputArguments {
  const int32_t* ids = nullptr;            // [rows], as EmbeddingArguments has them
  const int32_t* sampled = nullptr;        // may be null if no id is below 0
  EmbeddingShard shards[kMostPeers] = {};  // together the table of [vocab, n], bf16
  int num_shards = 1;
  // [rows]: the state before the token: i >= 0 is row i of `states`, -1 - i is number i of `kept`.
  const int64_t* previous = nullptr;
  const void* states = nullptr;  // [.., n] bf16
  KeptStates kept;
  const float *embedding_norm = nullptr, *state_norm = nullptr;  // [n]
  float eps = 1e-6f;
  void* out = nullptr;  // [rows, 2 n] bf16
  int64_t rows = 0, n = 0;
  FATHOM_PLANTED_FAULT
};

// out[i] = (norm(embedding of token i), norm(state before token i)), norms as rms_norm() makes
// them. One launch. A row's bits do not depend on the others.
void mtp_input(const MtpInputArguments& arguments, GpuStream stream);

struct KeepStatesArguments {
  const void* states = nullptr;    // [rows, n] bf16
  const int64_t* slots = nullptr;  // [rows]: the state's number in `kept`; negative: it is not kept
  KeptStates kept;
  int64_t rows = 0, n = 0;
  FATHOM_PLANTED_FAULT
};

// One launch. No two rows have the same slot.
void keep_states(const KeepStatesArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
