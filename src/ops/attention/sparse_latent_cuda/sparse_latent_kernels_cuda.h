// The launches of sparse_latent_attention() (sparse_latent_attention_cuda.h), which calls these.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_attention_cuda.h"

namespace fathom::cuda {

// One launch over a bf16 or an 8-bit cache; rows with one split get their result, others partial
// results. The kernels are described in sparse_latent_bf16_cuda.cu and sparse_latent_8_bit_cuda.cu.
void sparse_latent_bf16(int num_multiprocessors, const SparseLatentArguments& arguments,
                        GpuStream stream);
void sparse_latent_8_bit(const SparseLatentArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
