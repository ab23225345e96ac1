// decode_layers() for DeepSeek-V2-Lite: 16 heads without query compression, 64 experts of 1408
// columns, six of them a token, and a shared one of 2816; weights in bf16 or e4m3; one token or
// two. Experts that both tokens choose are read once.
//
// Steps of a layer, in each of which CTAs read what the others wrote before:
//   query      norm of the residual; the head's rows of W_q, and a share of W_kv_a's
//   absorb     rotary embedding; the head's rows of W_UK; the new cache row
//   attend     scores and sums over keys of this CTA's split
//   values     combine of the head's splits; the head's rows of W_UV
//   o          rows of W_o
//   router     residual, norm; half a row of the router by a warp of its own, which then chooses
//   experts    in groups, the shared expert and then up to four routed ones each: rows of gate and
//              of up; rows of down, which are added
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
  __device__ static void run_aside(Shared<L>& shared, const DecodeLayersArguments& a, int row) {
    V2LiteRouter<Row, L>(shared, a, row).run();
  }

  __device__ void half_layer(int l, bool is_attention) {
    if (!is_attention && thread_ == 0) barrier_arrive(&shared_.input_known);
    int down_group = 0;
    // One loop for both halves: instructions leave the cache between layers.
#pragma unroll 1
    for (int group = 0; group < (is_attention ? 1 : kGroups); ++group) {
      if constexpr (kRows > 1) {
        if (group > 0) barrier_wait(&shared_.chosen, l & 1);
      }
      const int place = first_place(group), first_chunk = chunk_of_place(place);
      products((is_attention ? L::kQueryChunks + 1 : chunks_of(group)) * kTwos, place, nullptr,
               [&](int i) { return first_row(is_attention, first_chunk + i); });
      if (is_attention) {
        put_rows<kQueryRows>(exchange_.query[share()], [&](int i) { return both_halves(i); });
        put_key_rows();
        break;
      }
      put_activations(group);
      // The shared expert's rows of down while the choice is made; the others' at the end, while
      // the last group's activations are exchanged.
      const int until = group + 1 < kGroups ? 1 : kGroups;
#pragma unroll 1
      for (; down_group < until; ++down_group) down(l, down_group);
    }
    if (is_attention) {
      absorb();
      if (part_ == key_part(position())) make_cache_row(a_.pages + l * a_.layer_bytes);
      attend(l);
      values();
      o();
    } else {
      sync_consumers();
    }
  }

  __device__ void wait_for_new_key(int r, int l) const {
    barrier_wait(&shared_.row_known[r], l & 1);
  }

  __device__ float hidden_row(int i, bool is_attention) const {
    if (is_attention) return both_halves(i);
    const float* const sums = this->sums();
    float sum = sums[i / L::kSharedDownRows * L::kDownRows + i % L::kSharedDownRows];
#pragma unroll
    for (int place = 1; place <= L::kChosen; ++place) {
      sum +=
          sums[(down_chunk_of_place(place) + i / L::kDownRows) * L::kDownRows + i % L::kDownRows];
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
  using Base::kRows;
  using Base::kTokenThreads;
  using Base::kTokenWarps;
  using Base::kVectorBytes;
  using Base::lane_;
  using Base::new_key;
  using Base::pair_;
  using Base::part_;
  using Base::position;
  using Base::put_rows;
  using Base::receive_values;
  using Base::release_chunk;
  using Base::row;
  using Base::share;
  using Base::shared_;
  using Base::sums;
  using Base::thread_;
  using Base::token_thread;
  using Base::token_warp;
  using Base::values;
  using Base::wait_for_chunk;
  using Base::write_cache_row;
  using Base::x_scales;

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

  __device__ float both_halves(int i) const { return sums()[i * 2] + sums()[i * 2 + 1]; }

  // The first row, in its matrix, of a chunk of this step with rows of kHidden columns. Up to a
  // multiple of 128 rows.
  __device__ int first_row(bool is_attention, int i) const {
    if (!is_attention) return gate_up_chunk<L>(i, block_).first;
    return i < L::kQueryChunks ? block_ * kQueryRows + i * L::kChunkRows : first_kv_row(block_);
  }

  static constexpr int kTwos = L::kChunkRows / 2;  // pairs of rows of a chunk

  // `twos` pairs of rows of kHidden columns, in whole chunks but for one two less, times each
  // token's vector; a pair of warps takes two rows, half their columns a warp. place: the first
  // chunk's of experts; 0 otherwise. first_row_of(i): as first_row().
  template <typename FirstRow>
  __device__ void products(int twos, int place, const float* x_scales,
                           const FirstRow& first_row_of) {
    constexpr int kRowBytes = L::kHidden * L::kWeightSize;
    static_assert(kTwos == 3 && kWarps == 16);
#pragma unroll 1
    for (int i = pair_; i < twos; i += kPairs) {
      const int chunk = i / kTwos, two = i % kTwos;
      const uint8_t* const slot = wait_for_chunk(chunk);
      const uint8_t* const weights =
          slot + two * 2 * kRowBytes + half_ * (kRowBytes / 2) + lane_ * 16;
      const float* scales[2] = {};
      if constexpr (!L::kHasBf16Weights) {
        const auto* const all = reinterpret_cast<const float*>(slot + L::kWeightBytes);
        // Rows of the chunk from here on have the second row of scales.
        const int next = kScaleRow - first_row_of(chunk) % kScaleRow;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          scales[j] = all + (two * 2 + j >= next ? L::kHidden / kScaleRow : 0);
        }
      }
      float* to[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) to[r] = sums_of_chunk(r, place, chunk);
      if (kRows == 1 || (to[0] != nullptr && to[kRows - 1] != nullptr)) {
        multiply_two<kRows>(weights, scales, shared_.vector, x_scales, two, to);
      } else if constexpr (kRows > 1) {
        const bool is_second = to[0] == nullptr;
        float* const only[1] = {is_second ? to[1] : to[0]};
        multiply_two<1>(weights, scales, shared_.vector + (is_second ? kVectorBytes : 0), x_scales,
                        two, only);
      }
      // A chunk's six or four warps arrive for all 16.
      if (lane_ == 0) release_chunk(chunk, (chunk + 1) * kTwos > twos ? 4 : two < 2 ? 3 : 2);
    }
    chunks_ += (twos + 1) / kTwos;
    sync_consumers();
  }

  // The warp's half of two rows times the vectors of kTokens tokens, from `vectors` on. scales: the
  // rows'; to: the place of the chunk's sums for each token.
  template <int kTokens>
  __device__ void multiply_two(const uint8_t* weights, const float* const (&scales)[2],
                               const uint8_t* vectors, const float* x_scales, int two,
                               float* const (&to)[kTokens]) const {
    constexpr int kColumns = L::kHidden / 2, kRowBytes = L::kHidden * L::kWeightSize;
    const uint8_t* const x = vectors + (half_ * kColumns + lane_ * kLaneColumns) * 2;
    const int first_block = half_ * (kColumns / kScaleRow) + lane_ / 8;
    Pair sums[kTokens] = {};
    constexpr int kUnroll = kColumns / kStepColumns / kTokens;
#pragma unroll kUnroll
    for (int step = 0; step < kColumns / kStepColumns; ++step) {
#pragma unroll
      for (int r = 0; r < kTokens; ++r) {
        const Pair more = multiply<kRowBytes>(weights + step * kStepBytes,
                                              x + r * kVectorBytes + step * kStepColumns * 2);
        if constexpr (L::kHasBf16Weights) {
          sums[r].first += more.first;
          sums[r].second += more.second;
        } else {
          const int block = first_block + step * 4;
          const float x_scale = x_scales == nullptr ? 1 : x_scales[r * L::kMostScales + block];
          sums[r].first = fmaf(more.first, scales[0][block] * x_scale, sums[r].first);
          sums[r].second = fmaf(more.second, scales[1][block] * x_scale, sums[r].second);
        }
      }
    }
#pragma unroll
    for (Pair& pair : sums) {
      if (!is_on_diagonal(lane_)) pair = {0, 0};
    }
    const float sum = sum_pairs(sums, lane_);
    if (lane_ % (16 / kTokens) == 0) {
      const bool is_second = kTokens > 1 && lane_ % 16 != 0;
      (is_second ? to[kTokens - 1] : to[0])[two * 4 + lane_ / 16 * 2 + half_] = sum;
    }
  }

  // Where the sums of a step's chunk of rows go for token r, halves of its rows in turn; null: the
  // chunk's expert is not the token's. place: of the first chunk's expert.
  __device__ float* sums_of_chunk(int r, int place, int chunk) const {
    if constexpr (kRows > 1) {
      if (place > 0) {
        place = place_of_unit(shared_, r, place + chunk / kUnitChunks);
        if (place < 0) return nullptr;
        chunk %= kUnitChunks;
      }
    }
    return shared_.sums + r * L::kSums + (chunk_of_place(place) + chunk) * 2 * L::kChunkRows;
  }

  // ---- attention

  // The CTA's rows of kv_a, from the chunk after the query's.
  __device__ void put_key_rows() const {
    if (token_warp() != kTokenWarps - 1) return;
    const int rows = first_kv_row(block_ + 1) - first_kv_row(block_);
    // Rows that nobody waits for come in time unless they are late.
    if (FATHOM_PLANTED(a_, kSkippedKeyHandoff) && block_ == 1) __nanosleep(50000);
    put_bf16<kPacketValues>(exchange_.input[share()], 1, epoch_,
                            lane_ < rows ? both_halves(kQueryRows + lane_) : 0);
  }

  // The token's cache row, from all CTAs' rows of kv_a, by its last four warps. The others begin
  // with the older keys.
  __device__ void make_cache_row(std::byte* pages) const {
    const int from = token_thread() - (kTokenThreads - kBlocks);
    if (from < 0) return;
    const Packet* const source = exchange_.input[row() * kBlocks + from];
    Packet packet[1];
    if (FATHOM_PLANTED(a_, kSkippedKeyHandoff)) {
      packet[0] = load_packet(source);
    } else {
      wait_for_packets(packet, epoch_, [&](int) { return source; });
    }
    float values[kPacketValues];
    unpack_bf16(packet[0], values);
    const int first = first_kv_row(from), rows = first_kv_row(from + 1) - first;
#pragma unroll
    for (int j = 0; j < kPacketValues; ++j) {
      if (j < rows) new_key()[first + j] = values[j];
    }
    named_barrier(kSomeConsumers + row(), kBlocks);
    if (token_warp() == kTokenWarps - 1) write_cache_row(pages, &shared_.row_known[row()]);
  }

  __device__ void o() {
    receive_values();
    static_assert(kHeads * kV == L::kHidden);
    static_assert(L::kHiddenRows / 2 + 1 == L::kOChunks * kTwos);
    products(L::kHiddenRows / 2, 0, L::kHasBf16Weights ? nullptr : shared_.x_scales,
             [&](int i) { return block_ * L::kHiddenRows + i * L::kChunkRows; });
  }

  // ---- experts

  // Place 0 of a token is the shared expert, places 1 to kChosen are its routed ones in the order
  // of their choice. Chunks of gate and up, chunks of down, packets and columns of activations lie
  // in the order of places: these functions give a place's first one. A packet has the activations
  // of a chunk of gate.
  static constexpr int kUnitChunks = 2 * L::kGateChunks;  // of gate and up of a routed expert
  __device__ static int before(int place, int of_shared, int of_routed) {
    return place == 0 ? 0 : of_shared + (place - 1) * of_routed;
  }
  __device__ static int chunk_of_place(int place) {
    return before(place, 2 * L::kSharedGateChunks, kUnitChunks);
  }
  __device__ static int down_chunk_of_place(int place) {
    return before(place, L::kSharedDownChunks, L::kDownChunks);
  }
  __device__ static int packet_of_place(int place) {
    return before(place, L::kSharedGateChunks, L::kGateChunks);
  }
  __device__ static int column_of_place(int place) {
    return before(place, L::kSharedInter, L::kInter);
  }

  // Groups of places whose activations are exchanged together: the shared expert; then, of one
  // token, up to four routed ones each, so that one group's exchange overlaps with the other's
  // products; of two tokens all routed ones, whose weights fill the ring meanwhile. One token's
  // places are the units.
  static constexpr int kGroups = kRows == 1 ? 3 : 2, kGroupPlaces = kRows == 1 ? 4 : L::kChosen;
  __device__ static int first_place(int group) {
    return group == 0 ? 0 : 1 + (group - 1) * kGroupPlaces;
  }
  __device__ static int places_of(int group) {
    return group == 0 ? 1 : min(kGroupPlaces, 1 + L::kChosen - first_place(group));
  }
  __device__ int units_of(int group) const {
    return kRows == 1 || group == 0 ? places_of(group) : num_units(shared_);
  }
  __device__ int chunks_of(int group) const {
    return group == 0 ? 2 * L::kSharedGateChunks : units_of(group) * kUnitChunks;
  }

  // An expert for each of the token's first warps.
  __device__ void put_activations(int group) const {
    static_assert(kGroupPlaces <= kTokenWarps);
    if (token_warp() >= places_of(group)) return;
    const int place = first_place(group) + token_warp();
    const int chunks = group == 0 ? L::kSharedGateChunks : L::kGateChunks,
              rows = group == 0 ? L::kSharedRows : L::kInterRows;
    const int packet = lane_ / kPacketValues, in_packet = lane_ % kPacketValues,
              i = packet * L::kChunkRows + in_packet;
    float value = 0;
    if (packet < chunks && in_packet < L::kChunkRows && i < rows) {
      const int gate = chunk_of_place(place) * L::kChunkRows + i,
                up = gate + chunks * L::kChunkRows;
      const float x = both_halves(gate);
      value = x / (1 + expf(-x)) * both_halves(up);
    }
    put_bf16<kPacketValues>(exchange_.activation[share()] + packet_of_place(place), chunks, epoch_,
                            value);
  }

  // 16-bit values: a token's activations.
  __device__ uint8_t* inner(int r) const {
    return reinterpret_cast<uint8_t*>(shared_.scratch) + r * L::kInner * 2;
  }

  __device__ void down(int l, int group) {
    receive_activations(group);
    if constexpr (!L::kHasBf16Weights) scale_activations(group);
    if (kRows == 1 && group > 0) barrier_wait(&shared_.chosen, l & 1);
    const int chunks = group == 0 ? L::kSharedDownChunks : units_of(group) * L::kDownChunks;
    // Each warp of a pair has half of a chunk's rows. The shared expert has half as many chunks as
    // there are pairs: the other pairs multiply the same chunks for the second token.
    static_assert(L::kSharedDownChunks * 2 == kPairs && kRows <= 2);
    if (group == 0) {
      if (pair_ < chunks * kRows) {
        const int chunk = pair_ % L::kSharedDownChunks, r = pair_ / L::kSharedDownChunks;
        multiply_down<L::kSharedInter, L::kSharedDownRows / 2>(
            wait_for_chunk(chunk), r, 0, 1, shared_.sums + r * L::kSums + chunk * L::kDownRows);
        if (lane_ == 0) release_chunk(chunk, kWarps / 2 / kRows);
      }
    } else {
#pragma unroll 1
      for (int chunk = pair_; chunk < chunks; chunk += kPairs) {
        const uint8_t* const slot = wait_for_chunk(chunk);
#pragma unroll 1
        for (int r = 0; r < kRows; ++r) {
          const int place = place_of_unit(shared_, r, first_place(group) + chunk / L::kDownChunks);
          if (kRows > 1 && place < 0) continue;
          multiply_down<L::kInter, L::kDownRows / 2>(
              slot, r, column_of_place(place), shared_.weights[r * L::kExperts + place],
              shared_.sums + r * L::kSums +
                  (down_chunk_of_place(place) + chunk % L::kDownChunks) * L::kDownRows);
        }
        if (lane_ == 0) release_chunk(chunk, kWarps / 2);
      }
    }
    chunks_ += chunks;
  }

  // A group's packets of all CTAs: a token's threads have kParts of each CTA at a time.
  __device__ void receive_activations(int group) const {
    constexpr int kParts = kTokenThreads / kBlocks, kTimes = kGroupPlaces * L::kGateChunks / kParts;
    static_assert(kTimes * kParts >= L::kSharedGateChunks && kParts % L::kGateChunks == 0);
    const int cta = token_thread() / kParts, part = token_thread() % kParts;
    const int packets_of_group =
        places_of(group) * (group == 0 ? L::kSharedGateChunks : L::kGateChunks);
    const Packet* const from =
        exchange_.activation[row() * kBlocks + cta] + packet_of_place(first_place(group)) + part;
    const auto address = [&](int i) {
      return i * kParts < packets_of_group ? from + i * kParts : nullptr;
    };
    Packet packets[kTimes] = {};
    if (FATHOM_PLANTED(a_, kSkippedActivations)) {
      for (int i = 0; i * kParts < packets_of_group; ++i) packets[i] = load_packet(address(i));
    } else {
      wait_for_packets(packets, epoch_, address);
    }
    const int rows = group == 0 ? L::kSharedRows : L::kInterRows;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      if (i * kParts >= packets_of_group) break;
      // The packet's first row of the CTA's rows of its expert.
      const int packet = i * kParts + part,
                first = (group == 0 ? packet : packet % L::kGateChunks) * L::kChunkRows,
                column = group == 0
                             ? 0
                             : L::kSharedInter +
                                   (first_place(group) - 1 + packet / L::kGateChunks) * L::kInter;
      auto* const to = reinterpret_cast<uint16_t*>(inner(row())) + column + cta * rows + first;
#pragma unroll
      for (int j = 0; j < L::kChunkRows; ++j) {
        const uint64_t word = j < 4 ? packets[i].low : packets[i].high;
        if (first + j < rows) to[j] = static_cast<uint16_t>(word >> (j % 4 * 16));
      }
    }
    sync_consumers();
  }

  // bf16 becomes f16 times a power of two for each 128 columns, in place.
  __device__ void scale_activations(int group) const {
    const int first = column_of_place(first_place(group)) / kScaleRow,
              count = places_of(group) * (group == 0 ? L::kSharedInter : L::kInter) / kScaleRow;
#pragma unroll 1
    for (int block = first + token_warp(); block < first + count; block += kTokenWarps) {
      auto* const at = reinterpret_cast<uint2*>(inner(row())) + block * kWarp + lane_;
      const uint2 x = *at;
      const float v[4] = {low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)};
      float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      const F16Scale scale = f16_scale(largest);
      *at = make_uint2(pack_f16(v[0] * scale.inverse, v[1] * scale.inverse),
                       pack_f16(v[2] * scale.inverse, v[3] * scale.inverse));
      if (lane_ == 0) x_scales()[block] = scale.scale;
    }
    sync_consumers();
  }

  // kWarpRows rows of kColumns for this warp, times token r's activations from column `first` on
  // and `factor`.
  template <int kColumns, int kWarpRows>
  __device__ void multiply_down(const uint8_t* slot, int r, int first, float factor,
                                float* to) const {
    constexpr int kRowBytes = kColumns * L::kWeightSize;
    constexpr int kCount = (kColumns + kStepColumns - 1) / kStepColumns;
    const uint8_t* const weights = slot + half_ * kWarpRows * kRowBytes + lane_ * 16;
    const uint8_t* const x = inner(r) + (first + lane_ * kLaneColumns) * 2;
    Pair sums[kWarpRows / 2] = {};
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
      const uint8_t* const at = is_column ? x + step * kStepColumns * 2 : inner(r);
      float scale = 1;
      if constexpr (!L::kHasBf16Weights) {
        if (is_column) {
          scale = scales[step * 4] *
                  shared_.x_scales[r * L::kMostScales + first / kScaleRow + step * 4 + lane_ / 8];
        }
      }
#pragma unroll
      for (int pair = 0; pair < kWarpRows / 2; ++pair) {
        const Pair more =
            multiply<kRowBytes>(weights + pair * 2 * kRowBytes + step * kStepBytes, at);
        if (is_column) {
          sums[pair].first = fmaf(more.first, scale, sums[pair].first);
          sums[pair].second = fmaf(more.second, scale, sums[pair].second);
        }
      }
    }
