// The layers of decode_layers_cuda.h in one launch of 128 persistent CTAs, one per SM.
//
// Each CTA owns a share of the rows of every matrix. Its weights stream in one order for the whole
// launch through a ring buffer in shared memory; two producer threads issue each chunk as soon as a
// slot is free (decode_layers_feed_cuda.cuh), the cache's keys included. Only a layer's routed
// experts are not known ahead. Sixteen consumer warps multiply. Each step produces a few dozen
// values per CTA, which all CTAs read as flag-in-data packets (block_packets.cuh). Eight CTAs work
// on a head: its query, its part of W_UK, a split of an eighth of the keys each, W_UV. Every CTA
// keeps the whole residual in registers.
//
// Steps of a layer, in each of which CTAs read what the others wrote before:
//   q_kv_a     norm of the residual; rows of W_q_a and W_kv_a
//   q_b        norm of q_a; the new cache row; the head's rows of W_q_b
//   absorb     rotary embedding; the head's rows of W_UK
//   attend     scores and sums over keys of this CTA's split
//   values     combine of the head's splits; the head's rows of W_UV
//   o          rows of W_o
//   router     residual, norm; rows of the router
//   gate, up   each CTA chooses the experts for itself; rows of gate and of up
//   down       rows of down of all experts, added
#include "base/check.h"
#include "base/math_constants.h"
#include "device/cuda/block_packets.cuh"
#include "device/cuda/co_resident.h"
#include "ops/decode_layers/decode_layers_cuda.h"
#include "ops/decode_layers/decode_layers_feed_cuda.cuh"
#include "ops/decode_layers/decode_layers_keys_cuda.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"
#include "ops/gate/gate_choice_cuda.cuh"
#include "ops/rope/query_key_row_cuda.cuh"
#include "ops/scaled_linear/row_products_cuda.cuh"

namespace fathom::cuda {
namespace {

using namespace decode_layers_kernel;

// ---- consumer warps

template <typename Row>
class Layers {
 public:
  __device__ Layers(Shared& shared, const DecodeLayersArguments& a)
      : shared_(shared),
        a_(a),
        exchange_(*static_cast<Exchange*>(a.exchange)),
        thread_(static_cast<int>(threadIdx.x)),
        block_(static_cast<int>(blockIdx.x)) {}

  __device__ void run() {
    place_thread();
    const uint32_t before = *static_cast<volatile uint32_t*>(exchange_.epochs);
    position_ = *a_.position;
    if (thread_ * kPage < position_) shared_.pages[thread_] = a_.block_table[thread_];
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
      if (is_attention) {
        fetch_next_layer(l);
      } else {
        router();
        choose();
      }
      products_of_hidden(is_attention);
      if (is_attention) {
        put_rows(exchange_.qkv[block_], kMostQkvRows,
                 [&](int row) { return shared_.sums[row * 2] + shared_.sums[row * 2 + 1]; });
        q_b(a_.pages + l * a_.layer_bytes);
        absorb();
        attend();
        values();
        o();
      } else {
        put_rows(exchange_.activation[block_], kExperts * kInterRows,
                 [&](int row) { return activation(row); });
        down();
      }
      if (half + 1 < 2 * a_.num_layers) {
        put_rows((is_attention ? exchange_.o : exchange_.down)[block_], kHiddenRows,
                 [&](int row) { return shared_.sums[row]; });
      }
    }
    write_results();
    if (block_ == 0 && thread_ == 0) exchange_.epochs[0] = epoch_;
  }

 private:
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
    return shared_.ring[static_cast<unsigned>(chunks_ + index) % kSlots];
  }
  __device__ const uint8_t* wait_for_chunk(int index) const {
    const unsigned sequence = static_cast<unsigned>(chunks_ + index), slot = sequence % kSlots;
    const unsigned turn = sequence / kSlots;
    // The slot's parity is valid for this turn only from then on: another pair may still wait for
    // the turn before.
    while (load_acquire_in_block(&shared_.turns[slot]) <= turn) {
    }
    barrier_wait(&shared_.full[slot], static_cast<int>(turn & 1));
    return shared_.ring[slot];
  }
  // Called by one thread for `warps` warps.
  __device__ void release_chunk(int index, int warps) const {
    barrier_arrive_for(&shared_.empty[static_cast<unsigned>(chunks_ + index) % kSlots], warps);
  }

