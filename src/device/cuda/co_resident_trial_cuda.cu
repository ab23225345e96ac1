#include "device/cuda/co_resident.h"
#include "device/cuda/co_resident_trial_cuda.h"
#include "device/cuda/ptx.cuh"

namespace fathom::cuda {
namespace {

constexpr int kAloneBytes = 200 * 1024;  // leaves no room for another CTA on the SM

__global__ void barriers_kernel(uint64_t* arrived, int barriers) {
  let_next_launch_begin();
  wait_for_earlier_launches();
  for (int i = 0; i < barriers; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint64_t before = add_release(arrived, 1);
      const uint64_t all = (before / gridDim.x + 1) * gridDim.x;
      while (load_acquire(arrived) < all) {
      }
    }
  }
}

__global__ void nothing_kernel() {}

}  // namespace

void launch_barriers(int blocks, int sms, uint64_t* arrived, int barriers, GpuStream stream) {
  stream.device().allow_shared_memory(barriers_kernel, kAloneBytes);
  launch_co_resident(
      "barriers", barriers_kernel,
      {.blocks = static_cast<unsigned>(blocks), .threads = 128, .shared_bytes = kAloneBytes}, sms,
      stream, arrived, barriers);
}

void launch_nothing(GpuStream stream) {
  launch_co_resident("nothing", nothing_kernel, {}, 1, stream);
}

int allow_nothing(int bytes) {
  DeviceContext::current().allow_shared_memory(nothing_kernel, bytes);
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, nothing_kernel), "asking for a kernel's shared memory");
  return attributes.maxDynamicSharedSizeBytes;
}

}  // namespace fathom::cuda
