// Consumer warps of decode_layers(): what the layers of every shape have in common, which is
// attention, the residual and its norms, and the packets between CTAs.
#pragma once

#include "base/math_constants.h"
#include "ops/decode_layers/decode_layers_keys_cuda.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"
#include "ops/gate/gate_choice_cuda.cuh"
#include "ops/rope/query_key_row_cuda.cuh"
#include "ops/scaled_linear/row_products_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// multiply_step() for bf16: 512 bytes of each half, eight values of a lane.
template <int kHalfBytes>
__device__ inline Pair multiply_step_bf16(const uint8_t* weights, const uint4& x, int lane) {
  const uint4 w[2] = {*reinterpret_cast<const uint4*>(weights),
                      *reinterpret_cast<const uint4*>(weights + kHalfBytes)};
  float d[2][4] = {};
  warp_mma_16x8x16(d[0], {w[0].x, w[1].x, w[0].y, w[1].y}, {x.x, x.y});
  warp_mma_16x8x16(d[1], {w[0].z, w[1].z, w[0].w, w[1].w}, {x.z, x.w});
  const bool odd = (lane & 4) != 0;
  return {odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0], odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2]};
}

// A shape's class, Derived, has
//   half_layer(l, is_attention)    from the normed vector to the rows of o or of down
//   hidden_row(row, is_attention)  the sum of such a row
template <typename Row, typename L, typename Derived>
class Steps {
 public:
  __device__ Steps(Shared<L>& shared, const DecodeLayersArguments& a)
      : shared_(shared),
        a_(a),
        exchange_(*static_cast<typename L::Exchanged*>(a.exchange)),
        thread_(static_cast<int>(threadIdx.x)),
        block_(static_cast<int>(blockIdx.x)) {}

  __device__ void run() {
    Derived& self = static_cast<Derived&>(*this);
    place_thread();
    const uint32_t before = *static_cast<volatile uint32_t*>(exchange_.epochs);
    position_ = *a_.position;
    for (int page = thread_; page * kPage < position_; page += kThreads) {
      shared_.pages[page] = a_.block_table[page];
    }
    sync_consumers();
    if (thread_ == 0) barrier_arrive(&shared_.pages_known);
    load_residual();
    // Two passes a layer: attention, experts.
#pragma unroll 1
    for (int half = 0; half < 2 * a_.num_layers; ++half) {
      place_thread();
      const int l = half / 2;
      const bool is_attention = half % 2 == 0;
      epoch_ = before + static_cast<uint32_t>(l) + 1;
      layer_ = &shared_.layers[l & 1];
      norm_residual(half > 0, is_attention);
      if (is_attention) fetch_next_layer(l);
      self.half_layer(l, is_attention);
      if (half + 1 < 2 * a_.num_layers) {
        put_rows((is_attention ? exchange_.o : exchange_.down)[block_], L::kHiddenRows,
                 [&](int row) { return self.hidden_row(row, is_attention); });
      }
    }
    write_results();
    if (block_ == 0 && thread_ == 0) exchange_.epochs[0] = epoch_;
  }

