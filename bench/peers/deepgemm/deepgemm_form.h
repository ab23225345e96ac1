// DeepGEMM's GEMM of e4m3 with scales (sm90_fp8_gemm_1d2d) in one form: a tile, and which operand
// two thread blocks of a cluster share. Built from a checkout that its user names; see README.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace fathom::peers {

// out [m, n] bf16 = x [m, k] W [n, k]^T; all device memory.
struct DeepGemmOperands {
  const void* x = nullptr;               // [m, k] e4m3
  const float* x_scales = nullptr;       // [k / 128, m rounded up to 4]
  const void* weight = nullptr;          // [n, k] e4m3
  const float* weight_scales = nullptr;  // [n / 128 rounded up, k / 128]
  void* out = nullptr;
  int32_t m = 0;
};

enum class Shared { kNothing, kX, kWeight };

struct DeepGemmForm {
  int n = 0, k = 0, block_m = 0, block_n = 0;
  Shared shared = Shared::kNothing;
  void (*launch)(const DeepGemmOperands&, cudaStream_t) = nullptr;
};

// All forms that were built.
std::vector<DeepGemmForm>& deepgemm_forms();

}  // namespace fathom::peers
