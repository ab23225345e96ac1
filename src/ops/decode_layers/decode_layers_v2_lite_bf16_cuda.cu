// decode_layers() for DeepSeek-V2-Lite with weights in bf16.
#include "ops/decode_layers/decode_layers_v2_lite_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

void launch_v2_lite_bf16(const DecodeLayersArguments& arguments, GpuStream stream) {
  launch_v2_lite<true>(arguments, stream);
}

int64_t v2_lite_exchange_bytes() {
  return sizeof(V2LiteLayout<true, 1>::Exchanged) + sizeof(V2LiteLayout<true, 2>::Exchanged);
}

}  // namespace fathom::cuda::decode_layers_kernel
