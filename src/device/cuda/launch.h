// Programmatic dependent launch (PDL): each kernel begins while the one before it ends. Its CTAs
// start, set up their shared memory and read weights, and call wait_for_earlier_launches()
// (ptx.cuh) before they use other launches' results.
//
// Every CTA of every kernel launched so must call wait_for_earlier_launches() before it reads what
// another launch has written and before it writes anything that another launch reads or writes:
// only then does the end of the previous launch imply the end of all earlier ones.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "device/cuda/error.h"
#include "device/cuda/gpu_stream.h"

namespace fathom::cuda {

struct LaunchShape {
  dim3 blocks = 1;
  unsigned threads = 128;
  unsigned shared_bytes = 0;  // dynamic; above 48 KB after DeviceContext::allow_shared_memory()
  unsigned cluster = 1;       // CTAs along x that form a cluster
  // All CTAs begin at once or none does; without overlap with the end of the previous launch.
  bool cooperative = false;
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, GpuStream stream,
            Arguments&&... arguments) {
  cudaLaunchAttribute attributes[3] = {};
  if (shape.cooperative) {
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
  } else {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
  }
  // An SM has one split between L1 and shared memory for all CTAs that run on it: an SM configured
  // for small CTAs takes no large one before the small ones have ended.
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[2].id = cudaLaunchAttributeClusterDimension;
  attributes[2].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = shape.cluster > 1 ? 3 : 2;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
        "launching a kernel");
}

}  // namespace fathom::cuda
