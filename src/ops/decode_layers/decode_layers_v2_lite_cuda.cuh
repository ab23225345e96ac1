// decode_layers() for DeepSeek-V2-Lite: 16 heads without query compression, 64 experts of 1408
// columns, six of them a token, and a shared one of 2816; weights in bf16 or e4m3.
//
// Steps of a layer, in each of which CTAs read what the others wrote before:
//   query      norm of the residual; the head's rows of W_q, and a share of W_kv_a's
//   absorb     rotary embedding; the head's rows of W_UK; the new cache row
//   attend     scores and sums over keys of this CTA's split
//   values     combine of the head's splits; the head's rows of W_UV
//   o          rows of W_o
//   router     residual, norm; half a row of the router
//   gate, up   one warp of each CTA chooses the experts; rows of gate and of up
//   down       rows of down of all experts, added
#pragma once

#include "ops/decode_layers/decode_layers_launch_cuda.cuh"
#include "ops/decode_layers/decode_layers_steps_cuda.cuh"
#include "ops/decode_layers/decode_layers_v2_lite_feed_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// The consumer warps.
template <typename Row, typename L>
class V2LiteLayers : public Steps<Row, L, V2LiteLayers<Row, L>> {
 public:
  using Base = Steps<Row, L, V2LiteLayers<Row, L>>;
  using Base::Base;

  __device__ void half_layer(int l, bool is_attention) {
    if (!is_attention && warp_ == kWarps - 1) route();
    if (!is_attention) chunks_ += 1;
    products_of_hidden(is_attention, nullptr);
    if (is_attention) {
      put_rows(exchange_.query[block_], kQueryRows, [&](int row) { return both_halves(row); });
      put_key_rows();
      absorb();
      if (part_ == newest_key_part(position_)) make_cache_row(a_.pages + l * a_.layer_bytes);
      attend();
      values();
      o();
    } else {
      put_rows(exchange_.activation[block_], L::kActivations,
               [&](int row) { return activation(row); });
      down();
    }
  }

  __device__ float hidden_row(int row, bool is_attention) const {
    if (is_attention) return both_halves(row);
    float sum = shared_.sums[row / L::kSharedDownRows * L::kDownRows + row % L::kSharedDownRows];
#pragma unroll
    for (int i = 0; i < L::kChosen; ++i) {
      const int chunk = L::kSharedDownChunks + i * L::kDownChunks + row / L::kDownRows;
      sum += shared_.sums[chunk * L::kDownRows + row % L::kDownRows];
    }
    return sum;
  }

 private:
  using Base::a_;
  using Base::absorb;
  using Base::attend;
  using Base::block_;
  using Base::chunks_;
  using Base::epoch_;
  using Base::exchange_;
  using Base::half_;
  using Base::lane_;
  using Base::pair_;
  using Base::part_;
  using Base::position_;
  using Base::put_rows;
  using Base::receive_values;
  using Base::release_chunk;
  using Base::shared_;
  using Base::thread_;
  using Base::values;
  using Base::wait_for_chunk;
  using Base::warp_;
  using Base::write_cache_row;
  using Base::write_scaled;
  using Base::write_value;

  // Columns of a step, 512 bytes of a row, and of a lane.
  static constexpr int kStepColumns = kStepBytes / L::kWeightSize,
                       kLaneColumns = kStepColumns / kWarp;

  // ---- GEMVs

  // A lane's part of a step of two rows kStride bytes apart. x: 16-bit values.
  template <int kStride>
  __device__ Pair multiply(const uint8_t* weights, const uint8_t* x) const {
    const auto* const from = reinterpret_cast<const uint4*>(x);
    if constexpr (L::kHasBf16Weights) return multiply_step_bf16<kStride>(weights, from[0], lane_);
    return multiply_step<kStride>(weights, {from[0], from[1]}, lane_);
  }

  __device__ float both_halves(int row) const {
    return shared_.sums[row * 2] + shared_.sums[row * 2 + 1];
  }

  // The first row, in its matrix, of a chunk of this step with rows of kHidden columns. Up to a
  // multiple of 128 rows.
  __device__ int first_row(bool is_attention, int i) const {
    if (!is_attention) return gate_up_chunk<L>(i, block_).first;
    return i < L::kQueryChunks ? block_ * kQueryRows + i * L::kChunkRows : first_kv_row(block_);
  }

  // Rows of q and kv_a, or of the experts' gate and up: half the columns of all rows a warp.
  __device__ void products_of_hidden(bool is_attention, const float* x_scales) {
    const int count = is_attention ? L::kQueryChunks + 1 : L::kGateUpChunks;
    products(count, x_scales, [&](int i) { return first_row(is_attention, i); });
  }