#pragma unroll
    for (Pair& pair : sums) {
      if (!is_on_diagonal(lane_)) pair = {0, 0};
    }
    const float sum = sum_pairs(sums, lane_) * factor;
    constexpr int kLanes = 32 / kWarpRows;  // that have the same sum
    if (lane_ % kLanes == 0) {
      to[half_ * kWarpRows + lane_ % 16 / kLanes * 2 + lane_ / 16] = sum;
    }
  }
};

// What launch_layers() takes.
template <bool kBf16, int kTokens>
struct V2LiteParts {
  using Layout = V2LiteLayout<kBf16, kTokens>;
  template <typename Row>
  using FeederOf = V2LiteFeeder<Row, Layout>;
  template <typename Row>
  using LayersOf = V2LiteLayers<Row, Layout>;
};

template <bool kBf16>
void launch_v2_lite(const DecodeLayersArguments& arguments, GpuStream stream) {
  using One = V2LiteParts<kBf16, 1>;
  using Two = V2LiteParts<kBf16, 2>;
  if (arguments.rows == 1) {
    launch_layers<typename One::Layout, One::template FeederOf, One::template LayersOf>(arguments,
                                                                                        stream);
    return;
  }
  // Memory of two tokens lies behind that of one.
  DecodeLayersArguments of_two = arguments;
  of_two.exchange =
      static_cast<std::byte*>(arguments.exchange) + sizeof(typename One::Layout::Exchanged);
  launch_layers<typename Two::Layout, Two::template FeederOf, Two::template LayersOf>(of_two,
                                                                                      stream);
}

}  // namespace fathom::cuda::decode_layers_kernel
