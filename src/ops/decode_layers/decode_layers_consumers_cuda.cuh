// Consumer warps of decode_layers(): a thread's place, its token, chunks of the ring, vectors in
// shared memory, and the packets between CTAs.
#pragma once

#include "device/cuda/peer_packets.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"
#include "ops/scaled_linear/row_products_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

template <typename L>
class Consumers {
 public:
  __device__ Consumers(Shared<L>& shared, const DecodeLayersArguments& a)
      : shared_(shared),
        a_(a),
        exchange_(*static_cast<typename L::Exchanged*>(a.exchange)),
        thread_(static_cast<int>(threadIdx.x)),
        block_(static_cast<int>(blockIdx.x)) {}

 protected:
  static constexpr int kRows = L::kRows, kTokenWarps = kWarps / kRows,
                       kTokenThreads = kThreads / kRows;
  static_assert(kRows == 1 || kRows == 2 || kRows == 4);

  // ---- tokens

  // This warp's token, and the warp's and the thread's numbers among those of the token.
  __device__ int row() const { return kRows == 1 ? 0 : warp_ / kTokenWarps; }
  // Whether the launch has that token.
  __device__ bool is_token() const { return kRows <= 2 || row() < a_.rows; }
  __device__ int token_warp() const { return kRows == 1 ? warp_ : warp_ & (kTokenWarps - 1); }
  __device__ int token_thread() const {
    return kRows == 1 ? thread_ : thread_ & (kTokenThreads - 1);
  }
  // The CTA's packets of a kind.
  __device__ int share() const { return row() * kBlocks + block_; }
  __device__ float* sums() const { return shared_.sums + row() * L::kSums; }
  __device__ float* residual() const { return shared_.residual + row() * L::kHiddenRows; }
  __device__ uint8_t* vector() const { return shared_.vector + row() * kVectorBytes; }
  __device__ float* x_scales() const { return shared_.x_scales + row() * L::kMostScales; }
  __device__ std::byte* cache_row() const { return shared_.row + row() * kMostRowBytes; }
  __device__ float* new_key() const { return shared_.scratch + kKeyAt + row() * (kLatent + kRope); }
  static constexpr int kVectorBytes = L::kHidden * 2;
  __device__ int position() const {
    if constexpr (kRows == 1) {
      return cached_;
    } else {
      return shared_.of_rows.positions[row()];
    }
  }
  // Tokens of its sequence in the cache.
  __device__ int cached() const {
    if constexpr (kRows == 1) {
      return cached_;
    } else {
      return shared_.of_rows.cached[row()];
    }
  }

  // Values that follow from a thread's place are recomputed where they are used: kept from layer to
  // layer, they exceed the register budget and cost code to spill and reload.
  __device__ void place_thread() {
    asm volatile("" : "+r"(thread_), "+r"(block_));
    warp_ = thread_ / kWarp;
    lane_ = thread_ % kWarp;
    half_ = warp_ % 2;
    pair_ = warp_ / 2;
    head_ = block_ / kHeadBlocks;
    part_ = block_ % kHeadBlocks;
  }

  // ---- chunks: `index` counts from this step's first chunk

  __device__ const uint8_t* slot_of(int index) const {
    return shared_.ring[static_cast<unsigned>(chunks_ + index) % L::kSlots];
  }
  __device__ const uint8_t* wait_for_chunk(int index) const {
    return decode_layers_kernel::wait_for_chunk(shared_, static_cast<unsigned>(chunks_ + index));
  }
  // Called by one thread for `warps` warps.
  __device__ void release_chunk(int index, int warps) const {
    barrier_arrive_for(&shared_.empty[static_cast<unsigned>(chunks_ + index) % L::kSlots], warps);
  }

  // ---- vectors in shared memory

  // Sixteen f16 of the vector, starting at a multiple of 16.
  __device__ Sixteen load_x(int first) const {
    const auto* const from = reinterpret_cast<const uint4*>(vector() + first * 2);
    return {from[0], from[1]};
  }

  // A value in the type that the weights multiply with.
  __device__ static void write_value(uint8_t* vector, int at, float x) {
    if constexpr (L::kHasBf16Weights) {
      reinterpret_cast<__nv_bfloat16*>(vector)[at] = __float2bfloat16_rn(x);
    } else {
      reinterpret_cast<__half*>(vector)[at] = __float2half_rn(x);
    }
  }

