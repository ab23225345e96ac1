#include "base/check.h"
#include "ops/decode_layers/decode_layers_cuda.h"
#include "ops/decode_layers/decode_layers_launch_cuda.cuh"

namespace fathom::cuda {

using namespace decode_layers_kernel;

// Positions within the launches' limits have a place in the kernels' page tables, whatever the
// cache's format: e4m3's rows are the shortest.
constexpr bool fits_page_tables(DecodeLayersKind kind, int64_t most_tokens) {
  return most_decode_layers_bytes(kind, 1) / LatentRow<CacheFormat::kE4M3>::kBytes <= most_tokens;
}
static_assert(fits_page_tables(DecodeLayersKind::kV3Tp8, V3Tp8::kMostTokens) &&
              fits_page_tables(DecodeLayersKind::kV2LiteBf16, V2Lite::kMostTokens) &&
              fits_page_tables(DecodeLayersKind::kV2LiteE4M3, V2Lite::kMostTokens));

int64_t decode_layers_exchange_bytes(DecodeLayersKind kind) {
  switch (kind) {
    case DecodeLayersKind::kNone:
      return 0;
    case DecodeLayersKind::kV3Tp8:
      return v3_tp8_exchange_bytes();
    default:
      return v2_lite_exchange_bytes();
  }
}

void decode_layers(const DecodeLayersArguments& arguments, GpuStream stream) {
  const PeerRank& peers = arguments.peers;
  FATHOM_CHECK(peers.ranks == 1 || (arguments.kind == DecodeLayersKind::kV3Tp8 &&
                                    arguments.delta_in == nullptr && peers.rows >= arguments.rows &&
                                    peers.row_packets * kPacketValues >= V3Tp8::kHidden),
               "decode_layers of {} tokens over {} ranks: inboxes of {} rows of {} packets",
               arguments.rows, peers.ranks, peers.rows, peers.row_packets);
  FATHOM_CHECK(arguments.rows >= 1 && arguments.rows <= most_decode_layers_rows(arguments.kind) &&
                   (arguments.rows == 1 || arguments.table_starts != nullptr),
               "decode_layers takes up to {} tokens of this shape, with their tables' places; {}",
               most_decode_layers_rows(arguments.kind), arguments.rows);
  switch (arguments.kind) {
    case DecodeLayersKind::kV3Tp8:
      return launch_v3_tp8(arguments, stream);
    case DecodeLayersKind::kV2LiteBf16:
      return launch_v2_lite_bf16(arguments, stream);
    case DecodeLayersKind::kV2LiteE4M3:
      return launch_v2_lite_e4m3(arguments, stream);
    default:
      FATHOM_CHECK(false, "decode_layers has no kernel for the shape");
  }
}

}  // namespace fathom::cuda