  // ---- GEMVs

  // Multiplies 512 kSteps columns of two rows, kStride bytes apart; scales: those of the columns'
  // blocks. Every lane gets the sums.
  template <int kStride, int kSteps, int kUnroll>
  __device__ Pair two_rows(const uint8_t* weights, const float* scales, const uint8_t* vector,
                           const float* x_scales) const {
    Pair sums = {0, 0};
    weights += lane_ * 16;
    vector += lane_ * 32;
    scales += lane_ / 8;
#pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
      const auto* const x = reinterpret_cast<const uint4*>(vector + i * 2 * kStepBytes);
      const Pair more = multiply_step<kStride>(weights + i * kStepBytes, {x[0], x[1]}, lane_);
      float scale = scales[i * 4];
      if (x_scales != nullptr) scale *= x_scales[i * 4 + lane_ / 8];
      sums.first = fmaf(more.first, scale, sums.first);
      sums.second = fmaf(more.second, scale, sums.second);
    }
    if (!is_on_diagonal(lane_)) sums = {0, 0};
    return {warp_sum(sums.first), warp_sum(sums.second)};
  }

  // Sixteen elements of the vector, starting at a multiple of 16.
  __device__ Sixteen load_x(int first) const {
    const auto* const from = reinterpret_cast<const uint4*>(shared_.vector + first * 2);
    return {from[0], from[1]};
  }

  // Rows of q_kv_a, or of the experts' gate and up in turn: two rows a chunk, half the columns a
  // warp.
  __device__ void products_of_hidden(bool is_attention) {
    constexpr int kSteps = kHidden / 2 / kStepBytes;
    const int count =
        is_attention ? first_qkv_pair(block_ + 1) - first_qkv_pair(block_) : 2 * kExperts;
#pragma unroll 1
    for (int i = pair_; i < count; i += kPairs) {
      const uint8_t* const slot = wait_for_chunk(i);
      const Pair sums = two_rows<kHidden, kSteps, kSteps>(
          slot + half_ * (kHidden / 2),
          reinterpret_cast<const float*>(slot + kWeightBytes) + half_ * (kHidden / 2 / kScaleRow),
          shared_.vector + half_ * kHidden, nullptr);
      if (lane_ == 0) {
        release_chunk(i, kWarps / 2);
        shared_.sums[i * 4 + half_] = sums.first;
        shared_.sums[i * 4 + 2 + half_] = sums.second;
      }
    }
    chunks_ += count;
    sync_consumers();
  }

  // kRows rows of kColumns a chunk; each warp of the pair multiplies half of them. Results go to
  // `sums`.
  template <int kRows, int kColumns>
  __device__ void products(int chunks, const float* x_scales) const {
    constexpr int kHalf = kRows / 2;
    if (pair_ >= chunks) return;
    const uint8_t* const slot = wait_for_chunk(pair_);
    const auto* const scales = reinterpret_cast<const float*>(slot + kWeightBytes);
#pragma unroll 1
    for (int i = half_ * kHalf; i < (half_ + 1) * kHalf; i += 2) {
      const Pair sums = two_rows<kColumns, kColumns / kStepBytes, kColumns / kStepBytes>(
          slot + i * kColumns, scales, shared_.vector, x_scales);
      if (lane_ == 0) {
        shared_.sums[pair_ * kRows + i] = sums.first;
        shared_.sums[pair_ * kRows + i + 1] = sums.second;
      }
    }
    if (lane_ == 0) release_chunk(pair_, kWarps / 2);
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

  // ---- the residual: thread t holds packets t and t + 512 of it, seven values each

  static constexpr int kOwn = kBlocks * kHiddenPackets / kThreads;
  __device__ int residual_at(int i) const { return (thread_ + i * kThreads) * kPacketValues; }

  __device__ void load_residual() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll 1
      for (int j = 0; j < kPacketValues; ++j) {
        const int at = residual_at(i) + j;
        float value = a_.residual[at];
        if (a_.delta_in != nullptr) {
          value += __bfloat162float(static_cast<const __nv_bfloat16*>(a_.delta_in)[at]);
        }
        shared_.scratch[at] = value;
      }
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) residual_[i][j] = shared_.scratch[residual_at(i) + j];
    }
  }

  // Adds the previous step's result to the residual and writes the norm to the vector.
  __device__ void norm_residual(bool has_delta, bool is_attention) {
    const float* const norm = is_attention ? layer_->input_norm : layer_->post_attention_norm;
    float weights[kOwn][kPacketValues];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) weights[i][j] = load_ahead(norm + residual_at(i) + j);
    }
    Packet packets[kOwn] = {};
    if (has_delta) {
      const Packet* const all = is_attention ? exchange_.down[0] : exchange_.o[0];
      wait_for_packets(packets, is_attention ? epoch_ - 1 : epoch_,
                       [&](int i) { return all + thread_ + i * kThreads; });
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float values[kPacketValues];
      unpack_bf16(packets[i], values);
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        residual_[i][j] += values[j];
        squares += residual_[i][j] * residual_[i][j];
      }
    }
    const float inverse = inverse_rms(sum_over_block(squares), kHidden, a_.eps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) {
        write_half(residual_at(i) + j, weights[i][j] * (residual_[i][j] * inverse));
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

  __device__ void write_half(int at, float x) const {
    reinterpret_cast<__half*>(shared_.vector)[at] = __float2half_rn(x);
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

  __device__ void write_results() const {
    if (thread_ < kHiddenRows) {
      static_cast<__nv_bfloat16*>(a_.delta_out)[block_ * kHiddenRows + thread_] =
          __float2bfloat16_rn(shared_.sums[thread_]);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (residual_at(i) / kHiddenRows != block_) continue;
#pragma unroll
      for (int j = 0; j < kPacketValues; ++j) a_.residual[residual_at(i) + j] = residual_[i][j];
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

  // Normalized q_a; the new cache row; the head's queries.
  __device__ void q_b(std::byte* pages) {
    receive_qkv();
    products<kQueryChunkRows, kQLora>(kQueryChunks, nullptr);
    chunks_ += kQueryChunks;
    sync_consumers();
    put_rows(exchange_.query[block_], kQueryRows, [&](int row) { return shared_.sums[row]; });
    if (warp_ == kWarps - 1) write_cache_row(pages);  // while the other CTAs' queries arrive
  }

  __device__ void receive_qkv() const {
    static_assert(kBlocks * kQkvPackets <= kThreads);
    const int from = min(thread_ / kQkvPackets, kBlocks - 1),
              at = thread_ % kQkvPackets * kPacketValues;
    const int first = first_qkv_pair(from) * 2 + at;
    const int count = thread_ < kBlocks * kQkvPackets ? first_qkv_pair(from + 1) * 2 - first : 0;
    float weights[kPacketValues];
#pragma unroll
    for (int j = 0; j < kPacketValues; ++j) {
      weights[j] = load_ahead(layer_->q_a_norm + min(first + j, kQLora - 1));
    }
    Packet packet[1] = {};
    if (count > 0) {
      wait_for_packets(packet, epoch_, [&](int) { return &exchange_.qkv[0][thread_]; });
    }
    float values[kPacketValues], squares = 0;
    unpack_bf16(packet[0], values);
#pragma unroll
    for (int j = 0; j < kPacketValues; ++j) {
      if (j < count && first + j < kQLora) squares += values[j] * values[j];
      if (j < count && first + j >= kQLora)
        shared_.scratch[kKeyAt + first + j - kQLora] = values[j];
    }
    const float inverse = inverse_rms(sum_over_block(squares), kQLora, a_.inner_eps);
#pragma unroll
    for (int j = 0; j < kPacketValues; ++j) {
      if (j < count && first + j < kQLora) {
        write_half(first + j, weights[j] * (values[j] * inverse));
      }
    }
    sync_consumers();
  }

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
    float x_scale;
    const Sixteen x = scaled_sixteen(query + lane_ * 16 % kNope, x_scale);
    const uint8_t* const slot = wait_for_chunk(0);
    const float scale =
        reinterpret_cast<const float*>(slot + kWeightBytes)[part_ * kAbsorbRows / kScaleRow];
    float sum = multiply_step<0>(slot + warp_ * kStepBytes + lane_ * 16, x, lane_).first *
                (scale * x_scale);
    if (!is_on_diagonal(lane_)) sum = 0;
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (lane_ % 8 == 0) shared_.sums[warp_ * 4 + lane_ / 8] = sum;
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
    constexpr int kPieces = kKeyPieces<Row>, kRows = kKeyRun / kPieces;
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
    auto* const parts = reinterpret_cast<float4*>(shared_.scratch);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      parts[warp_ * (kLatent / 4) + i * kWarp + lane_] =
          make_float4(own.out[4 * i], own.out[4 * i + 1], own.out[4 * i + 2], own.out[4 * i + 3]);
    }
    if (lane_ == 0) {
      shared_.most[warp_] = own.most;
      shared_.total[warp_] = own.total;
    }
    sync_consumers();
    // One lane per warp's weight.
    const float most = lane_ < kWarps ? shared_.most[lane_] : -INFINITY;
    const float largest = warp_max(most);
    const float weight = most == -INFINITY ? 0 : exp2_fast(most - largest);  // no key: no weight
    const float all = warp_sum(lane_ < kWarps ? weight * shared_.total[lane_] : 0);
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < kWarps; ++i) {
      sum = fmaf(__shfl_sync(~0u, weight, i), shared_.scratch[i * kLatent + thread_], sum);
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
    write_half(thread_, sum / all);
    sync_consumers();
    const uint8_t* const slot = wait_for_chunk(0);
    static_assert(kValueRows == kWarps && kLatent == kStepBytes);
    const Sixteen x = load_x(lane_ * 16);
    float value = multiply_step<0>(slot + warp_ * kLatent + lane_ * 16, x, lane_).first *
                  reinterpret_cast<const float*>(slot + kWeightBytes)[lane_ / 8];
    value = warp_sum(is_on_diagonal(lane_) ? value : 0);
    if (lane_ == 0) {
      shared_.sums[warp_] = value;
      release_chunk(0, 1);
    }
    chunks_ += 1;
    sync_consumers();
    put_rows(exchange_.value[block_], kValueRows, [&](int row) { return shared_.sums[row]; });
  }

  __device__ void o() {
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
    write_scaled(kHeads * kV / kScaleRow);
    products<kOChunkRows, kHeads * kV>(kOChunks, shared_.x_scales);
    chunks_ += kOChunks;
    sync_consumers();
  }

  // ---- experts

  // Seven warps a row, 256 columns at a time.
  __device__ void router() {
    constexpr int kColumns = kWarp * 8, kRowWarps = 7, kSteps = kHidden / kColumns / kRowWarps;
    static_assert(kSteps * kRowWarps * kColumns == kHidden);
    constexpr int kRows = kRouted / kBlocks;
    static_assert(kRows == 2);
    const int row = warp_ / 8, part = warp_ % 8;
    if (part < kRowWarps) {
      const uint8_t* const weights = wait_for_chunk(row);
      float sum = 0;
#pragma unroll 2
      for (int i = 0; i < kSteps; ++i) {
        const int at = (part * kSteps + i) * kColumns + lane_ * 8;
        const Eight w = widen(*reinterpret_cast<const uint4*>(weights + at * 2));
        const uint4 x = *reinterpret_cast<const uint4*>(shared_.vector + at * 2);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = widen_f16(words[j]);
          sum = fmaf(w.v[2 * j], two.x, sum);
          sum = fmaf(w.v[2 * j + 1], two.y, sum);
        }
      }
      sum = warp_sum(sum);
      if (lane_ == 0) shared_.warp_sums[warp_] = sum;
    }
    sync_consumers();
    if (thread_ == 0) {
      float logits[2] = {};
#pragma unroll
      for (int j = 0; j < kRowWarps; ++j) {
        logits[0] += shared_.warp_sums[j];
        logits[1] += shared_.warp_sums[8 + j];
      }
      store_packet(&exchange_.logits[block_],
                   __float_as_uint(logits[0]) | uint64_t{__float_as_uint(logits[1])} << 32,
                   uint64_t{epoch_} << 48);
      for (int i = 0; i < kRows; ++i) release_chunk(i, kWarps);
    }
    chunks_ += kRows;
  }

  // The rules of gate() (ops/gate/gate.h) for kSigmoidBias and groups of 32, by the last eight
  // warps: one group a warp, one expert a lane. The other warps do not wait: the chunks of routed
  // experts come later. A NaN ranks below all numbers.
  __device__ void choose() const {
    if (warp_ < kWarps - kGroups) return;
    const int expert = thread_ - kThreads + kRouted, group = expert / kWarp;
    const float bias = load_ahead(layer_->router_bias + expert);
    Packet packet[1];
    wait_for_packets(packet, epoch_, [&](int) { return exchange_.logits + expert / 2; });
    const float logit = __uint_as_float(static_cast<uint32_t>(packet[0].low >> (expert % 2 * 32)));
    const float score = 1 / (1 + expf(-logit)), choice = score + bias;
    const uint32_t key = order_key(choice);
    auto* const keys = reinterpret_cast<uint32_t*>(shared_.scratch);
    float* const group_values = shared_.scratch + kRouted;
    keys[expert] = key;
    // A group's rank is the sum of its best two scores.
    const uint32_t best = __reduce_max_sync(~0u, key);
    const bool is_best = lane_ == __ffs(static_cast<int>(__ballot_sync(~0u, key == best))) - 1;
    const uint32_t second = __reduce_max_sync(~0u, is_best ? 0 : key);
    const bool is_second =
        lane_ == __ffs(static_cast<int>(__ballot_sync(~0u, !is_best && key == second))) - 1;
    const float both = warp_sum(is_best || is_second ? choice : 0);
    if (lane_ == 0) group_values[group] = both;
    named_barrier(kChoosers, kRouted);
    const uint32_t own = order_key(group_values[lane_ % kGroups]);
    int better = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t other = __shfl_sync(~0u, own, i);
      better += other > own || (other == own && i < lane_ % kGroups);
    }
    uint32_t kept =
        __ballot_sync(~0u, lane_ < kGroups && better < static_cast<int>(a_.gate.groups_per_token));
    // An expert's rank within the kept groups; ties go to the lower index.
    const bool runs = (kept >> group & 1) != 0;
    int place = 0;
#pragma unroll 1
    for (; runs && kept != 0; kept &= kept - 1) {
      const int other_group = __ffs(static_cast<int>(kept)) - 1;
      const uint32_t least = other_group < group ? key : key + 1;
#pragma unroll 4
      for (int i = 0; i < kWarp; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + other_group * kWarp + i);
        place += static_cast<int>(four.x >= least) + static_cast<int>(four.y >= least) +
                 static_cast<int>(four.z >= least) + static_cast<int>(four.w >= least);
      }
    }
    place += __popc(__match_any_sync(~0u, key) & ((1u << lane_) - 1));
    if (runs && place < kChosen) {
      shared_.ids[place] = expert;
      shared_.weights[1 + place] = score;
    }
    named_barrier(kChoosers, kRouted);
    if (thread_ != kThreads - 1) return;
    barrier_arrive(&shared_.chosen);
    float sum = 0;
