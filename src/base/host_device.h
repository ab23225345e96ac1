// FATHOM_HOST_DEVICE before a function: nvcc compiles it for the host and for the GPU, other
// compilers for the host.
#pragma once

#ifdef __CUDACC__
#define FATHOM_HOST_DEVICE __host__ __device__
#else
#define FATHOM_HOST_DEVICE
#endif
