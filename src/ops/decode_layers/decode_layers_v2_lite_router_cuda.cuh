// The warps of a CTA that multiply with V2-Lite's router and choose each layer's experts, one for
// each token.
#pragma once

#include "ops/decode_layers/decode_layers_v2_lite_feed_cuda.cuh"
#include "ops/gate/gate_choice_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// For one token. Runs beside the consumers, which begin with the shared expert: neither waits for
// the other's instructions.
template <typename Row, typename L>
class V2LiteRouter {
 public:
  __device__ V2LiteRouter(Shared<L>& shared, const DecodeLayersArguments& a, int row)
      : shared_(shared),
        a_(a),
        exchange_(*static_cast<typename L::Exchanged*>(a.exchange)),
        row_(row),
        block_(static_cast<int>(blockIdx.x)),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  __device__ void run() {
    load_weights(0);
    barrier_wait(&shared_.pages_known, 0);
    uint32_t epoch = shared_.epoch;
#pragma unroll 1
    for (int l = 0; l < a_.num_layers; ++l) {
      ++epoch;
      barrier_wait(&shared_.input_known, l & 1);
      put_logit(epoch);
      if (l + 1 < a_.num_layers) load_weights(l + 1);
      choose(epoch);
      if constexpr (L::kRows > 1) {
        named_barrier(kRouters, L::kRows * kWarp);
        if (row_ == 0) make_units(shared_, a_, lane_);
      }
    }
  }

 private:
  // The CTA has half of one expert's columns, eight neighbours a lane each time.
  static constexpr int kTogether = kWarp * 8, kTimes = L::kHidden / 2 / kTogether;
  __device__ void load_weights(int l) {
    const auto* const from = static_cast<const uint8_t*>(a_.layers[l].router) +
                             (int64_t{block_} * (L::kHidden / 2) + lane_ * 8) * 2;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      weights_[i] = __ldg(reinterpret_cast<const uint4*>(from + i * kTogether * 2));
    }
  }

  // That part of the expert's logit.
  __device__ void put_logit(uint32_t epoch) const {
    const uint8_t* const x =
        shared_.vector + (row_ * L::kHidden + block_ % 2 * (L::kHidden / 2) + lane_ * 8) * 2;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const Eight w = widen(weights_[i]);
      const uint4 packed = *reinterpret_cast<const uint4*>(x + i * kTogether * 2);
      if constexpr (L::kHasBf16Weights) {
        const Eight values = widen(packed);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(w.v[j], values.v[j], sum);
      } else {
        const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = widen_f16(words[j]);
          sum = fmaf(w.v[2 * j], two.x, sum);
          sum = fmaf(w.v[2 * j + 1], two.y, sum);
        }
      }
    }
    sum = warp_sum(sum);
    if (lane_ != 0) return;
    store_packet(&exchange_.logits[row_ * kBlocks + block_], __float_as_uint(sum),
                 uint64_t{epoch} << 48);
  }

  // The rules of gate() (ops/gate/gate.h) for kSoftmaxGreedy. A lane has experts `lane` and `lane`
  // + 32, two parts of each logit. Among equal scores the lower index is chosen.
  __device__ void choose(uint32_t epoch) const {
    static_assert(L::kRouted == 2 * kWarp && kBlocks == 2 * L::kRouted);
    Packet packets[4];
    const Packet* const logits_of_row = exchange_.logits + row_ * kBlocks;
    wait_for_packets(packets, epoch,
                     [&](int i) { return logits_of_row + (i / 2 * kWarp + lane_) * 2 + i % 2; });
    const auto part = [&](int i) {
      if (FATHOM_PLANTED(a_, kHalfLogit) && i % 2 == 1) return 0.0f;
      return __uint_as_float(static_cast<uint32_t>(packets[i].low));
    };
    const float logits[2] = {part(0) + part(1), part(2) + part(3)};
    const uint32_t most_key =
        __reduce_max_sync(~0u, max(order_key(logits[0]), order_key(logits[1])));
    const float most =
        __uint_as_float((most_key & 0x80000000) != 0 ? most_key ^ 0x80000000 : ~most_key);
    float scores[2] = {expf(logits[0] - most), expf(logits[1] - most)};
    const float sum = warp_sum(scores[0] + scores[1]);
    uint32_t keys[2];
    int places[2] = {-1, -1};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scores[j] /= sum;
      keys[j] = order_key(scores[j]);
    }
#pragma unroll 1
    for (int i = 0; i < L::kChosen; ++i) {
      const uint32_t best = __reduce_max_sync(~0u, max(keys[0], keys[1]));
      const int own = keys[0] == best ? lane_ : keys[1] == best ? lane_ + kWarp : L::kRouted;
      const auto id = static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(own)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (id != lane_ + j * kWarp) continue;
        places[j] = i;
        keys[j] = 0;
      }
    }
    const float factor = a_.gate.normalize ? 1 : a_.gate.scaling;
    int32_t* ids = shared_.ids;
    if constexpr (L::kRows > 1) ids = shared_.of_rows.chosen_ids[row_];
    float* const weights = shared_.weights + row_ * L::kExperts + 1;  // after the shared expert's
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (places[j] < 0) continue;
      ids[places[j]] = lane_ + j * kWarp;
      weights[places[j]] = scores[j] * factor;
    }
    __syncwarp();
    if (lane_ != 0) return;
    if (a_.gate.normalize) {
      float chosen = 0;
      for (int i = 0; i < L::kChosen; ++i) chosen += weights[i];
      for (int i = 0; i < L::kChosen; ++i) weights[i] /= chosen + 1e-20f;
    }
    if (FATHOM_PLANTED(a_, kDroppedExpert)) weights[L::kChosen - 1] = 0;
    if (L::kRows == 1) barrier_arrive(&shared_.chosen);
  }

  Shared<L>& shared_;
  const DecodeLayersArguments& a_;
  typename L::Exchanged& exchange_;
  const int row_, block_, lane_;
  uint4 weights_[kTimes];  // of the layer whose input comes next
};

}  // namespace fathom::cuda::decode_layers_kernel
