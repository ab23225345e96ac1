// The launch of decode_layers(): 128 persistent CTAs, one per SM, of a shape's producer threads and
// consumer warps.
//
// Each CTA owns a share of the rows of every matrix. Its weights stream in one order for the whole
// launch through a ring buffer in shared memory; two producer threads issue each chunk as soon as a
// slot is free, the cache's keys included. Only a layer's routed experts are not known ahead.
// Sixteen consumer warps multiply. Each step produces a few dozen values per CTA, which all CTAs
// read as flag-in-data packets (block_packets.cuh). Eight CTAs work on a head: its query, its part
// of W_UK, a split of an eighth of the keys each, W_UV. Every CTA keeps its own rows of the
// residual.
#pragma once

#include "device/cuda/co_resident.h"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// The shapes' launches, and the bytes of their Exchanged.
void launch_v3_tp8(const DecodeLayersArguments& arguments, GpuStream stream);
void launch_v2_lite_bf16(const DecodeLayersArguments& arguments, GpuStream stream);
void launch_v2_lite_e4m3(const DecodeLayersArguments& arguments, GpuStream stream);
int64_t v3_tp8_exchange_bytes();
int64_t v2_lite_exchange_bytes();

// One definition a shape: in a header, so internal to each.
template <typename L, typename Feeder, typename Layers>
__global__ void __launch_bounds__(kAllThreads, 1)
    layers_kernel(const __grid_constant__ DecodeLayersArguments a) {
  // What take_registers() takes has to be free: the launch has 96 for each thread.
  static_assert(L::kRegisters * kThreads + L::kFeederRegisters * (kAllThreads - kThreads) <=
                96 * kAllThreads);
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<L>& shared = *reinterpret_cast<Shared<L>*>(memory);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int i = 0; i < L::kSlots; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kWarps);
    }
    barrier_init(&shared.chosen, 1);
    barrier_init(&shared.pages_known, 1);
    barrier_init(&shared.input_known, 1);
    barrier_init(&shared.query_known, L::kRows * kReceivers);
    for (uint64_t& known : shared.row_known) barrier_init(&known, 1);
    for (uint32_t& turn : shared.turns) turn = 0;
    fence_barrier_init();
  }
  if (thread < static_cast<int>(sizeof(DecodeLayer) / 8)) {
    reinterpret_cast<uint64_t*>(&shared.layers[0])[thread] =
        reinterpret_cast<const uint64_t*>(a.layers)[thread];
  }
  __syncthreads();
  if (thread >= kThreads) {
    give_registers<L::kFeederRegisters>();
    const int feeder = (thread - kThreads) / kWarp;
    if (feeder < kFeeders) {
      if (thread % kWarp == 0) Feeder(shared, a, feeder).run();
    } else if (feeder < kFeeders + L::kRows) {
      Layers::run_aside(shared, a, feeder - kFeeders);
    }
  } else {
    take_registers<L::kRegisters>();
    wait_for_earlier_launches();
    Layers(shared, a).run();
  }
}

template <typename L, template <typename> typename Feeder, template <typename> typename Layers>
void launch_layers(const DecodeLayersArguments& arguments, GpuStream stream) {
  with_latent_row(arguments.format, [&](auto row) {
    using Row = decltype(row);
    constexpr auto kKernel = layers_kernel<L, Feeder<Row>, Layers<Row>>;
    stream.device().allow_shared_memory(kKernel, sizeof(Shared<L>));
    launch_co_resident(
        "decode_layers", kKernel,
        {.blocks = kBlocks, .threads = kAllThreads, .shared_bytes = sizeof(Shared<L>)}, kBlocks,
        stream, arguments);
  });
}

}  // namespace fathom::cuda::decode_layers_kernel
