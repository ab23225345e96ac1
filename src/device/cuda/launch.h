// Launching kernels so that each begins while the one before it ends (programmatic dependent
// launch): its blocks start, set up their shared memory and read weights, and wait at
// wait_for_earlier_launches() (ptx.cuh) for what the others wrote.
//
// Every block of every kernel that is launched so calls wait_for_earlier_launches() before it reads
// what another launch has written and before it writes anything that another launch reads or
// writes: only then does "the launch before has ended" mean that all before it have.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "device/cuda/error.h"

namespace fathom::cuda {

struct LaunchShape {
  dim3 blocks = 1;
  unsigned threads = 128;
  unsigned shared_bytes = 0;  // dynamic; above 48 KB the kernel must have been allowed them
  unsigned cluster = 1;       // blocks of x that form a cluster
};

// Lets a kernel have so many bytes of dynamic shared memory; once for each kernel.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "raising a kernel's shared memory");
}

// Of the current device; asked for once: a program's devices are alike.
inline int num_multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "asking for the device");
    check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device),
          "asking for the number of multiprocessors");
    return value;
  }();
  return count;
}

// Lets a kernel's clusters have up to 16 blocks; 8 need no leave.
template <typename Kernel>
void allow_large_clusters(Kernel* kernel) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "raising a kernel's cluster size");
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
            Arguments&&... arguments) {
  cudaLaunchAttribute attributes[3] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  // A multiprocessor divides its memory between L1 and blocks for all that run on it: one that has
  // given a small block little takes no large one before the small one has ended.
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
