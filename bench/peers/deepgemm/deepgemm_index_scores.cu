// The form that DeepGEMM's host code chooses for 64 heads: blocks of 2 rows and 256 keys, 3 stages
// of each, 512 threads that multiply.
#include <cuda.h>

#include <deep_gemm/impls/sm90_fp8_mqa_logits.cuh>
#include <stdexcept>

#include "deepgemm_index_scores.h"

namespace fathom::peers {
namespace {

constexpr uint32_t kHeads = 64, kDim = 128, kRows = 128 / kHeads, kKeys = 256;
constexpr uint32_t kStages = 3, kMultiprocessors = 132, kCopyThreads = 128, kMathThreads = 512;
constexpr uint32_t kBytes =
    kStages * (kRows * kHeads * (kDim + 4) + kKeys * (kDim + 4)) + 4 * kStages * 8 + 68;

CUtensorMap tensor_map(CUtensorMapDataType type, int element_bytes, const void* data,
                       uint64_t inner, uint64_t outer, uint32_t box_inner, uint32_t box_outer,
                       CUtensorMapSwizzle swizzle) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        found == nullptr) {
      throw std::runtime_error("no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const cuuint64_t sizes[2] = {inner, outer},
                   strides[1] = {inner * static_cast<uint64_t>(element_bytes)};
  const cuuint32_t box[2] = {box_inner, box_outer}, steps[2] = {1, 1};
  CUtensorMap map;
  if (encode(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    throw std::runtime_error("a tensor map is refused");
  }
  return map;
}

}  // namespace

void deepgemm_index_scores(const DeepGemmScores& a, cudaStream_t stream) {
  constexpr auto kKernel =
      &deep_gemm::sm90_fp8_mqa_logits<kHeads, kDim, false, kRows, kKeys, kStages, kStages,
                                      kMultiprocessors, kCopyThreads, kMathThreads, float>;
  static const bool ready =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) ==
      cudaSuccess;
  if (!ready) throw std::runtime_error("no shared memory");
  constexpr auto kCodes = CU_TENSOR_MAP_DATA_TYPE_UINT8, kFloats = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const auto rows = static_cast<uint64_t>(a.rows), keys = static_cast<uint64_t>(a.num_keys);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = kMultiprocessors;
  config.blockDim = kCopyThreads + kMathThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(
      &config, kKernel, static_cast<uint32_t>(a.rows), static_cast<uint32_t>(a.num_keys),
      uint32_t{0}, static_cast<uint32_t>(a.columns),
      reinterpret_cast<uint32_t*>(const_cast<int32_t*>(a.begin)),
      reinterpret_cast<uint32_t*>(const_cast<int32_t*>(a.end)), a.scores,
      tensor_map(kCodes, 1, a.queries, kDim, rows * kHeads, kDim, kRows * kHeads,
                 CU_TENSOR_MAP_SWIZZLE_128B),
      tensor_map(kCodes, 1, a.keys, kDim, keys, kDim, kKeys, CU_TENSOR_MAP_SWIZZLE_128B),
      tensor_map(kFloats, 4, a.scales, keys, 1, kKeys, 1, CU_TENSOR_MAP_SWIZZLE_NONE),
      tensor_map(kFloats, 4, a.weights, kHeads, rows, kHeads, kRows, CU_TENSOR_MAP_SWIZZLE_NONE));
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

}  // namespace fathom::peers