 protected:
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
    const unsigned sequence = static_cast<unsigned>(chunks_ + index), slot = sequence % L::kSlots;
    const unsigned turn = sequence / L::kSlots;
    // The slot's parity is valid for this turn only from then on: another pair may still wait for
    // the turn before.
    while (load_acquire_in_block(&shared_.turns[slot]) <= turn) {
    }
    barrier_wait(&shared_.full[slot], static_cast<int>(turn & 1));
    return shared_.ring[slot];
  }
  // Called by one thread for `warps` warps.
  __device__ void release_chunk(int index, int warps) const {
    barrier_arrive_for(&shared_.empty[static_cast<unsigned>(chunks_ + index) % L::kSlots], warps);
  }

  // ---- vectors in shared memory

  // Sixteen f16 of the vector, starting at a multiple of 16.
  __device__ Sixteen load_x(int first) const {
    const auto* const from = reinterpret_cast<const uint4*>(shared_.vector + first * 2);
    return {from[0], from[1]};
  }

  // A value in the type that the weights multiply with.
  __device__ void write_value(int at, float x) const {
    if constexpr (L::kHasBf16Weights) {
      reinterpret_cast<__nv_bfloat16*>(shared_.vector)[at] = __float2bfloat16_rn(x);
    } else {
      reinterpret_cast<__half*>(shared_.vector)[at] = __float2half_rn(x);
    }
  }

  // Writes scratch to the vector in blocks of 128, each with its own scale.
  __device__ void write_scaled(int blocks) const {
#pragma unroll 1
    for (int block = warp_; block < blocks; block += kWarps) {
      const float4 x = *reinterpret_cast<const float4*>(shared_.scratch + block * 128 + lane_ * 4);
      float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
      const F16Scale scale = f16_scale(largest);
      reinterpret_cast<uint2*>(shared_.vector)[block * 32 + lane_] =
          make_uint2(pack_f16(x.x * scale.inverse, x.y * scale.inverse),
                     pack_f16(x.z * scale.inverse, x.w * scale.inverse));
      if (lane_ == 0) shared_.x_scales[block] = scale.scale;
    }
    sync_consumers();
  }

  // ---- packets

  // Publishes value(row) for each of this CTA's rows; the first warps write.
  template <typename Value>
  __device__ void put_rows(Packet* to, int rows, const Value& value) const {
    constexpr int kRows = 4 * kPacketValues;  // rows of a warp
    const int first = warp_ * kRows;
    if (first >= rows) return;
    put_bf16(to + warp_ * 4, min(4, packets(rows) - warp_ * 4), epoch_,
             lane_ < min(kRows, rows - first) ? value(first + lane_) : 0);
  }

  // Receives kRows values from each of `blocks` CTAs into scratch at at(block, row). One packet a
  // thread.
  template <int kRows, typename At>
  __device__ void receive(const Packet* from, int blocks, const At& at, bool waits = true) const {
    constexpr int kEach = packets(kRows);
    if (thread_ < blocks * kEach) {
      Packet packet[1];
      if (waits) {
        wait_for_packets(packet, epoch_, [&](int) { return from + thread_; });
      } else {
        packet[0] = load_packet(from + thread_);
      }
      float values[kPacketValues];
      unpack_bf16(packet[0], values);
      const int first = thread_ % kEach * kPacketValues;
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        if (first + j < kRows) shared_.scratch[at(thread_ / kEach, first + j)] = values[j];
      }
    }
    sync_consumers();
  }

  // ---- the residual: thread t holds packets t, t + 512, … of it, up to seven values each

  static constexpr int kOwn = (kBlocks * L::kHiddenPackets + kThreads - 1) / kThreads;
  static constexpr bool kWholePackets = L::kHiddenPackets * kPacketValues == L::kHiddenRows &&
                                        kBlocks * L::kHiddenPackets == kOwn * kThreads;
  __device__ int residual_at(int i) const {
    const int packet = thread_ + i * kThreads;
    if constexpr (kWholePackets) return packet * kPacketValues;
    return packet / L::kHiddenPackets * L::kHiddenRows + packet % L::kHiddenPackets * kPacketValues;
  }
  // Values of a thread's packet; 0 beyond the last packet.
  __device__ int residual_count(int i) const {
    if constexpr (kWholePackets) return kPacketValues;
    const int packet = thread_ + i * kThreads;
    if (packet >= kBlocks * L::kHiddenPackets) return 0;
    return min(kPacketValues, L::kHiddenRows - packet % L::kHiddenPackets * kPacketValues);
  }

  __device__ void load_residual() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll 1
      for (int j = 0; j < residual_count(i); ++j) {
        const int at = residual_at(i) + j;
        float value = a_.residual[at];
        if (a_.delta_in != nullptr) {
          value += __bfloat162float(static_cast<const __nv_bfloat16*>(a_.delta_in)[at]);
        }
        shared_.scratch[at] = value;
      }
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        residual_[i][j] = j < residual_count(i) ? shared_.scratch[residual_at(i) + j] : 0;
      }
    }
  }

  // Adds the previous step's result to the residual and writes the norm to the vector.
  __device__ void norm_residual(bool has_delta, bool is_attention) {
    const float* const norm = is_attention ? layer_->input_norm : layer_->post_attention_norm;
    float weights[kOwn][kPacketValues];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        weights[i][j] = j < residual_count(i) ? load_ahead(norm + residual_at(i) + j) : 0;
      }
    }
    Packet packets[kOwn] = {};
    if (has_delta) {
      const Packet* const all = is_attention ? exchange_.down[0] : exchange_.o[0];
      wait_for_packets(packets, is_attention ? epoch_ - 1 : epoch_, [&](int i) {
        return residual_count(i) > 0 ? all + thread_ + i * kThreads : nullptr;
      });
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float values[kPacketValues];
      unpack_bf16(packets[i], values);
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        if (j >= residual_count(i)) continue;
        residual_[i][j] += values[j];
        squares += residual_[i][j] * residual_[i][j];
      }
    }
    const float inverse = inverse_rms(sum_over_block(squares), L::kHidden, a_.eps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        if (j >= residual_count(i)) continue;
        write_value(residual_at(i) + j, weights[i][j] * (residual_[i][j] * inverse));
      }
    }
    sync_consumers();
  }

  // Also a barrier: all consumer threads have read the vector when it returns.
  __device__ float sum_over_block(float x) const {
    x = warp_sum(x);
    if (lane_ == 0) shared_.warp_sums[warp_] = x;
    sync_consumers();
    return warp_sum(lane_ < kWarps ? shared_.warp_sums[lane_] : 0);
  }

  __device__ void write_results() const {
    if (thread_ < L::kHiddenRows) {
      static_cast<__nv_bfloat16*>(a_.delta_out)[block_ * L::kHiddenRows + thread_] =
          __float2bfloat16_rn(static_cast<const Derived&>(*this).hidden_row(thread_, false));
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (residual_at(i) / L::kHiddenRows != block_) continue;
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        if (j < residual_count(i)) a_.residual[residual_at(i) + j] = residual_[i][j];
      }
    }
  }

  __device__ void fetch_next_layer(int l) const {
    constexpr int kWords = sizeof(DecodeLayer) / 8;
    static_assert(kWords <= kWarp && sizeof(DecodeLayer) % 8 == 0);
    if (warp_ != kWarps - 2 || l + 1 == a_.num_layers || lane_ >= kWords) return;
    reinterpret_cast<uint64_t*>(&shared_.layers[(l + 1) & 1])[lane_] =
        reinterpret_cast<const uint64_t*>(a_.layers + l + 1)[lane_];
  }

  // ---- attention

  __device__ const float* turns() const { return a_.cos_sin + int64_t{position_} * kRope; }

  // Called by one warp. One CTA of each head needs the row; one CTA writes it to the cache.
  __device__ void write_cache_row(std::byte* pages) const {
    if (part_ != newest_key_part(position_)) return;
    const float* const new_key = shared_.scratch + kKeyAt;
    const Eight latent[2] = {load_eight(new_key + lane_ * 8),
                             load_eight(new_key + (lane_ + kWarp) * 8)};
    const Eight key = load_eight(new_key + kLatent + lane_ % 8 * 8);
    const Eight weight[2] = {load_eight(layer_->kv_a_norm + lane_ * 8),
                             load_eight(layer_->kv_a_norm + (lane_ + kWarp) * 8)};
    write_latent_row<Row>(latent, key, weight, a_.inner_eps, turns(), shared_.row, lane_);
    __syncwarp();
    if (head_ > 0) return;
    auto* const to = reinterpret_cast<uint4*>(pages + *a_.slot * Row::kBytes);
    for (int i = lane_; i < Row::kBytes / 16; i += kWarp) {
      to[i] = reinterpret_cast<const uint4*>(shared_.row)[i];
    }
    if (FATHOM_PLANTED(a_, kExtraRow)) {
      reinterpret_cast<uint4*>(pages + (*a_.slot ^ 1) * Row::kBytes)[lane_] =
          reinterpret_cast<const uint4*>(shared_.row)[lane_];
    }
  }

  // Sixteen neighbours of a block of 128 as f16; the block lies in eight neighbouring lanes.
  __device__ Sixteen scaled_sixteen(const float* from, float& scale) const {
    const Eight low = load_eight(from), high = load_eight(from + 8);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fmaxf(fabsf(low.v[i]), fabsf(high.v[i])));
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    }
    const F16Scale f16 = f16_scale(largest);
    scale = f16.scale;
    const auto packed = [&](const Eight& x) {
      const auto pair = [&](int i) {
        return pack_f16(x.v[i] * f16.inverse, x.v[i + 1] * f16.inverse);
      };
      return make_uint4(pair(0), pair(2), pair(4), pair(6));
    };
    return {packed(low), packed(high)};
  }

  // The head's query: the rotary part stays in registers, two values a lane; the rest goes through
  // W_UK, four rows of 128 columns a warp.
  __device__ void absorb() {
    receive<kQueryRows>(exchange_.query[head_ * kHeadBlocks], kHeadBlocks,
                        [&](int block, int row) { return block * kQueryRows + row; });
    const float* const query = shared_.scratch;
    const float2 pair = *reinterpret_cast<const float2*>(query + kNope + lane_ * 2);
    const float2 turn = *reinterpret_cast<const float2*>(turns() + lane_ * 2);
    // Rounded as a separate launch would store it.
    const uint32_t rotated =
        pack_bf16(pair.x * turn.x - pair.y * turn.y, pair.x * turn.y + pair.y * turn.x);
    q_rope_ = {low_bf16(rotated), high_bf16(rotated)};
    if constexpr (L::kHasBf16Weights) {
      // Two rows of each half of a warp's kilobyte.
      const uint4 x = narrow(load_eight(query + lane_ * 8 % kNope));
      const uint8_t* const slot = wait_for_chunk(0);
      Pair sums =
          multiply_step_bf16<kStepBytes>(slot + warp_ * 2 * kStepBytes + lane_ * 16, x, lane_);
      if (!is_on_diagonal(lane_)) sums = {0, 0};
#pragma unroll
      for (int distance = 1; distance < 16; distance *= 2) {
        sums.first += __shfl_xor_sync(~0u, sums.first, distance);
        sums.second += __shfl_xor_sync(~0u, sums.second, distance);
      }
      if (lane_ % 16 == 0) {
        shared_.sums[warp_ * 4 + lane_ / 16] = sums.first;
        shared_.sums[warp_ * 4 + 2 + lane_ / 16] = sums.second;
      }
    } else {
      float x_scale;
      const Sixteen x = scaled_sixteen(query + lane_ * 16 % kNope, x_scale);
      const uint8_t* const slot = wait_for_chunk(0);
      const float scale =
          reinterpret_cast<const float*>(slot + L::kWeightBytes)[part_ * kAbsorbRows / kScaleRow];
      float sum = multiply_step<0>(slot + warp_ * kStepBytes + lane_ * 16, x, lane_).first *
                  (scale * x_scale);
      if (!is_on_diagonal(lane_)) sum = 0;
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane_ % 8 == 0) shared_.sums[warp_ * 4 + lane_ / 8] = sum;
    }
    if (lane_ == 0) release_chunk(0, 1);
    chunks_ += 1;
    sync_consumers();
    put_rows(exchange_.absorbed[block_], kAbsorbRows, [&](int row) { return shared_.sums[row]; });
  }

  // Each warp takes one key of each run, kBatch runs at a time. The first pass has no keys: it
  // warms the instruction cache while the query is in flight.
  static constexpr int kBatch = 2;
  __device__ void attend() {
    Sixteen query = {};
    float query_scale = 1;
    KeySum sum;
    constexpr int kPieces = kKeyPieces<Row, L>, kRows = kKeyRun / kPieces;
    const int runs = key_runs_of(position_, part_);
    // One warp of one CTA takes the newest key, after the runs.
    const bool has_newest = warp_ == 0 && part_ == newest_key_part(position_);
#pragma unroll 1
    for (int first = -kBatch; first < runs + has_newest || first <= 0; first += kBatch) {
      if (first == 0) receive_query(query, query_scale);
      const std::byte* rows[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int run = first + i;
        rows[i] = run == runs && has_newest ? shared_.row : nullptr;
        if (run < 0 || run >= runs) continue;
        const uint8_t* const slot =
            wait_for_chunk(run * kPieces + (kPieces > 1 ? warp_ / kRows : 0));
        if ((run * kHeadBlocks + part_) * kKeyRun + warp_ < position_) {
          rows[i] = reinterpret_cast<const std::byte*>(slot) + warp_ % kRows * Row::kBytes;
          if (FATHOM_PLANTED(a_, kWrongKey) &&
              (run * kHeadBlocks + part_) * kKeyRun + warp_ == position_ - 1 && warp_ % 2 == 1) {
            rows[i] -= Row::kBytes;
          }
        }
      }
      add_keys<Row>(rows, query, query_scale, q_rope_, lane_, sum);
      __syncwarp();
      if (first + lane_ >= 0 && lane_ < kBatch && first + lane_ < runs) {
        release_chunk((first + lane_) * kPieces + (kPieces > 1 ? warp_ / kRows : 0), kPieces);
      }
    }
    chunks_ += runs * kPieces;
    sync_consumers();  // all have read the query: scratch is free
    join_warps(sum);
  }

  // The query in the type that the keys multiply in, and the factor of the scores.
  __device__ void receive_query(Sixteen& query, float& scale) {
    receive<kAbsorbRows>(exchange_.absorbed[head_ * kHeadBlocks], kHeadBlocks,
                         [&](int block, int row) { return block * kAbsorbRows + row; });
    if constexpr (Row::kIsBf16) {
      query = {narrow(load_eight(shared_.scratch + lane_ * 16)),
               narrow(load_eight(shared_.scratch + lane_ * 16 + 8))};
    } else {
      query = scaled_sixteen(shared_.scratch + lane_ * 16, scale);
    }
    const float factor = a_.softmax_scale * kLog2E;  // for exp2
    scale *= factor;
    q_rope_.x *= factor;
    q_rope_.y *= factor;
  }

  // The CTA's partial result, normalized, and its log-sum-exp.
  __device__ void join_warps(const KeySum& own) const {
    // Sums of as many warps at a time as scratch holds.
    constexpr int kTogether = L::kScratch / kLatent < kWarps ? kWarps / 2 : kWarps;
    static_assert(kTogether * kLatent <= L::kScratch);
    if (lane_ == 0) {
      shared_.most[warp_] = own.most;
      shared_.total[warp_] = own.total;
    }
    float weight = 0, largest = 0, all = 0, sum = 0;
#pragma unroll
    for (int first = 0; first < kWarps; first += kTogether) {
      if (first > 0) sync_consumers();  // the sums before have been read
      if (kTogether == kWarps || warp_ / kTogether * kTogether == first) {
        auto* const parts = reinterpret_cast<float4*>(shared_.scratch);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          parts[(warp_ - first) * (kLatent / 4) + i * kWarp + lane_] = make_float4(
              own.out[4 * i], own.out[4 * i + 1], own.out[4 * i + 2], own.out[4 * i + 3]);
        }
      }
      sync_consumers();
      if (first == 0) {
        // One lane per warp's weight.
        const float most = lane_ < kWarps ? shared_.most[lane_] : -INFINITY;
        largest = warp_max(most);
        weight = most == -INFINITY ? 0 : exp2_fast(most - largest);  // no key: no weight
        all = warp_sum(lane_ < kWarps ? weight * shared_.total[lane_] : 0);
      }
#pragma unroll 4
      for (int i = 0; i < kTogether; ++i) {
        sum =
            fmaf(__shfl_sync(~0u, weight, first + i), shared_.scratch[i * kLatent + thread_], sum);
      }
    }
    // The column, in the order in which the splits were written.
    const int column = thread_ / 4 % kWarp * 16 + thread_ / 128 * 4 + thread_ % 4;
    auto* const joined = reinterpret_cast<uint16_t*>(shared_.vector);
    joined[column] = __half_as_ushort(__float2half_rn(all == 0 ? 0 : sum / all));
    if (thread_ == 0) {
      const uint32_t lse = __float_as_uint(all == 0 ? -INFINITY : largest + log2_fast(all));
      joined[kLatent] = static_cast<uint16_t>(lse);
      joined[kLatent + 1] = static_cast<uint16_t>(lse >> 16);
    }
    sync_consumers();
    if (thread_ >= kPartPackets) return;
    uint64_t words[2] = {};