  template <typename FirstRow>
  __device__ void products(int count, const float* x_scales, const FirstRow& first_row_of) {
    constexpr int kColumns = L::kHidden / 2, kRowBytes = L::kHidden * L::kWeightSize;
    constexpr int kPairsOfRows = L::kChunkRows / 2;
#pragma unroll 1
    for (int i = pair_; i < count; i += kPairs) {
      const uint8_t* const slot = wait_for_chunk(i);
      const uint8_t* const weights = slot + half_ * (kRowBytes / 2) + lane_ * 16;
      const uint8_t* const x = shared_.vector + (half_ * kColumns + lane_ * kLaneColumns) * 2;
      Pair sums[kPairsOfRows] = {};
      if constexpr (L::kHasBf16Weights) {
#pragma unroll
        for (int step = 0; step < kColumns / kStepColumns; ++step) {
#pragma unroll
          for (int pair = 0; pair < kPairsOfRows; ++pair) {
            const Pair more = multiply<kRowBytes>(
                weights + pair * 2 * kRowBytes + step * kStepBytes, x + step * kStepColumns * 2);
            sums[pair].first += more.first;
            sums[pair].second += more.second;
          }
        }
      } else {
        const auto* const scales = reinterpret_cast<const float*>(slot + L::kWeightBytes) +
                                   half_ * (kColumns / kScaleRow) + lane_ / 8;
        // Rows of the chunk from here on have the second row of scales.
        const int next = kScaleRow - first_row_of(i) % kScaleRow;
#pragma unroll
        for (int step = 0; step < kColumns / kStepColumns; ++step) {
          const float x_scale =
              x_scales == nullptr ? 1
                                  : x_scales[(half_ * kColumns / kScaleRow) + step * 4 + lane_ / 8];
#pragma unroll
          for (int pair = 0; pair < kPairsOfRows; ++pair) {
            const Pair more = multiply<kRowBytes>(
                weights + pair * 2 * kRowBytes + step * kStepBytes, x + step * kStepColumns * 2);
            const auto scale_of = [&](int row) {
              return scales[(row >= next ? L::kHidden / kScaleRow : 0) + step * 4] * x_scale;
            };
            sums[pair].first = fmaf(more.first, scale_of(pair * 2), sums[pair].first);
            sums[pair].second = fmaf(more.second, scale_of(pair * 2 + 1), sums[pair].second);
          }
        }
      }
      const bool diagonal = is_on_diagonal(lane_);
#pragma unroll
      for (int pair = 0; pair < kPairsOfRows; ++pair) {
        const float first = warp_sum(diagonal ? sums[pair].first : 0),
                    second = warp_sum(diagonal ? sums[pair].second : 0);
        if (lane_ != 0) continue;
        float* const to = shared_.sums + (i * L::kChunkRows + pair * 2) * 2 + half_;
        to[0] = first;
        to[2] = second;
      }
      if (lane_ == 0) release_chunk(i, kWarps / 2);
    }
    chunks_ += count;
    sync_consumers();
  }

  // ---- attention

  // The CTA's rows of kv_a, from the chunk after the query's.
  __device__ void put_key_rows() const {
    if (warp_ != kWarps - 1) return;
    const int rows = first_kv_row(block_ + 1) - first_kv_row(block_);
    put_bf16(exchange_.input[block_], 1, epoch_,
             lane_ < rows ? both_halves(kQueryRows + lane_) : 0);
  }

  // The new cache row, from all CTAs' rows of kv_a, by the last four warps, while the head's other
  // CTAs multiply with W_UK.
  __device__ void make_cache_row(std::byte* pages) const {
    const int from = thread_ - (kThreads - kBlocks);
    if (from < 0) return;
    Packet packet[1];
    if (FATHOM_PLANTED(a_, kSkippedKeyHandoff)) {
      packet[0] = load_packet(exchange_.input[from]);
    } else {
      wait_for_packets(packet, epoch_, [&](int) { return exchange_.input[from]; });
    }
    float row[kPacketValues];
    unpack_bf16(packet[0], row);
    const int first = first_kv_row(from), rows = first_kv_row(from + 1) - first;
#pragma unroll
    for (int j = 0; j < kPacketValues; ++j) {
      if (j < rows) shared_.scratch[kKeyAt + first + j] = row[j];
    }
    named_barrier(kSomeConsumers, kBlocks);
    if (warp_ == kWarps - 1) write_cache_row(pages);
  }

