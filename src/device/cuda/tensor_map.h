// Descriptions of matrices in device memory for the copy engine (TMA).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fathom::cuda {

struct Extent {
  int64_t rows = 0, columns = 0;
};

// A dense bf16 matrix whose boxes go to shared memory with the 128-byte swizzle: box.columns is 64.
// `matrix` is aligned to 16 bytes. The description is passed to kernels by value.
CUtensorMap bf16_map(const void* matrix, Extent size, Extent box);

}  // namespace fathom::cuda