#pragma unroll
    for (int i = 0; i < kPacketValues; ++i) {
      words[i / 4] |= uint64_t{joined[thread_ * kPacketValues + i]} << (i % 4 * 16);
    }
    store_packet(&exchange_.part[block_][thread_], words[0], words[1] | uint64_t{epoch_} << 48);
  }

  // Combines the splits of the head's eight CTAs and multiplies by W_UV, one row a warp.
  __device__ void values() {
    constexpr int kCount = kHeadBlocks * kPartPackets, kEach = (kCount + kThreads - 1) / kThreads;
    constexpr int kPartValues = kPartPackets * kPacketValues;
    Packet packets[kEach];
    wait_for_packets(packets, epoch_, [&](int i) {
      const int at = thread_ + i * kThreads;
      return at < kCount ? &exchange_.part[head_ * kHeadBlocks][at] : nullptr;
    });
    auto* const parts = reinterpret_cast<uint16_t*>(shared_.scratch);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = thread_ + i * kThreads;
      if (at >= kCount) continue;
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        const uint64_t word = j < 4 ? packets[i].low : packets[i].high;
        parts[at * kPacketValues + j] = static_cast<uint16_t>(word >> (j % 4 * 16));
      }
    }
    sync_consumers();
    // One lane per split's weight.
    const uint16_t* const words = parts + lane_ % kHeadBlocks * kPartValues + kLatent;
    const float lse = __uint_as_float(uint32_t{words[0]} | uint32_t{words[1]} << 16);
    const float weight = exp2_fast(lse - warp_max(lse));
    float sum = 0, all = 0;
