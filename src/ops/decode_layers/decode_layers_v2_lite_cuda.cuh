// decode_layers() for DeepSeek-V2-Lite: 16 heads without query compression, 64 experts of 1408
// columns, six of them a token, and a shared one of 2816; weights in bf16 or e4m3.
//
// Steps of a layer, in each of which CTAs read what the others wrote before:
//   query      norm of the residual; the head's rows of W_q, and a share of W_kv_a's
//   absorb     rotary embedding; the head's rows of W_UK; the new cache row
//   attend     scores and sums over keys of this CTA's split
//   values     combine of the head's splits; the head's rows of W_UV
//   o          rows of W_o
//   router     residual, norm; half a row of the router by a warp of its own, which then chooses
//   experts    in three groups, the shared expert, four routed ones and two: rows of gate and of
//   up;
//              rows of down, which are added
#pragma once

#include "ops/decode_layers/decode_layers_launch_cuda.cuh"
#include "ops/decode_layers/decode_layers_steps_cuda.cuh"
#include "ops/decode_layers/decode_layers_v2_lite_router_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// The consumer warps.
template <typename Row, typename L>
class V2LiteLayers : public Steps<Row, L, V2LiteLayers<Row, L>> {
 public:
  using Base = Steps<Row, L, V2LiteLayers<Row, L>>;
  using Base::Base;
  static constexpr bool kMeetsRanks = false;

  // Beside the consumers.
  __device__ static void run_aside(Shared<L>& shared, const DecodeLayersArguments& a) {
    V2LiteRouter<Row, L>(shared, a).run();
  }

  __device__ void half_layer(int l, bool is_attention) {
    if (!is_attention && thread_ == 0) barrier_arrive(&shared_.input_known);
    int down_group = 0;
    // One loop for both halves: instructions leave the cache between layers.
#pragma unroll 1
    for (int group = 0; group < (is_attention ? 1 : kGroups); ++group) {
      const int first = first_unit(group), units = first_unit(group + 1) - first;
      products((is_attention ? L::kQueryChunks + 1 : units * kUnitChunks) * kTwos,
               first * kUnitChunks * L::kChunkRows, nullptr,
               [&](int i) { return first_row(is_attention, first * kUnitChunks + i); });
      if (is_attention) {
        put_rows<kQueryRows>(exchange_.query[block_], [&](int row) { return both_halves(row); });
        put_key_rows();
        break;
      }
      put_activations(first * L::kGateChunks, units * L::kGateChunks);
      // The shared expert's rows of down while the choice is made; the others' in two groups at the
      // end, the second group's activations on their way meanwhile.
      const int until = group == 0 ? 1 : group == 1 ? 1 : kGroups;
#pragma unroll 1
      for (; down_group < until; ++down_group) down(l, down_group);
    }
    if (is_attention) {
      absorb();
      if (part_ == newest_key_part(cached())) make_cache_row(a_.pages + l * a_.layer_bytes);
      attend(l);
      values();
      o();
    } else {
      sync_consumers();
    }
  }

  __device__ void wait_for_new_key(int l) const { barrier_wait(&shared_.row_known, l & 1); }

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
  using Base::cached;
  using Base::chunks_;
  using Base::epoch_;
  using Base::exchange_;
  using Base::half_;
  using Base::lane_;
  using Base::pair_;
  using Base::part_;
  using Base::put_rows;
  using Base::receive_values;
  using Base::release_chunk;
  using Base::shared_;
  using Base::thread_;
  using Base::values;
  using Base::wait_for_chunk;
  using Base::warp_;
  using Base::write_cache_row;
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

  static constexpr int kTwos = L::kChunkRows / 2;  // pairs of rows of a chunk