  __device__ void o() {
    receive_values();
    if constexpr (L::kHasBf16Weights) {
      for (int at = thread_ * 2; at < L::kHidden; at += 2 * kThreads) {
        reinterpret_cast<uint32_t*>(shared_.vector)[at / 2] =
            pack_bf16(shared_.scratch[at], shared_.scratch[at + 1]);
      }
      sync_consumers();
    } else {
      write_scaled(kHeads * kV / kScaleRow);
    }
    static_assert(kHeads * kV == L::kHidden);
    products(L::kOChunks, L::kHasBf16Weights ? nullptr : shared_.x_scales,
             [&](int i) { return block_ * L::kHiddenRows + i * L::kChunkRows; });
  }

  // ---- experts

  // One warp: a part of one expert's logit, and the choice by the rules of gate()
  // (ops/gate/gate.h). The other warps do not wait: the chunks of routed experts come later.
  __device__ void route() {
    const uint8_t* const weights = wait_for_chunk(0);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < L::kHidden / 2 / (kWarp * 8); ++i) {
      const int at = i * kWarp * 8 + lane_ * 8;
      const Eight w = widen(*reinterpret_cast<const uint4*>(weights + at * 2));
      const uint4 packed = *reinterpret_cast<const uint4*>(
          shared_.vector + (block_ % 2 * (L::kHidden / 2) + at) * 2);
      if constexpr (L::kHasBf16Weights) {
        const Eight x = widen(packed);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(w.v[j], x.v[j], sum);
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
    if (lane_ == 0) {
      store_packet(&exchange_.logits[block_], __float_as_uint(sum), uint64_t{epoch_} << 48);
      release_chunk(0, kWarps);
    }
    // Experts `lane` and `lane` + 32, two parts each.
    static_assert(L::kRouted == 2 * kWarp && kBlocks == 2 * L::kRouted);
    Packet packets[4];
    wait_for_packets(packets, epoch_,
                     [&](int i) { return exchange_.logits + (i / 2 * kWarp + lane_) * 2 + i % 2; });
    float* const logits = shared_.scratch;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto part = [&](int j) {
        if (FATHOM_PLANTED(a_, kHalfLogit) && j == 1) return 0.0f;
        return __uint_as_float(static_cast<uint32_t>(packets[i * 2 + j].low));
      };
      logits[i * kWarp + lane_] = part(0) + part(1);
    }
    __syncwarp();
    ExpertChoice<2>(a_.gate, L::kRouted, logits).run(nullptr, shared_.ids, shared_.weights + 1);
    __syncwarp();
    if (lane_ != 0) return;
    barrier_arrive(&shared_.chosen);
    shared_.weights[0] = 1;
    if (FATHOM_PLANTED(a_, kDroppedExpert)) shared_.weights[L::kChosen] = 0;
  }

  // The activation of the CTA's `at`-th column: those of the shared expert, then of the routed
  // ones.
  __device__ float activation(int at) const {
    const bool shared = at < L::kSharedRows;
    const int expert = (at - L::kSharedRows) / L::kInterRows,
              row = shared ? at : (at - L::kSharedRows) % L::kInterRows;
    const int gate_chunk = shared ? 0 : 2 * L::kSharedGateChunks + expert * 2 * L::kGateChunks;
    const int up_chunk = gate_chunk + (shared ? L::kSharedGateChunks : L::kGateChunks);
    const float gate = both_halves(gate_chunk * L::kChunkRows + row),
                up = both_halves(up_chunk * L::kChunkRows + row);
    return gate / (1 + expf(-gate)) * up;
  }

  // 16-bit values: the experts' activations.
  __device__ uint8_t* inner() const { return reinterpret_cast<uint8_t*>(shared_.scratch); }

  __device__ void down() {
    receive_activations();
    if constexpr (!L::kHasBf16Weights) scale_activations();
    // Each warp of a pair has half of a chunk's rows.
    constexpr int kCount = L::kSharedDownChunks + L::kChosen * L::kDownChunks;
#pragma unroll 1
    for (int i = pair_; i < kCount; i += kPairs) {
      const uint8_t* const slot = wait_for_chunk(i);
      float* const to = shared_.sums + i * L::kDownRows;
      if (i < L::kSharedDownChunks) {
        multiply_down<L::kSharedInter, L::kSharedDownRows / 2>(slot, 0, 1, to);
      } else {
        const int expert = (i - L::kSharedDownChunks) / L::kDownChunks;
        multiply_down<L::kInter, L::kDownRows / 2>(slot, L::kSharedInter + expert * L::kInter,
                                                   shared_.weights[1 + expert], to);
      }
      if (lane_ == 0) release_chunk(i, kWarps / 2);
    }
    chunks_ += kCount;
    sync_consumers();
  }

