// Tokens and experts for the tests and benchmarks of the mixture of experts on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "device/cuda/device_array.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"

namespace fathom::cuda {

// Weights repeat some 8 MB of random numbers; outputs and workspace are not initialised.
struct MoeProblem {
  MoeProblem(const MoeShape& shape, int32_t rows, const std::vector<int32_t>& ids, uint32_t seed);

  MoeArguments arguments(DType out_type) const;
  double flop() const;  // of the GEMMs of tokens with their experts

  MoeShape shape;
  int32_t rows;
  std::vector<int32_t> expert_ids;
  DeviceArray<uint16_t> x;
  DeviceArray<int32_t> ids;
  DeviceArray<float> weights;
  DeviceArray<uint16_t> gate_up, down, shared_gate_up, shared_down;
  DeviceArray<float> out;
  DeviceArray<uint8_t> workspace;
};

// Distinct experts for each row, uniformly distributed.
std::vector<int32_t> random_experts(const MoeShape& shape, int32_t rows, uint32_t seed);
// The same number of rows for each expert.
std::vector<int32_t> balanced_experts(const MoeShape& shape, int32_t rows);

}  // namespace fathom::cuda
