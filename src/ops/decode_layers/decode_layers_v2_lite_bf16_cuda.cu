// decode_layers() for DeepSeek-V2-Lite with weights in bf16.
#include "ops/decode_layers/decode_layers_v2_lite_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {
namespace {

using Layout = V2LiteLayout<true>;
template <typename Row>
using Feeder = V2LiteFeeder<Row, Layout>;
template <typename Row>
using Layers = V2LiteLayers<Row, Layout>;

}  // namespace

void launch_v2_lite_bf16(const DecodeLayersArguments& arguments, GpuStream stream) {
  launch_layers<Layout, Feeder, Layers>(arguments, stream);
}

int64_t v2_lite_exchange_bytes() { return sizeof(Layout::Exchanged); }

}  // namespace fathom::cuda::decode_layers_kernel