  __device__ void receive_activations() const {
    constexpr int kCount = kBlocks * L::kActivationPackets,
                  kEach = (kCount + kThreads - 1) / kThreads;
    Packet packets[kEach];
    const auto address = [&](int i) {
      const int at = thread_ + i * kThreads;
      return at < kCount ? &exchange_.activation[0][at] : nullptr;
    };
    if (FATHOM_PLANTED(a_, kSkippedActivations)) {
      for (int i = 0; i < kEach; ++i) {
        packets[i] = {};
        if (address(i) != nullptr) packets[i] = load_packet(address(i));
      }
    } else {
      wait_for_packets(packets, epoch_, address);
    }
    auto* const to = reinterpret_cast<uint16_t*>(inner());
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int packet = thread_ + i * kThreads, block = packet / L::kActivationPackets,
                first = packet % L::kActivationPackets * kPacketValues;
      if (packet >= kCount) continue;
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        const int at = first + j, routed = at - L::kSharedRows;
        if (at >= L::kActivations) continue;
        const int column = routed < 0 ? block * L::kSharedRows + at
                                      : L::kSharedInter + routed / L::kInterRows * L::kInter +
                                            block * L::kInterRows + routed % L::kInterRows;
        const uint64_t word = j < 4 ? packets[i].low : packets[i].high;
        to[column] = static_cast<uint16_t>(word >> (j % 4 * 16));
      }
    }
    sync_consumers();
  }

  // bf16 becomes f16 times a power of two for each 128 columns, in place.
  __device__ void scale_activations() const {
#pragma unroll 1
    for (int block = warp_; block < L::kMostScales; block += kWarps) {
      auto* const at = reinterpret_cast<uint2*>(inner()) + block * kWarp + lane_;
      const uint2 x = *at;
      const float v[4] = {low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)};
      float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      const F16Scale scale = f16_scale(largest);
      *at = make_uint2(pack_f16(v[0] * scale.inverse, v[1] * scale.inverse),
                       pack_f16(v[2] * scale.inverse, v[3] * scale.inverse));
      if (lane_ == 0) shared_.x_scales[block] = scale.scale;
    }
    sync_consumers();
  }

  // kRows rows of kColumns for this warp, times the vector from column `first` on and `factor`.
  template <int kColumns, int kRows>
  __device__ void multiply_down(const uint8_t* slot, int first, float factor, float* to) const {
    constexpr int kRowBytes = kColumns * L::kWeightSize;
    constexpr int kCount = (kColumns + kStepColumns - 1) / kStepColumns;
    const uint8_t* const weights = slot + half_ * kRows * kRowBytes + lane_ * 16;
    const uint8_t* const x = inner() + (first + lane_ * kLaneColumns) * 2;
    Pair sums[kRows / 2] = {};
    const auto* scales = reinterpret_cast<const float*>(slot + L::kWeightBytes) + lane_ / 8;
    if constexpr (!L::kHasBf16Weights) {
      scales += block_ * L::kHiddenRows / kScaleRow * (kColumns / kScaleRow) % 4;
    }
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      // Lanes beyond the last column, whole rows of the multiplication, have other rows' bytes.
      static_assert(kColumns % (4 * kLaneColumns) == 0);
      const bool is_column = step * kStepColumns + lane_ * kLaneColumns < kColumns;
      float scale = 1;
      if constexpr (!L::kHasBf16Weights) {
        if (is_column) {
          scale = scales[step * 4] * shared_.x_scales[first / kScaleRow + step * 4 + lane_ / 8];
        }
      }
#pragma unroll
      for (int pair = 0; pair < kRows / 2; ++pair) {
        const Pair more = multiply<kRowBytes>(weights + pair * 2 * kRowBytes + step * kStepBytes,
                                              x + step * kStepColumns * 2);
        if (is_column) {
          sums[pair].first = fmaf(more.first, scale, sums[pair].first);
          sums[pair].second = fmaf(more.second, scale, sums[pair].second);
        }
      }
    }
    const bool diagonal = is_on_diagonal(lane_);
#pragma unroll
    for (int pair = 0; pair < kRows / 2; ++pair) {
      const float one = warp_sum(diagonal ? sums[pair].first : 0) * factor,
                  other = warp_sum(diagonal ? sums[pair].second : 0) * factor;
      if (lane_ != 0) continue;
      to[half_ * kRows + pair * 2] = one;
      to[half_ * kRows + pair * 2 + 1] = other;
    }
  }
};

}  // namespace fathom::cuda::decode_layers_kernel
