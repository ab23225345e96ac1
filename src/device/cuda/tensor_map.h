// TMA tensor maps of matrices in device memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

namespace fathom::cuda {

struct Extent {
  int64_t rows = 0, columns = 0;
};

// Tensor map of a dense bf16 matrix whose boxes get the 128-byte swizzle: box.columns is 64.
// `matrix` is aligned to 16 bytes. Tensor maps are passed to kernels by value.
CUtensorMap bf16_map(const void* matrix, Extent size, Extent box);

// One of up to five axes of bf16 memory: its elements lie `stride` elements apart. Box elements
// beyond `size` are zero.
struct Axis {
  int64_t size = 0, stride = 1;
  int box = 1;
};

// The same for any memory: the innermost axis first, whose stride is 1 and whose box is 64; the
// other strides are multiples of 8.
CUtensorMap bf16_map(const void* memory, std::span<const Axis> axes);

// The same for e4m3: the innermost box is 128, the other strides are multiples of 16.
CUtensorMap e4m3_map(const void* memory, std::span<const Axis> axes);

// For fp32, not swizzled; the other strides are multiples of 4.
CUtensorMap f32_map(const float* memory, std::span<const Axis> axes);

// Matrices whose columns are contiguous; strides in elements, multiples of 8.
struct BatchLayout {
  int64_t batches = 1, rows = 0, columns = 0;
  int64_t row_stride = 0, batch_stride = 0;  // batch_stride is ignored with one batch
};

// The same for a batch, for boxes within one matrix, with coordinates column, row, batch: elements
// beyond a matrix are read as 0 and not written.
CUtensorMap bf16_batch_map(const void* matrices, const BatchLayout& layout, Extent box);

}  // namespace fathom::cuda