  // `twos` pairs of rows of kHidden columns, in whole chunks but for one two less; a pair of warps
  // takes two rows, half their columns a warp. Sums from row `first` of sums on. first_row_of(i):
  // as first_row().
  template <typename FirstRow>
  __device__ void products(int twos, int first, const float* x_scales,
                           const FirstRow& first_row_of) {
    constexpr int kColumns = L::kHidden / 2, kRowBytes = L::kHidden * L::kWeightSize;
    static_assert(kTwos == 3 && kWarps == 16);
#pragma unroll 1
    for (int i = pair_; i < twos; i += kPairs) {
      const int chunk = i / kTwos, two = i % kTwos;
      const uint8_t* const slot = wait_for_chunk(chunk);
      const uint8_t* const weights =
          slot + two * 2 * kRowBytes + half_ * (kRowBytes / 2) + lane_ * 16;
      const uint8_t* const x = shared_.vector + (half_ * kColumns + lane_ * kLaneColumns) * 2;
      Pair sums = {0, 0};
      if constexpr (L::kHasBf16Weights) {
#pragma unroll
        for (int step = 0; step < kColumns / kStepColumns; ++step) {
          const Pair more =
              multiply<kRowBytes>(weights + step * kStepBytes, x + step * kStepColumns * 2);
          sums.first += more.first;
          sums.second += more.second;
        }
      } else {
        const auto* const scales = reinterpret_cast<const float*>(slot + L::kWeightBytes) +
                                   half_ * (kColumns / kScaleRow) + lane_ / 8;
        // Rows of the chunk from here on have the second row of scales.
        const int next = kScaleRow - first_row_of(chunk) % kScaleRow;
        const float* const row_scales[2] = {
            scales + (two * 2 >= next ? L::kHidden / kScaleRow : 0),
            scales + (two * 2 + 1 >= next ? L::kHidden / kScaleRow : 0)};
#pragma unroll
        for (int step = 0; step < kColumns / kStepColumns; ++step) {
          const float x_scale =
              x_scales == nullptr ? 1
                                  : x_scales[(half_ * kColumns / kScaleRow) + step * 4 + lane_ / 8];
          const Pair more =
              multiply<kRowBytes>(weights + step * kStepBytes, x + step * kStepColumns * 2);
          sums.first = fmaf(more.first, row_scales[0][step * 4] * x_scale, sums.first);
          sums.second = fmaf(more.second, row_scales[1][step * 4] * x_scale, sums.second);
        }
      }
      if (!is_on_diagonal(lane_)) sums = {0, 0};
      sums = {warp_sum(sums.first), warp_sum(sums.second)};
      if (lane_ == 0) {
        float* const to = shared_.sums + (first + i * 2) * 2 + half_;
        to[0] = sums.first;
        to[2] = sums.second;
        // A chunk's six or four warps arrive for all 16.
        release_chunk(chunk, (chunk + 1) * kTwos > twos ? 4 : two < 2 ? 3 : 2);
      }
    }
    chunks_ += (twos + 1) / kTwos;
    sync_consumers();
  }

  // ---- attention

  // The CTA's rows of kv_a, from the chunk after the query's.
  __device__ void put_key_rows() const {
    if (warp_ != kWarps - 1) return;
    const int rows = first_kv_row(block_ + 1) - first_kv_row(block_);
    // Rows that nobody waits for come in time unless they are late.
    if (FATHOM_PLANTED(a_, kSkippedKeyHandoff) && block_ == 1) __nanosleep(50000);
    put_bf16<kPacketValues>(exchange_.input[block_], 1, epoch_,
                            lane_ < rows ? both_halves(kQueryRows + lane_) : 0);
  }

