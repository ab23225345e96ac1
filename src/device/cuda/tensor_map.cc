#include "device/cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include "device/cuda/error.h"

namespace fathom::cuda {
namespace {

// Loaded from the installed driver: the program itself is not linked to it.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

CUtensorMap describe(const void* memory, std::span<const Axis> axes, CUtensorMapDataType type,
                     int element_bytes, CUtensorMapSwizzle swizzle) {
  constexpr size_t kMostAxes = 5;
  if (encoder() == nullptr) check(cudaErrorInsufficientDriver, "looking for the copy engine");
  cuuint64_t sizes[kMostAxes] = {}, strides[kMostAxes] = {};
  cuuint32_t boxes[kMostAxes] = {}, steps[kMostAxes] = {};
  for (size_t i = 0; i < axes.size(); ++i) {
    sizes[i] = static_cast<cuuint64_t>(axes[i].size);
    strides[i] = static_cast<cuuint64_t>(axes[i].stride * element_bytes);
    boxes[i] = static_cast<cuuint32_t>(axes[i].box);
    steps[i] = 1;
  }
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, type, static_cast<cuuint32_t>(axes.size()), const_cast<void*>(memory), sizes,
                strides + 1, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue,
        "describing a matrix to the copy engine");
  return map;
}

}  // namespace

CUtensorMap bf16_map(const void* matrix, Extent size, Extent box) {
  const Axis axes[] = {{size.columns, 1, static_cast<int>(box.columns)},
                       {size.rows, size.columns, static_cast<int>(box.rows)}};
  return bf16_map(matrix, axes);
}

CUtensorMap bf16_map(const void* memory, std::span<const Axis> axes) {
  return describe(memory, axes, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap e4m3_map(const void* memory, std::span<const Axis> axes) {
  return describe(memory, axes, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap f32_map(const float* memory, std::span<const Axis> axes) {
  return describe(memory, axes, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, CU_TENSOR_MAP_SWIZZLE_NONE);
}

CUtensorMap bf16_batch_map(const void* matrices, const BatchLayout& layout, Extent box) {
  const Axis axes[] = {
      {.size = layout.columns, .stride = 1, .box = static_cast<int>(box.columns)},
      {.size = layout.rows, .stride = layout.row_stride, .box = static_cast<int>(box.rows)},
      {.size = layout.batches,
       .stride = layout.batches > 1 ? layout.batch_stride : layout.rows * layout.row_stride,
       .box = 1}};
  return bf16_map(matrices, axes);
}

}  // namespace fathom::cuda
