// decode_layers() for DeepSeek-V2-Lite with weights in e4m3.
#include "ops/decode_layers/decode_layers_v2_lite_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {
namespace {

using Layout = V2LiteLayout<false>;
template <typename Row>
using Feeder = V2LiteFeeder<Row, Layout>;
template <typename Row>
using Layers = V2LiteLayers<Row, Layout>;

}  // namespace

void launch_v2_lite_e4m3(const DecodeLayersArguments& arguments, GpuStream stream) {
  launch_layers<Layout, Feeder, Layers>(arguments, stream);
}

}  // namespace fathom::cuda::decode_layers_kernel