  // The new cache row, from all CTAs' rows of kv_a, by the last four warps. The others begin with
  // the older keys.
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
    if (warp_ == kWarps - 1) write_cache_row(pages, &shared_.row_known);
  }

  __device__ void o() {
    receive_values();
    static_assert(kHeads * kV == L::kHidden);
    static_assert(L::kHiddenRows / 2 + 1 == L::kOChunks * kTwos);
    products(L::kHiddenRows / 2, 0, L::kHasBf16Weights ? nullptr : shared_.x_scales,
             [&](int i) { return block_ * L::kHiddenRows + i * L::kChunkRows; });
  }

  // ---- experts

  // Groups: the shared expert, four routed ones, two. Their units, and chunks of gate and up of a
  // unit.
  static constexpr int kGroups = 3, kUnitChunks = 2 * L::kGateChunks;
  __device__ static int first_unit(int group) {
    return group == 0 ? 0 : min(2 + (group - 1) * 4, L::kUnits);
  }

  // ---- activations: packet i has those of the rows of gate's i-th chunk, the shared expert's
  // first

  struct ActivationPacket {
    int expert;  // of the routed ones, < 0: the shared expert
    int first;   // row of the CTA's rows of that expert
    int rows;
  };
  __device__ static ActivationPacket activation_packet(int i) {
    if (i < L::kSharedGateChunks) {
      const int first = i * L::kChunkRows;
      return {-1, first, min(L::kChunkRows, L::kSharedRows - first)};
    }
    i -= L::kSharedGateChunks;
    const int first = i % L::kGateChunks * L::kChunkRows;
    return {i / L::kGateChunks, first, min(L::kChunkRows, L::kInterRows - first)};
  }

  // By the first warps, four packets each.
  __device__ void put_activations(int first, int count) const {
    constexpr int kPackets = kWarp / kPacketValues;
    static_assert(2 * L::kGateChunks == kPackets);
    if (warp_ * kPackets >= count) return;
    first += warp_ * kPackets;
    const int row = lane_ % kPacketValues;
    const ActivationPacket packet = activation_packet(first + lane_ / kPacketValues);
    const bool shared = packet.expert < 0;
    // Gate's first row of the packet among the rows of all chunks, and up's after it.
    const int gate =
        shared ? packet.first
               : (2 * L::kSharedGateChunks + packet.expert * 2 * L::kGateChunks) * L::kChunkRows +
                     packet.first;
    const int up = gate + (shared ? L::kSharedGateChunks : L::kGateChunks) * L::kChunkRows;
    float value = 0;
    if (row < packet.rows && lane_ < kPackets * kPacketValues) {
      const float x = both_halves(gate + row);
      value = x / (1 + expf(-x)) * both_halves(up + row);
    }
    put_bf16<kPacketValues>(exchange_.activation[block_] + first, kPackets, epoch_, value);
  }

  // 16-bit values: the experts' activations.
  __device__ uint8_t* inner() const { return reinterpret_cast<uint8_t*>(shared_.scratch); }

  __device__ void down(int l, int group) {
    const int first = first_unit(group), units = first_unit(group + 1) - first;
    receive_activations(first * L::kGateChunks, units * L::kGateChunks);
    if constexpr (!L::kHasBf16Weights) {
      constexpr int kScales = L::kInter / kScaleRow;  // of a unit
      scale_activations(first * kScales, units * kScales);
    }
    if (group > 0) barrier_wait(&shared_.chosen, l & 1);
    const int count = units * L::kDownChunks;
    // Each warp of a pair has half of a chunk's rows.
    if (pair_ < count) {
      const uint8_t* const slot = wait_for_chunk(pair_);
      const int chunk = first * L::kDownChunks + pair_;
      float* const to = shared_.sums + chunk * L::kDownRows;
      if (group == 0) {
        multiply_down<L::kSharedInter, L::kSharedDownRows / 2>(slot, 0, 1, to);
      } else {
        const int expert = (chunk - L::kSharedDownChunks) / L::kDownChunks;
        multiply_down<L::kInter, L::kDownRows / 2>(slot, L::kSharedInter + expert * L::kInter,
                                                   shared_.weights[expert], to);
      }
      if (lane_ == 0) release_chunk(pair_, kWarps / 2);
    }
    chunks_ += count;
  }

  // Packets `first` to `first` + count - 1 of all CTAs, four or eight: one of each four a thread.
  __device__ void receive_activations(int first, int count) const {
    static_assert(kThreads == 4 * kBlocks && L::kSharedGateChunks == 4);
    const Packet* const from = &exchange_.activation[thread_ / 4][first + thread_ % 4];
    Packet packets[2] = {};
    const auto address = [&](int i) { return i * 4 < count ? from + i * 4 : nullptr; };
    if (FATHOM_PLANTED(a_, kSkippedActivations)) {
      for (int i = 0; i * 4 < count; ++i) packets[i] = load_packet(address(i));
    } else {
      wait_for_packets(packets, epoch_, address);
    }
    const ActivationPacket packet = activation_packet(first + thread_ % 4);
    const bool shared = packet.expert < 0;
    auto* to = reinterpret_cast<uint16_t*>(inner()) + packet.first +
               thread_ / 4 * (shared ? L::kSharedRows : L::kInterRows) +
               (shared ? 0 : L::kSharedInter + packet.expert * L::kInter);
#pragma unroll
    for (int i = 0; i < 2; ++i, to += 4 / L::kGateChunks * L::kInter) {
      if (i * 4 >= count) break;
#pragma unroll
      for (int j = 0; j < L::kChunkRows; ++j) {
        const uint64_t word = j < 4 ? packets[i].low : packets[i].high;
        if (j < packet.rows) to[j] = static_cast<uint16_t>(word >> (j % 4 * 16));
      }
    }
    sync_consumers();
  }

  // bf16 becomes f16 times a power of two for each 128 columns, in place: `count` blocks from
  // `first` on.
  __device__ void scale_activations(int first, int count) const {
#pragma unroll 1
    for (int block = first + warp_; block < first + count; block += kWarps) {
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
      // Lanes beyond the last column, whole rows of the multiplication, have other rows' bytes and
      // any x.
      static_assert(kColumns % (4 * kLaneColumns) == 0);
      const bool is_column = step * kStepColumns + lane_ * kLaneColumns < kColumns;
      const uint8_t* const at = is_column ? x + step * kStepColumns * 2 : inner();
      float scale = 1;
      if constexpr (!L::kHasBf16Weights) {
        if (is_column) {
          scale = scales[step * 4] * shared_.x_scales[first / kScaleRow + step * 4 + lane_ / 8];
        }
      }
#pragma unroll
      for (int pair = 0; pair < kRows / 2; ++pair) {
        const Pair more =
            multiply<kRowBytes>(weights + pair * 2 * kRowBytes + step * kStepBytes, at);
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
