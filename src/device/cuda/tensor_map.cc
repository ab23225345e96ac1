#include "device/cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include "device/cuda/error.h"

namespace fathom::cuda {
namespace {

// From the driver that is installed: the program itself is not linked to it.
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

}  // namespace

CUtensorMap bf16_map(const void* matrix, Extent size, Extent box) {
  if (encoder() == nullptr) check(cudaErrorInsufficientDriver, "looking for the copy engine");
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(size.columns),
                               static_cast<cuuint64_t>(size.rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(size.columns) * 2};
  const cuuint32_t boxes[2] = {static_cast<cuuint32_t>(box.columns),
                               static_cast<cuuint32_t>(box.rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes,
                row_bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue,
        "describing a matrix to the copy engine");
  return map;
}

}  // namespace fathom::cuda
