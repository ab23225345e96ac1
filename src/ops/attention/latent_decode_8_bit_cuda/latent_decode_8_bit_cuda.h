// Row tiles of 16 and 32 rows of latent_decode() (latent_decode_cuda.h, which calls this) over
// 8-bit caches. The kernel is described in latent_decode_8_bit_cuda.cu.
#pragma once

#include "device/cuda/gpu_stream.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"

namespace fathom::cuda {

void latent_decode_8_bit(int tile_rows, int num_multiprocessors,
                         const LatentDecodeArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
