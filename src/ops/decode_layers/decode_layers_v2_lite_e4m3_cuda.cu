// decode_layers() for DeepSeek-V2-Lite with weights in e4m3.
#include "ops/decode_layers/decode_layers_v2_lite_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

void launch_v2_lite_e4m3(const DecodeLayersArguments& arguments, GpuStream stream) {
  launch_v2_lite<false>(arguments, stream);
}

}  // namespace fathom::cuda::decode_layers_kernel
