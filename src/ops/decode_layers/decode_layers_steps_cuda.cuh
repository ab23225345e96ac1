// Steps of decode_layers()'s consumer warps that the layers of every shape have: attention, the
// residual and its norms.
#pragma once

#include "base/math_constants.h"
#include "ops/decode_layers/decode_layers_consumers_cuda.cuh"
#include "ops/decode_layers/decode_layers_keys_cuda.cuh"
#include "ops/decode_layers/decode_layers_memory_cuda.cuh"
#include "ops/decode_layers/decode_layers_tokens_cuda.cuh"
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

// Reduces up to 16 values over the warp, with fewer shuffles than a reduction of each: a lane gets
// the sum of value lane / (32 / kCount).
template <int kCount>
__device__ inline float sum_of_each(const float (&values)[kCount], int lane) {
  static_assert(kCount <= 16 && (kCount & (kCount - 1)) == 0);
  float x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = values[i];
  int distance = kWarp / 2;
#pragma unroll
  for (int count = kCount / 2; count > 0; count /= 2, distance /= 2) {
    const bool is_high = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      x[i] = (is_high ? x[i + count] : x[i]) +
             __shfl_xor_sync(~0u, is_high ? x[i] : x[i + count], distance);
    }
  }
  float sum = x[0];
#pragma unroll
  for (; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

// Reduces both values of up to four pairs over the warp. Lanes 0 to 15 get the sum of first values,
// the others that of second values, of pair lane % 16 / (16 / kPairCount).
template <int kPairCount>
__device__ inline float sum_pairs(const Pair (&pairs)[kPairCount], int lane) {
  float values[2 * kPairCount];
#pragma unroll
  for (int i = 0; i < kPairCount; ++i) {
    values[i] = pairs[i].first;
    values[kPairCount + i] = pairs[i].second;
  }
  return sum_of_each(values, lane);
}

// A shape's class, Derived, has
//   half_layer(l, is_attention)    from the normed vectors to the rows of o or of down
//   hidden_row(row, is_attention)  the sum of such a row, of the current token
//   wait_for_new_key(l)            until the newest key's cache row is in shared memory
//   run_aside(shared, arguments, row)
//                                  what a producer warp does for a token beside the consumers
//                                  (static)
//   kMeetsRanks                    whether the rows of o and of down are parts of sums over ranks
//
// Weights are read once for all tokens, keys once for those of a sequence. Norms, rotation and
// packets of a token are the work of its share of the warps, so that several tokens take as many
// steps as one.
template <typename Row, typename L, typename Derived>
class Steps : public Consumers<L> {
 public:
  using Base = Consumers<L>;
  using Base::Base;

  __device__ void run() {
    Derived& self = static_cast<Derived&>(*this);
    place_thread();
    // An epoch for the residual before the first layer, and one for each layer.
    const uint32_t first = *static_cast<volatile uint32_t*>(exchange_.epochs) + 1;
    uint32_t sums_before = 0;
    if constexpr (Derived::kMeetsRanks) {
      sums_before = static_cast<volatile uint32_t*>(a_.peers.epochs)[is_token() ? row() : 0];
    }
    if constexpr (kRows == 1) {
      cached_ = a_.positions[0];
    } else {
      if (thread_ < kRows) place_token(shared_, a_, thread_, part_);
      sync_consumers();
      list_runs(shared_, row(), token_thread(), kTokenThreads);
    }
    const int32_t* table = a_.block_tables;
    if (a_.table_starts != nullptr && is_token()) table += a_.table_starts[row()];
    for (int page = token_thread(); page * kPage < cached(); page += kTokenThreads) {
      shared_.pages[row() * (L::kMostTokens / kPage) + page] = table[page];
    }
    if (thread_ == 0) shared_.epoch = first;
    sync_consumers();
    if (thread_ == 0) barrier_arrive(&shared_.pages_known);
    epoch_ = first;
    put_residual();
    // Two passes a layer: attention, experts.
#pragma unroll 1
    for (int half = 0; half < 2 * a_.num_layers; ++half) {
      place_thread();
      const int l = half / 2;
      const bool is_attention = half % 2 == 0;
      epoch_ = first + static_cast<uint32_t>(l) + 1;
      layer_ = &shared_.layers[l & 1];
      norm_residual(is_attention);
      if (is_attention) fetch_next_layer(l);
      self.half_layer(l, is_attention);
      if (half + 1 < 2 * a_.num_layers) {
        Packet* const to = (is_attention ? exchange_.o : exchange_.down)[share()];
        const auto row_sum = [&](int i) { return self.hidden_row(i, is_attention); };
        float* const residual = this->residual();
        if constexpr (Derived::kMeetsRanks) {
          put_sums<L::kHiddenRows>(to, sums_before + static_cast<uint32_t>(half) + 1, row_sum);
        } else {
          put_rows<L::kHiddenRows>(to, [&](int i) { return residual[i] += row_sum(i); });
        }
      }
    }
    write_results();
    // This CTA has had packets of all others, which have read the epochs before.
    if (block_ == 0 && token_thread() == 0) {
      exchange_.epochs[0] = epoch_;
      if (Derived::kMeetsRanks && is_token()) {
        a_.peers.epochs[row()] = sums_before + 2 * static_cast<uint32_t>(a_.num_layers) - 1;
      }
    }
  }

 protected:
  using Base::a_;
  using Base::block_;
  using Base::cache_row;
  using Base::cached;
  using Base::cached_;
  using Base::chunks_;
  using Base::epoch_;
  using Base::exchange_;
  using Base::head_;
  using Base::is_token;
  using Base::kRows;
  using Base::kTokenThreads;
  using Base::kTokenWarps;
  using Base::lane_;
  using Base::layer_;
  using Base::load_x;
  using Base::new_key;
  using Base::part_;
  using Base::place_thread;
  using Base::position;
  using Base::put_rows;
  using Base::put_sums;
  using Base::receive;
  using Base::release_chunk;
  using Base::residual;
  using Base::row;
  using Base::share;
  using Base::shared_;
  using Base::sums;
  using Base::thread_;
  using Base::token_thread;
  using Base::token_warp;
  using Base::vector;
  using Base::wait_for_chunk;
  using Base::warp_;
  using Base::write_scaled_block;
  using Base::write_values;

  // ---- the residual. Each CTA keeps its own rows in fp32 and publishes them rounded to bf16, for
  // the norms. A token's thread t reads packets t, t + kTokenThreads, … of them.

  static constexpr int kOwn = kBlocks * L::kHiddenPackets / kTokenThreads,
                       kOwnValues = packet_values(L::kHiddenRows);
  static_assert(kOwn * kTokenThreads == kBlocks * L::kHiddenPackets);
  __device__ int residual_at(int i) const {
    return (token_thread() + i * kTokenThreads) * kOwnValues;
  }

  // Publishes this CTA's rows of the residual before the first layer, as the experts' step does.
  __device__ void put_residual() const {
    float* const residual = this->residual();
    put_rows<L::kHiddenRows>(exchange_.down[share()], [&](int i) {
      const int at = row() * L::kHidden + block_ * L::kHiddenRows + i;
      float value = 0;
      if (is_token()) {
        value = a_.residual[at];
        if (a_.delta_in != nullptr) {
          value += __bfloat162float(static_cast<const __nv_bfloat16*>(a_.delta_in)[at]);
        }
      }
      return residual[i] = value;
    });
  }

  // Writes the norm of the residual, as the previous step has left it, to the vector.
  __device__ void norm_residual(bool is_attention) {
    const float* const norm = is_attention ? layer_->input_norm : layer_->post_attention_norm;
    // Packets whose weights are loaded ahead: registers do not hold more beside the values.
    constexpr int kAhead = kOwn < 4 ? kOwn : 4;
    float weights[kAhead][kOwnValues];
    const auto load_weights = [&](int i) {
      float(&to)[kOwnValues] = weights[i % kAhead];
      if constexpr (kOwnValues == 4) {
        load_four_ahead(norm + residual_at(i), to);
      } else {
#pragma unroll
        for (int j = 0; j < kOwnValues; ++j) to[j] = load_ahead(norm + residual_at(i) + j);
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_weights(i);
    Packet packets[kOwn];
    const Packet* const all = (is_attention ? exchange_.down : exchange_.o)[row() * kBlocks];
    wait_for_packets(packets, is_attention ? epoch_ - 1 : epoch_,
                     [&](int i) { return all + token_thread() + i * kTokenThreads; });
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float values[kOwnValues];
      unpack_bf16(packets[i], values);
#pragma unroll
      for (int j = 0; j < kOwnValues; ++j) squares += values[j] * values[j];
    }
    const float inverse = inverse_rms(sum_over_token(squares), L::kHidden, a_.eps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float values[kOwnValues];
      unpack_bf16(packets[i], values);
#pragma unroll
      for (int j = 0; j < kOwnValues; ++j) values[j] *= weights[i % kAhead][j] * inverse;
      write_values(vector(), residual_at(i), values);
      if (i + kAhead < kOwn) load_weights(i + kAhead);
    }
    sync_consumers();
  }

  // Also a barrier: all consumer threads have read the vectors when it returns.
  __device__ float sum_over_token(float x) const {
    x = warp_sum(x);
    if (lane_ == 0) shared_.warp_sums[warp_] = x;
    sync_consumers();
    return warp_sum(lane_ < kTokenWarps ? shared_.warp_sums[row() * kTokenWarps + lane_] : 0);
  }

  __device__ void write_results() const {
    if (token_thread() >= L::kHiddenRows || !is_token()) return;
    const int at = row() * L::kHidden + block_ * L::kHiddenRows + token_thread();
    a_.residual[at] = residual()[token_thread()];
    static_cast<__nv_bfloat16*>(a_.delta_out)[at] =
        __float2bfloat16_rn(static_cast<const Derived&>(*this).hidden_row(token_thread(), false));
  }

  __device__ void fetch_next_layer(int l) const {
    constexpr int kWords = sizeof(DecodeLayer) / 8;
    static_assert(kWords <= kWarp && sizeof(DecodeLayer) % 8 == 0);
    if (warp_ != kWarps - 2 || l + 1 == a_.num_layers || lane_ >= kWords) return;
    reinterpret_cast<uint64_t*>(&shared_.layers[(l + 1) & 1])[lane_] =
        reinterpret_cast<const uint64_t*>(a_.layers + l + 1)[lane_];
  }

  // ---- attention

  __device__ const float* turns() const { return a_.cos_sin + int64_t{position()} * kRope; }

  // Called by one warp of the token. One CTA of each head needs the row; one CTA writes it to the
  // cache. `known`, if not null: told when it is in shared memory.
  __device__ void write_cache_row(std::byte* pages, uint64_t* known = nullptr) const {
    if (part_ != key_part(position())) return;
    const float* const from = new_key();
    const Eight latent[2] = {load_eight(from + lane_ * 8), load_eight(from + (lane_ + kWarp) * 8)};
    const Eight key = load_eight(from + kLatent + lane_ % 8 * 8);
    const Eight weight[2] = {load_eight(layer_->kv_a_norm + lane_ * 8),
                             load_eight(layer_->kv_a_norm + (lane_ + kWarp) * 8)};
    write_latent_row<Row>(latent, key, weight, a_.inner_eps, turns(), cache_row(), lane_);
    __syncwarp();
    if (known != nullptr && lane_ == 0) barrier_arrive(known);
    if (head_ > 0 || !is_token()) return;
    const int64_t slot = a_.slots[row()];
    auto* const to = reinterpret_cast<uint4*>(pages + slot * Row::kBytes);
    for (int i = lane_; i < Row::kBytes / 16; i += kWarp) {
      to[i] = reinterpret_cast<const uint4*>(cache_row())[i];
    }
    if (FATHOM_PLANTED(a_, kExtraRow)) {
      reinterpret_cast<uint4*>(pages + (slot ^ 1) * Row::kBytes)[lane_] =
          reinterpret_cast<const uint4*>(cache_row())[lane_];
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

  // The head's query: the rotary part is turned and rounded as a separate launch would store it;
  // the rest goes through W_UK, four rows of 128 columns a warp.
  __device__ void absorb() {
    receive<kQueryRows, kHeadBlocks>(
        [&](int r) { return exchange_.query[r * kBlocks + head_ * kHeadBlocks]; },
        [&](int r, int block, int i, float value) {
          shared_.scratch[r * (kNope + kRope) + block * kQueryRows + i] = value;
        });
    sync_consumers();
    const float* const query = shared_.scratch + row() * (kNope + kRope);
    if (token_warp() == 0) {
      const float2 pair = *reinterpret_cast<const float2*>(query + kNope + lane_ * 2);
      const float2 turn = *reinterpret_cast<const float2*>(turns() + lane_ * 2);
      shared_.queries.rope[row()][lane_] =
          pack_bf16(pair.x * turn.x - pair.y * turn.y, pair.x * turn.y + pair.y * turn.x);
    }
    if constexpr (L::kHasBf16Weights) {
      // Two rows of each half of a kilobyte.
      const uint4 x = narrow(load_eight(query + lane_ * 8 % kNope));
      const uint8_t* const slot = wait_for_chunk(0);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int four = token_warp() + i * kTokenWarps;
        Pair pair =
            multiply_step_bf16<kStepBytes>(slot + four * 2 * kStepBytes + lane_ * 16, x, lane_);
        if (!is_on_diagonal(lane_)) pair = {0, 0};
#pragma unroll
        for (int distance = 1; distance < 16; distance *= 2) {
          pair.first += __shfl_xor_sync(~0u, pair.first, distance);
          pair.second += __shfl_xor_sync(~0u, pair.second, distance);
        }
        if (lane_ % 16 == 0) {
          sums()[four * 4 + lane_ / 16] = pair.first;
          sums()[four * 4 + 2 + lane_ / 16] = pair.second;
        }
      }
    } else {
      float x_scale;
      const Sixteen x = scaled_sixteen(query + lane_ * 16 % kNope, x_scale);
      const uint8_t* const slot = wait_for_chunk(0);
      const float scale =
          reinterpret_cast<const float*>(slot + L::kWeightBytes)[part_ * kAbsorbRows / kScaleRow];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int four = token_warp() + i * kTokenWarps;
        float sum = multiply_step<0>(slot + four * kStepBytes + lane_ * 16, x, lane_).first *
                    (scale * x_scale);
        if (!is_on_diagonal(lane_)) sum = 0;
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) {
          sum += __shfl_xor_sync(~0u, sum, distance);
        }
        if (lane_ % 8 == 0) sums()[four * 4 + lane_ / 8] = sum;
      }
    }
    if (lane_ == 0) release_chunk(0, 1);
    chunks_ += 1;
    sync_consumers();
    put_rows<kAbsorbRows>(exchange_.absorbed[share()], [&](int i) { return sums()[i]; });
  }

  // Groups of warps take the runs in turn, in the order in which they come. One of them begins
  // without keys: that warms the instruction cache while the query is in flight.
  __device__ void attend(int l) {
    const int group = warp_ / kKeyWarps, part = warp_ % kKeyWarps;
    const float softmax_factor = a_.softmax_scale * kLog2E;  // for exp2
    int runs = 0;
    if constexpr (kRows == 1) {
      runs = key_runs_of(cached_ + 1, part_);
    } else {
      runs = num_runs(shared_);
    }
    KeySums<Row, kLaneTokens> sums;
    const int begin = group == kKeyGroups - 1 ? -1 : group;
#pragma unroll 1
    for (int n = begin; n < max(runs, kKeyGroups); n += kKeyGroups) {
      if (n == group) receive_query(l, group, part);
      if (n >= runs) break;
      KeyHalves<Row> keys;
      const KeyRange range = keys_of_run(n, l, keys);
      const int place = key_of_row<Row>(lane_ / 4);
      float scales[kLaneKeys], scores[2 * kLaneKeys];
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        scales[i] = 1;
        if constexpr (Row::kIsScaled) {
          scales[i] = reinterpret_cast<const float*>(keys.key(i, place) + Row::kScalesAt)[part];
        }
      }
      int scored = place;
      const int newest = range.cached - 1 - range.begin;  // cached key
      if (FATHOM_PLANTED(a_, kWrongKey) && newest < kKeyRun && newest % 8 == place) {
        scored -= place % 2;
      }
      multiply_query(keys, scored, scales, shared_.queries, part, lane_, softmax_factor, scores);
      add_parts((n + kKeyGroups) / kKeyGroups & 1, group, part, scores);
      bool is_of[kLaneTokens];
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t) {
        // The token's number in the sequence, and the last key that it attends to.
        const int number = lane_ % 4 * 2 + t - range.first;
        is_of[t] = number >= 0 && number < range.count;
        const int last = is_of[t] ? range.cached + number : -1;
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
          const int key = range.begin + i * 8 + place;
          bool is_seen = key <= last;
          if (FATHOM_PLANTED(a_, kHiddenNeighbour)) is_seen &= key < range.cached || key == last;
          if (!is_seen) scores[2 * i + t] = -INFINITY;
        }
        if (FATHOM_PLANTED(a_, kForeignKeys)) is_of[t] = true;
      }
      sums.add(keys, scales, scores, is_of, part, lane_);
      __syncwarp();
      if (n >= 0 && lane_ < kPieces) release_chunk(n * kPieces + lane_, kKeyWarps);
    }
    place_thread();  // so that the loop above holds no registers for it
    chunks_ += runs * kPieces;
    sync_consumers();  // all have read the scores: scratch is free
    join_groups(group, part, sums);
  }

  static constexpr int kLaneTokens = kRows == 1 ? 1 : 2, kPieces = kKeyPieces<Row, L>;

  // A run: from key `begin` of a sequence on, which has `cached` keys and then those of the
  // launch's tokens `first` to `first` + `count` - 1.
  struct KeyRange {
    int begin = 0, first = 0, count = 0, cached = 0;
  };

  // Waits for a run. n < 0: no keys.
  __device__ KeyRange keys_of_run(int n, int l, KeyHalves<Row>& keys) const {
    KeyRange range;
    keys.begin[0] = keys.begin[1] = reinterpret_cast<const std::byte*>(shared_.ring[0]);
    if (n < 0) return range;
    int run = n;
    if constexpr (kRows == 1) {
      range.count = 1;
      range.cached = cached_;
    } else {
      const auto& tokens = shared_.of_rows;
      const int at = tokens.run_order[n];
      run = at / kRows;
      range.first = at % kRows;
      range.count = tokens.count[range.first];
      range.cached = tokens.cached[range.first];
    }
    range.begin = (run * kHeadBlocks + part_) * kKeyRun;
    constexpr int kHalf = kKeyRun / 2 * Row::kBytes;
    keys.begin[0] = reinterpret_cast<const std::byte*>(wait_for_chunk(n * kPieces));
    keys.begin[1] = kPieces == 1 ? keys.begin[0] + kHalf
                                 : reinterpret_cast<const std::byte*>(wait_for_chunk(n * 2 + 1));
    if (range.begin + kKeyRun > range.cached) put_newest_keys(n, l, range);
    return range;
  }

  // Completes a run, by its warps: behind the cached keys those of this step, then zeros, since the
  // slot may hold NaN there, which a weight of 0 does not remove.
  __device__ void put_newest_keys(int n, int l, const KeyRange& range) const {
    constexpr int kKeys = kKeyRun / kPieces, kParts = Row::kBytes / 16;  // of 16 bytes
    const int group = warp_ / kKeyWarps, from = max(range.cached - range.begin, 0),
              newest = range.begin + from - range.cached;  // the first one's number
    for (int r = newest; r < min(range.begin + kKeyRun - range.cached, range.count); ++r) {
      static_cast<const Derived&>(*this).wait_for_new_key(range.first + r, l);
    }
#pragma unroll 1
    for (int i = warp_ % kKeyWarps; i < kKeyRun - from; i += kKeyWarps) {
      const int place = from + i, number = newest + i;
      const unsigned chunk = static_cast<unsigned>(chunks_ + n * kPieces + place / kKeys);
      auto* const to =
          reinterpret_cast<uint4*>(shared_.ring[chunk % L::kSlots] + place % kKeys * Row::kBytes);
      const auto* const row =
          reinterpret_cast<const uint4*>(shared_.row + (range.first + number) * kMostRowBytes);
#pragma unroll 1
      for (int j = lane_; j < kParts; j += kWarp) {
        if (FATHOM_PLANTED(a_, kStaleKeys) && number >= range.count) continue;
        to[j] = number < range.count ? row[j] : make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();  // the slot's next bytes come by bulk copies
    named_barrier(kAttention + group, kKeyWarps * kWarp);
  }

  // The tokens' queries: a warp of group r receives its part of the columns of token r's.
  // Warps that receive none do not meet: one may still make the new cache row.
  __device__ void receive_query(int l, int group, int part) const {
    static_assert(packet_values(kAbsorbRows) == 4 && kReceivers == kKeyWarps * kWarp);
    if (group < kRows) {
      const Packet* const from =
          exchange_.absorbed[group * kBlocks + head_ * kHeadBlocks] + part * kWarp + lane_;
      Packet packet[1];
      wait_for_packets(packet, epoch_, [&](int) { return from; });
      float values[4];
      unpack_bf16(packet[0], values);
      store_query<Row>(values, part, group, lane_, shared_.queries);
      barrier_arrive(&shared_.query_known);
    }
    barrier_wait(&shared_.query_known, l & 1);
  }

  // Adds the parts of a run's scores that the group's warps have. turn: 0 and 1 alternately.
  __device__ void add_parts(int turn, int group, int part, float (&scores)[2 * kLaneKeys]) const {
    constexpr int kQuarters = (kRows + 1) / 2, kEach = 8 * kQuarters;  // lanes with tokens
    static_assert(2 * kWarps * kEach * 4 <= kKeyAt);
    auto* const parts = reinterpret_cast<float4*>(shared_.scratch) +
                        (turn * kKeyGroups + group) * kKeyWarps * kEach + lane_ / 4 * kQuarters +
                        lane_ % 4;
    const bool has_tokens = lane_ % 4 < kQuarters;
    if (has_tokens) {
      parts[part * kEach] = make_float4(scores[0], scores[1], scores[2], scores[3]);
    }
    named_barrier(kAttention + group, kKeyWarps * kWarp);
    if (!has_tokens) return;
#pragma unroll
    for (float& score : scores) score = 0;
#pragma unroll
    for (int warp = 0; warp < kKeyWarps; ++warp) {
      const float4 x = parts[warp * kEach];
      scores[0] += x.x;
      scores[1] += x.y;
      scores[2] += x.z;
      scores[3] += x.w;
    }
  }

  // The CTA's partial results, normalized, and their log-sum-exp.
  __device__ void join_groups(int group, int part, KeySums<Row, kLaneTokens>& own) const {
    // Sums of as many groups at a time as scratch holds; the gap is against bank conflicts.
    constexpr int kStride = kLatent + 8, kTogether = kKeyGroups * kRows * kStride <= L::kScratch
                                                         ? kKeyGroups
                                                         : kKeyGroups / 2;
    static_assert(kTogether * kRows * kStride <= L::kScratch);
    own.end();
    const auto token = [&](int t) { return lane_ % 4 * 2 + t; };
#pragma unroll
    for (int t = 0; t < kLaneTokens; ++t) {
      if (part > 0 || lane_ >= 4 || token(t) >= kRows) continue;
      shared_.most[group * kRows + token(t)] = own.most[t];
      shared_.total[group * kRows + token(t)] = own.total[t];
    }
    float weights[kKeyGroups], largest = -INFINITY, all = 0, sums[kRows] = {};
#pragma unroll
    for (int first = 0; first < kKeyGroups; first += kTogether) {
      if (first > 0) sync_consumers();  // the sums before have been read
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t) {
        if (group / kTogether * kTogether != first || token(t) >= kRows) continue;
        own.store(
            shared_.scratch + ((group - first) * kRows + token(t)) * kStride + part * kKeyColumns,
            t, lane_);
      }
      sync_consumers();
      if (first == 0) {
        float most[kKeyGroups];
#pragma unroll
        for (int i = 0; i < kKeyGroups; ++i) {
          most[i] = shared_.most[i * kRows + row()];
          largest = fmaxf(largest, most[i]);
        }
#pragma unroll
        for (int i = 0; i < kKeyGroups; ++i) {
          weights[i] = most[i] == -INFINITY ? 0 : exp2_fast(most[i] - largest);
          all = fmaf(weights[i], shared_.total[i * kRows + row()], all);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          sums[k] = fmaf(
              weights[first + i],
              shared_.scratch[(i * kRows + row()) * kStride + token_thread() + k * kTokenThreads],
              sums[k]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int place = token_thread() + k * kTokenThreads;
      // Four lanes have four neighbouring columns.
      static_assert(kPartValues == 4);
      const uint32_t value = __half_as_ushort(__float2half_rn(all == 0 ? 0 : sums[k] / all));
      const uint32_t low = value | __shfl_down_sync(~0u, value, 1) << 16;
      const uint32_t high = __shfl_down_sync(~0u, low, 2);
      if (lane_ % 4 != 0) continue;
      const uint32_t lse = __float_as_uint(all == 0 ? -INFINITY : largest + log2_fast(all));
      const int column = place / kKeyColumns * kKeyColumns +
                         KeySums<Row, kLaneTokens>::column_of_place(place % kKeyColumns);
      store_packet(&exchange_.part[share()][column / kPartValues], low | uint64_t{high} << 32,
                   lse | uint64_t{epoch_} << 48);
    }
  }

  // Combines the splits of the head's eight CTAs and multiplies by W_UV, one row a warp, or two.
  __device__ void values() {
    // Four columns a thread of the token's first warps.
    const int column = token_thread();
    if (column < kPartPackets) {
      Packet packets[kHeadBlocks];
      const Packet* const from = exchange_.part[row() * kBlocks + head_ * kHeadBlocks] + column;
      wait_for_packets(packets, epoch_, [&](int i) { return from + i * kPartPackets; });
      const auto lse = [&](int i) {
        return __uint_as_float(static_cast<uint32_t>(packets[i].high));
      };
      float most = lse(0);
#pragma unroll
      for (int i = 1; i < kHeadBlocks; ++i) most = fmaxf(most, lse(i));
      float all = 0, sums[kPartValues] = {};
#pragma unroll
      for (int i = 0; i < kHeadBlocks; ++i) {
        const float weight = exp2_fast(lse(i) - most);
        all += weight;
        const float2 low = widen_f16(static_cast<uint32_t>(packets[i].low)),
                     high = widen_f16(static_cast<uint32_t>(packets[i].low >> 32));
        sums[0] = fmaf(weight, low.x, sums[0]);
        sums[1] = fmaf(weight, low.y, sums[1]);
        sums[2] = fmaf(weight, high.x, sums[2]);
        sums[3] = fmaf(weight, high.y, sums[3]);
      }
#pragma unroll
      for (float& sum : sums) sum /= all;
      write_values(vector(), column * kPartValues, sums);
    }
    sync_consumers();
    const uint8_t* const slot = wait_for_chunk(0);
    static_assert(kValueRows == kWarps);
    if constexpr (L::kHasBf16Weights) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = token_warp() + i * kTokenWarps;
        // The row's two halves as two rows.
        float value = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 x = *reinterpret_cast<const uint4*>(vector() + (j * kWarp + lane_) * 16);
          value +=
              multiply_step_bf16<0>(slot + (row * 2 + j) * kStepBytes + lane_ * 16, x, lane_).first;
        }
        value = warp_sum(is_on_diagonal(lane_) ? value : 0);
        if (lane_ == 0) sums()[row] = value;
      }
    } else {
      static_assert(kLatent == kStepBytes);
      const Sixteen x = load_x(lane_ * 16);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = token_warp() + i * kTokenWarps;
        float value = multiply_step<0>(slot + row * kLatent + lane_ * 16, x, lane_).first *
                      reinterpret_cast<const float*>(slot + L::kWeightBytes)[lane_ / 8];
        value = warp_sum(is_on_diagonal(lane_) ? value : 0);
        if (lane_ == 0) sums()[row] = value;
      }
    }
    if (lane_ == 0) release_chunk(0, 1);
    chunks_ += 1;
    sync_consumers();
    put_rows<kValueRows>(exchange_.value[share()], [&](int i) { return sums()[i]; });
  }

  // The heads' values to the vector, four columns a packet; beside e4m3 in blocks of 128, one a
  // warp, each with its own scale.
  __device__ void receive_values() const {
    constexpr int kPackets = kBlocks * kValuePackets;  // of a token
    static_assert(packet_values(kValueRows) == 4 && kPackets == kRows * kTokenThreads);
    const auto place = [&](int i) { return token_thread() + i * kTokenThreads; };
    const auto from = [&](int i) {
      int p = place(i);
      if (FATHOM_PLANTED(a_, kSwappedHead) && p >= kPackets - 2 * kHeadBlocks * kValuePackets) {
        p ^= kHeadBlocks * kValuePackets;
      }
      return exchange_.value[row() * kBlocks] + p;
    };
    Packet packets[kRows];
    if (FATHOM_PLANTED(a_, kSkippedHandoff)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) packets[i] = load_packet(from(i));
    } else {
      wait_for_packets(packets, epoch_, from);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (L::kHasBf16Weights) {
        reinterpret_cast<uint64_t*>(vector())[place(i)] = packets[i].low;
      } else {
        float values[4];
        unpack_bf16(packets[i], values);
        write_scaled_block(place(i) / kWarp, values);
      }
    }
    sync_consumers();
  }
};

}  // namespace fathom::cuda::decode_layers_kernel