#pragma unroll
    for (int i = 0; i < kHeadBlocks; ++i) {
      const float w = __shfl_sync(~0u, weight, i);
      all += w;
      sum = fmaf(w, __half2float(__ushort_as_half(parts[i * kPartValues + thread_])), sum);
    }
    write_value(thread_, sum / all);
    sync_consumers();
    const uint8_t* const slot = wait_for_chunk(0);
    static_assert(kValueRows == kWarps);
    float value;
    if constexpr (L::kHasBf16Weights) {
      // The row's two halves as two rows.
      value = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(shared_.vector + (i * kWarp + lane_) * 16);
        value +=
            multiply_step_bf16<0>(slot + (warp_ * 2 + i) * kStepBytes + lane_ * 16, x, lane_).first;
      }
    } else {
      static_assert(kLatent == kStepBytes);
      const Sixteen x = load_x(lane_ * 16);
      value = multiply_step<0>(slot + warp_ * kLatent + lane_ * 16, x, lane_).first *
              reinterpret_cast<const float*>(slot + L::kWeightBytes)[lane_ / 8];
    }
    value = warp_sum(is_on_diagonal(lane_) ? value : 0);
    if (lane_ == 0) {
      shared_.sums[warp_] = value;
      release_chunk(0, 1);
    }
    chunks_ += 1;
    sync_consumers();
    put_rows(exchange_.value[block_], kValueRows, [&](int row) { return shared_.sums[row]; });
  }

  // The heads' values to scratch.
  __device__ void receive_values() const {
    static_assert(kBlocks * kValuePackets <= kThreads);
    receive<kValueRows>(
        exchange_.value[0], kBlocks,
        [&](int block, int row) {
          if (FATHOM_PLANTED(a_, kSwappedHead) && block >= kBlocks - 2 * kHeadBlocks) {
            block ^= kHeadBlocks;
          }
          return block * kValueRows + row;
        },
        !FATHOM_PLANTED(a_, kSkippedHandoff));
  }

  Shared<L>& shared_;
  const DecodeLayersArguments& a_;
  typename L::Exchanged& exchange_;
  int thread_, block_;
  int warp_ = 0, lane_ = 0, half_ = 0, pair_ = 0, head_ = 0, part_ = 0;
  int position_ = 0;
  const DecodeLayer* layer_ = nullptr;
  uint32_t epoch_ = 0;
  int chunks_ = 0;  // chunks of the launch before this step's first
  float residual_[kOwn][kPacketValues];
  float2 q_rope_ = {};
};

}  // namespace fathom::cuda::decode_layers_kernel