  // Neighbouring values; four, if their place is a multiple of four.
  template <int kCount>
  __device__ static void write_values(uint8_t* vector, int at, const float (&x)[kCount]) {
    if constexpr (kCount == 4) {
      const auto pair = [&](int i) {
        return L::kHasBf16Weights ? pack_bf16(x[i], x[i + 1]) : pack_f16(x[i], x[i + 1]);
      };
      reinterpret_cast<uint2*>(vector)[at / 4] = make_uint2(pair(0), pair(2));
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) write_value(vector, at + j, x[j]);
    }
  }

  // Four values a lane, 128 a warp, with a scale of their own: those of block `block` of 128.
  __device__ void write_scaled_block(int block, const float (&x)[4]) const {
    float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
    const F16Scale scale = f16_scale(largest);
    reinterpret_cast<uint2*>(vector())[block * kWarp + lane_] =
        make_uint2(pack_f16(x[0] * scale.inverse, x[1] * scale.inverse),
                   pack_f16(x[2] * scale.inverse, x[3] * scale.inverse));
    if (lane_ == 0) x_scales()[block] = scale.scale;
  }

  // Writes so many blocks of 128 bf16 values of scratch to the vector, each with its own scale;
  // each token's after those of the one before.
  template <int kScaledBlocks>
  __device__ void write_scaled() const {
    const auto* const from =
        reinterpret_cast<const uint2*>(shared_.scratch) + row() * kScaledBlocks * kWarp;
#pragma unroll 1
    for (int block = token_warp(); block < kScaledBlocks; block += kTokenWarps) {
      const uint2 x = from[block * kWarp + lane_];
      write_scaled_block(block, {low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)});
    }
    sync_consumers();
  }

  // ---- packets

  // Publishes value(i) for each of this CTA's kCount rows; the first of the token's warps write.
  template <int kCount, typename Value>
  __device__ void put_rows(Packet* to, const Value& value) const {
    constexpr int kValues = packet_values(kCount), kPackets = kWarp / kValues;  // of a warp
    static_assert(kCount <= kTokenWarps * kPackets * kValues);
    const int warp = token_warp(), first = warp * kPackets * kValues;
    if (first >= kCount) return;
    put_bf16<kValues>(to + warp * kPackets, min(kPackets, (kCount - first) / kValues), epoch_,
                      lane_ < min(kPackets * kValues, kCount - first) ? value(first + lane_) : 0);
  }

  // put_rows() for rows that are this rank's part of a sum over ranks. The CTA meets the same CTA
  // of the other ranks, in peer_sum()'s packets of the token's row (peer_packets.cuh), adds the
  // parts to the residual in the order of ranks, and publishes that to its own rank's CTAs. A lane
  // has one packet of one rank.
  template <int kCount, typename Value>
  __device__ void put_sums(Packet* to, uint32_t exchange, const Value& value) const {
    constexpr int kPackets = kWarp / kMostPeers, kValues = kPackets * kPacketValues;  // of a warp
    static_assert(kCount % kValues == 0 && kCount <= kTokenWarps * kValues);
    const PeerRank& peers = a_.peers;
    const int warp = token_warp(), first = warp * kValues;
    const int place = lane_ % kPackets, peer = lane_ / kPackets;
    if (first >= kCount) return;
    const float own_value = lane_ < kValues ? value(first + lane_) : 0;
    float values[kPacketValues + 1] = {};
#pragma unroll
    for (int i = 0; i < kPacketValues; ++i) {
      values[i] = __shfl_sync(~0u, own_value, place * kPacketValues + i);
    }
    const Packet own = packet_of(values, exchange);
    const int at = block_ * (kCount / kPacketValues) + warp * kPackets + place;
    const Packet* from = nullptr;
    if (peer < peers.ranks && peer != peers.rank && is_token()) {
      store_packet_of_peer(packets_of(peers, peer, peers.rank, row(), exchange) + at, own);
      from = packets_of(peers, peers.rank, peer, row(), exchange) + at;
    }
    float parts[kPacketValues];
    unpack_bf16(wait_for_peer(peers, exchange, from, peer, own), parts);
    const int ranks = peers.ranks - (FATHOM_PLANTED(a_, kDroppedPeer) ? 1 : 0);
#pragma unroll
    for (int i = 0; i < kPacketValues; ++i) values[i] = 0;
#pragma unroll 1
    for (int r = 0; r < ranks; ++r) {
#pragma unroll
      for (int i = 0; i < kPacketValues; ++i) {
        values[i] += __shfl_sync(~0u, parts[i], r * kPackets + place);
      }
    }
    if (lane_ >= kPackets) return;
    float* const residual = this->residual() + first + place * kPacketValues;
#pragma unroll
    for (int i = 0; i < kPacketValues; ++i) values[i] = residual[i] += values[i];
    const Packet sums = packet_of(values, epoch_);
    store_packet(to + warp * kPackets + place, sums.low, sums.high);
  }

  // Receives kCount values from each of kCtas CTAs, of all tokens: from(r)'s and the following
  // packets are token r's. Calls put(r, c, i, value) for value i of CTA c. No barrier.
  template <int kCount, int kCtas, typename From, typename Put>
  __device__ void receive(const From& from, const Put& put) const {
    constexpr int kValues = packet_values(kCount), kEach = packets(kCount), kOfRow = kCtas * kEach,
                  kAll = kRows * kOfRow, kTimes = (kAll + kThreads - 1) / kThreads;
    if (kTimes == 1 && thread_ >= kAll) return;
    const auto number = [&](int i) { return thread_ + i * kThreads; };
    const auto row_of = [&](int p) { return kRows == 1 ? 0 : p / kOfRow; };
    const auto place_of = [&](int p) { return kRows == 1 ? p : p % kOfRow; };
    Packet all[kTimes];
    wait_for_packets(all, epoch_, [&](int i) -> const Packet* {
      const int p = number(i);
      return kTimes > 1 && p >= kAll ? nullptr : from(row_of(p)) + place_of(p);
    });
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int p = number(i);
      if (kTimes > 1 && p >= kAll) continue;
      float values[kValues];
      unpack_bf16(all[i], values);
      const int cta = place_of(p) / kEach, first = place_of(p) % kEach * kValues;
#pragma unroll
      for (int j = 0; j < kValues; ++j) put(row_of(p), cta, first + j, values[j]);
    }
  }

  Shared<L>& shared_;
  const DecodeLayersArguments& a_;
  typename L::Exchanged& exchange_;
  int thread_, block_;
  int warp_ = 0, lane_ = 0, half_ = 0, pair_ = 0, head_ = 0, part_ = 0;
  int cached_ = 0;  // of one token: its position
  const DecodeLayer* layer_ = nullptr;
  uint32_t epoch_ = 0;
  int chunks_ = 0;  // chunks of the launch before this step's first
};

}  // namespace fathom::cuda::decode_layers_kernel
