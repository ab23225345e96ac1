// The router on a Hopper GPU: logits = x weight^T and the choice of gate() (ops/gate/gate.h) in one
// launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/gate/gate_options.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// All pointers are device memory, rows aligned to 16 bytes. hidden is a multiple of 32; at most 512
// experts, 32 groups and 32 experts a token.
struct GateArguments {
  const void* x = nullptr;           // [rows, hidden] bf16
  const void* weight = nullptr;      // [experts, hidden]
  DType weight_type = DType::kBF16;  // or kF32
  const float* bias = nullptr;       // [experts]; kSigmoidBias only
  GateOptions options;
  // One integer; null: all are. Rows from there on are padding: they get expert -1 with weight 0.
  const int32_t* num_valid_rows = nullptr;
  int32_t* expert_ids = nullptr;    // [rows, k]
  float* expert_weights = nullptr;  // [rows, k]
  int64_t rows = 0, hidden = 0, experts = 0;
};

// The logits are sums in fp32 (of exact products, in the tensor cores' order). A row's bits do not
// depend on the other rows or on their number.
void gate(const GateArguments& arguments, cudaStream_t stream);

}  // namespace fathom::cuda