#pragma unroll
    for (int i = 1; i < kExperts; ++i) sum += shared_.weights[i];
    const float factor = a_.gate.scaling / (a_.gate.normalize ? sum + 1e-20f : 1.0f);
#pragma unroll
    for (int i = 1; i < kExperts; ++i) shared_.weights[i] *= factor;
    shared_.weights[0] = 1;
    if (FATHOM_PLANTED(a_, kDroppedExpert)) shared_.weights[kChosen] = 0;
  }

  // The activation from the sums of gate and up, which alternate for each expert.
  __device__ float activation(int row) const {
    const float* const sums = shared_.sums + row / kInterRows * 8 + row % kInterRows * 2;
    const float gate = sums[0] + sums[1], up = sums[4] + sums[5];
    return gate / (1 + expf(-gate)) * up;
  }

  __device__ void down() {
    constexpr int kBlocksOfK = kInter / kScaleRow;
    static_assert(kBlocks * kActivationPackets <= kThreads);
    static_assert(kExperts <= kSlots);
#pragma unroll 1
    for (int i = 0; i < kExperts; ++i) wait_for_chunk(i);
    receive<kExperts * kInterRows>(exchange_.activation[0], kBlocks, [&](int block, int row) {
      return row / kInterRows * kInter + block * kInterRows + row % kInterRows;
    });
    write_scaled(kExperts * kInter / kScaleRow);
    // A warp has four rows of all experts; two of them are 512 bytes. A CTA's rows touch at most
    // two blocks of 128: the slot holds the scales of the first block's pair and of the next pair.
    constexpr int kRowWarps = kHiddenRows / 4;
    const int k_block = lane_ / 8 % kBlocksOfK, row = warp_ * 4 + lane_ / 16;
    const int in_pair = block_ * kHiddenRows % (2 * kScaleRow) + row;
    const int at = in_pair / kScaleRow * kBlocksOfK + k_block,
              next_at = (in_pair + 2) / kScaleRow * kBlocksOfK + k_block;
    Pair sums = {0, 0};
    if (warp_ < kRowWarps) {
#pragma unroll 3
      for (int i = 0; i < kExperts; ++i) {
        const uint8_t* const slot = slot_of(i);
        const auto* const scales = reinterpret_cast<const float*>(slot + kWeightBytes);
        const float x_scale = shared_.x_scales[i * kBlocksOfK + k_block] * shared_.weights[i];
        const Pair more =
            multiply_step<kStepBytes>(slot + warp_ * 2 * kStepBytes + lane_ * 16,
                                      load_x(i * kInter + lane_ * 16 % kInter), lane_);
        sums.first = fmaf(more.first, scales[at] * x_scale, sums.first);
        sums.second = fmaf(more.second, scales[next_at] * x_scale, sums.second);
      }
    }
    __syncwarp();
    if (lane_ < kExperts) release_chunk(lane_, 1);
    if (!is_on_diagonal(lane_)) sums = {0, 0};
    // Adds the first row's eight lanes into the lower lanes, the second row's into the upper.
    const bool upper = (lane_ & 8) != 0;
    float sum = (upper ? sums.second : sums.first) +
                __shfl_xor_sync(~0u, upper ? sums.first : sums.second, 8);
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (lane_ % 8 == 0 && warp_ < kRowWarps) shared_.sums[row + (upper ? 2 : 0)] = sum;
    chunks_ += kExperts;
    sync_consumers();
  }

  Shared& shared_;
  const DecodeLayersArguments& a_;
  Exchange& exchange_;
  int thread_, block_;
  int warp_ = 0, lane_ = 0, half_ = 0, pair_ = 0, head_ = 0, part_ = 0;
  int position_ = 0;
  const DecodeLayer* layer_ = nullptr;
  uint32_t epoch_ = 0;
  int chunks_ = 0;  // chunks of the launch before this step's first
  float residual_[kOwn][kPacketValues];
  float2 q_rope_ = {};
};

