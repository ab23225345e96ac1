// The router on a Hopper GPU: logits = x weight^T and the selection of gate() (ops/gate/gate.h) in
// one launch; in two for many rows and more than 64 experts.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/launch.h"
#include "ops/gate/gate_options.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

class CublasLt;

// All pointers are device memory, rows aligned to 16 bytes. hidden is a multiple of 32; at most 512
// experts, 32 groups and 32 experts a token (gate_support.h).
struct GateArguments {
  const void* x = nullptr;           // [rows, hidden] bf16
  const void* weight = nullptr;      // [experts, hidden]
  DType weight_type = DType::kBF16;  // or kF32
  const float* bias = nullptr;       // [experts]; kSigmoidBias only
  GateOptions options;
  // One integer; null: all rows are valid. Rows from there on are padding: they get expert -1 with
  // weight 0.
  const int32_t* num_valid_rows = nullptr;
  int32_t* expert_ids = nullptr;    // [rows, k]
  float* expert_weights = nullptr;  // [rows, k]
  int64_t rows = 0, hidden = 0, experts = 0;
  // For more than 64 experts: gate_scratch_words() words, every bit set before the first launch;
  // each launch restores that state. Launches of the same hidden and experts may share it if they
  // never run at the same time.
  float* scratch = nullptr;
  // Makes a row's bits independent of the number of rows.
  bool batch_invariant = false;
  CublasLt* library = nullptr;                               // see LinearArguments
  int sms = DeviceContext::current().num_multiprocessors();  // SM budget of the launch
};

// Scratch words for up to `rows` rows.
int64_t gate_scratch_words(int64_t rows, int64_t hidden, int64_t experts,
                           int sms = DeviceContext::current().num_multiprocessors());

// Logits are fp32 sums (of exact products, in the tensor cores' order). A row's bits do not depend
// on the other rows; with up to 64 experts, not on their number either.
void gate(const GateArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