template <typename Row>
__global__ void __launch_bounds__(kAllThreads, 1)
    layers_kernel(const __grid_constant__ DecodeLayersArguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kWarps);
    }
    barrier_init(&shared.chosen, 1);
    barrier_init(&shared.pages_known, 1);
    for (uint32_t& turn : shared.turns) turn = 0;
    fence_barrier_init();
  }
  if (thread < static_cast<int>(sizeof(DecodeLayer) / 8)) {
    reinterpret_cast<uint64_t*>(&shared.layers[0])[thread] =
        reinterpret_cast<const uint64_t*>(a.layers)[thread];
  }
  __syncthreads();
  if (thread >= kThreads) {
    give_registers<kFeederRegisters>();
    const int feeder = (thread - kThreads) / kWarp;
    if (thread % kWarp == 0 && feeder < kFeeders) Feeder<Row>(shared, a, feeder).run();
  } else {
    take_registers<kRegisters>();
    wait_for_earlier_launches();
    Layers<Row>(shared, a).run();
  }
}

}  // namespace

int64_t decode_layers_exchange_bytes() { return sizeof(Exchange); }

void decode_layers(const DecodeLayersArguments& arguments, GpuStream stream) {
  with_latent_row(arguments.format, [&](auto row) {
    constexpr auto kKernel = layers_kernel<decltype(row)>;
    stream.device().allow_shared_memory(kKernel, sizeof(Shared));
    launch_co_resident("decode_layers", kKernel,
                       {.blocks = kBlocks, .threads = kAllThreads, .shared_bytes = sizeof(Shared)},
                       kBlocks, stream, arguments);
  });
}

}  // namespace fathom::cuda
