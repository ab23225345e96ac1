// decode_layers() for the TP8 slice of DeepSeek-V3: 16 heads with query compression, 256 experts of
// 256 columns and a shared one, weights in e4m3; one token, two, or up to four. Experts that
// several tokens choose are read once.
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
#include <type_traits>

#include "ops/decode_layers/decode_layers_feed_cuda.cuh"
#include "ops/decode_layers/decode_layers_launch_cuda.cuh"
#include "ops/decode_layers/decode_layers_steps_cuda.cuh"
#include "ops/decode_layers/decode_layers_units_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {
namespace {

constexpr int kQkvPairs = (V3Tp8::kQLora + kLatent + kRope) / 2;  // pairs of rows
constexpr int kMostQkvRows = 2 * (kQkvPairs / kBlocks + 1);
constexpr int kQkvPackets = packets(kMostQkvRows), kQkvValues = packet_values(kMostQkvRows);

// Pairs of rows of q_kv_a before CTA b's.
__device__ constexpr int first_qkv_pair(int b) { return b * kQkvPairs / kBlocks; }

template <int kTokens>
struct Layout : V3Tp8 {
  static constexpr bool kHasBf16Weights = false;
  static constexpr int kRows = kTokens;
  // A thread's, of consumers and of producers.
  static constexpr int kRegisters = kRows == 1 ? 104 : 112, kFeederRegisters = kRows == 1 ? 64 : 32;
  static constexpr int kExperts = kChosen + 1;           // the shared expert first
  static constexpr int kHiddenRows = kHidden / kBlocks;  // of o and of down
  static constexpr int kInterRows = kInter / kBlocks;    // of gate, and of up, of an expert
  static constexpr int kHiddenPackets = packets(kHiddenRows),
                       kActivationPackets = packets(kExperts * kInterRows);
  using Exchanged = Exchange<kRows, kQkvPackets, kHiddenPackets, kActivationPackets>;
  // A pair of warps takes one chunk.
  static constexpr int kSlots = kRows <= 2 ? 10 : 8, kWeightBytes = 16384,
                       kSlotBytes = kWeightBytes + 256;
  static constexpr int kInFlight = 4;
  static constexpr int kScratch = 4608;  // floats: activations of four tokens, 16 bits each
  static constexpr int kSums =
      2 * most_units(kRows, kChosen) * kInterRows * 2;  // rows, or halves of rows
  static constexpr int kMostScales = 32;

  static constexpr int kQueryChunkRows = 8, kOChunkRows = 8;
  static constexpr int kQueryChunks = kQueryRows / kQueryChunkRows,
                       kOChunks = kHiddenRows / kOChunkRows;
  static constexpr int kRouterRowBytes = kHidden * 2;
  static constexpr int kRouterRows = kRouted / kBlocks;

  static_assert(kGroups == kRouted / kWarp);
  static_assert(kHeads * kV / kScaleRow <= kMostScales &&
                kExperts * kInter / kScaleRow <= kMostScales);
  static_assert(kHidden / kScaleRow * 4 <= kSlotBytes - kWeightBytes);
  static_assert(2 * kHidden <= kWeightBytes && kQueryChunkRows * kQLora <= kWeightBytes);
  static_assert(kOChunkRows * kHeads * kV <= kWeightBytes && kHiddenRows * kInter <= kWeightBytes);
  static_assert(kQueryRows % kQueryChunkRows == 0 && kHiddenRows % kOChunkRows == 0);
  static_assert(kRows * kExperts * kInter <= 2 * kScratch && kExperts * kInter <= kHidden &&
                kKeyAt + kRows * (kLatent + kRope) <= kScratch);
};
static_assert(sizeof(Shared<Layout<1>>) <= 227 * 1024 && sizeof(Shared<Layout<2>>) <= 227 * 1024 &&
              sizeof(Shared<Layout<4>>) <= 227 * 1024);

// ---- producer threads

template <typename Row, typename L>
class Feeder : public FeederOf<Row, L, Feeder<Row, L>> {
 public:
  using Base = FeederOf<Row, L, Feeder<Row, L>>;
  using Base::Base;
  static constexpr int kSteps = 9;

  __device__ static unsigned in_flight(int) { return L::kInFlight; }

  __device__ int count_of(int step, int l) {
    switch (step) {
      case kQkvA:
        return first_qkv_pair(block_ + 1) - first_qkv_pair(block_);
      case kQueryB:
        return L::kQueryChunks;
      case kKeys:
        return this->count_of_keys(l);
      case kO:
        return L::kOChunks;
      case kRouterAndShared:
        return L::kRouterRows + 2;
      case kGateUp:
        barrier_wait(&shared_.chosen, l & 1);
        return 2 * num_units(shared_);
      case kDown:
        return 1 + num_units(shared_);
      default:
        return 1;
    }
  }

  __device__ Chunk chunk_of(int step, int i, int l) {
    const DecodeLayer& layer = shared_.layers[l & 1];
    switch (step) {
      case kQkvA:
        return rows_of(layer.q_kv_a, (first_qkv_pair(block_) + i) * 2, 2, L::kHidden);
      case kQueryB:
        return rows_of(layer.q_b, (block_ * L::kQueryChunks + i) * L::kQueryChunkRows,
                       L::kQueryChunkRows, L::kQLora);
      case kAbsorb:  // scales of the whole head
        return {layer.uk.values, int64_t{block_} * kAbsorbRows * kNope, kAbsorbRows * kNope,
                layer.uk.scales + block_ / kHeadBlocks * (kLatent / kScaleRow),
                kLatent / kScaleRow};
      case kKeys:
        return this->keys_of(i, l);
      case kValues:
        return rows_of(layer.uv, block_ * kValueRows, kValueRows, kLatent);
      case kO: {
        Chunk chunk = rows_of(layer.o, (block_ * L::kOChunks + i) * L::kOChunkRows, L::kOChunkRows,
                              kHeads * kV);
        if (FATHOM_PLANTED(a_, kWrongLayerScale) && block_ > kBlocks / 2) {
          chunk.scales -= kHeads * kV / kScaleRow;
        }
        return chunk;
      }
      case kRouterAndShared:
        if (i >= L::kRouterRows) return gate_up_of(layer.shared_gate_up, 0, i - L::kRouterRows);
        return {layer.router, int64_t{block_ * L::kRouterRows + i} * L::kRouterRowBytes,
                L::kRouterRowBytes, nullptr, 0};
      case kGateUp:
        return gate_up_of(layer.gate_up, shared_.ids[i / 2], i % 2);
      default:
        if (i == 0) return down_of(layer.shared_down, 0);
        return down_of(layer.down, shared_.ids[i - 1]);
    }
  }

 private:
  enum Step { kQkvA, kQueryB, kAbsorb, kKeys, kValues, kO, kRouterAndShared, kGateUp, kDown };
  using Base::a_;
  using Base::block_;
  using Base::shared_;

  // This CTA's rows of an expert's gate, or of its up.
  __device__ Chunk gate_up_of(const ScaledMatrix& matrix, int64_t expert, int is_up) const {
    return rows_of(matrix, (expert * 2 + is_up) * L::kInter + block_ * L::kInterRows, L::kInterRows,
                   L::kHidden);
  }

  // Rows that share one row of scales.
  __device__ static Chunk rows_of(const ScaledMatrix& matrix, int64_t row, int rows, int columns) {
    const int scales = columns / kScaleRow;
    return {matrix.values, row * columns, rows * columns, matrix.scales + row / kScaleRow * scales,
            scales};
  }

  // Scales of the rows' one or two blocks of 128, starting at an even block.
  __device__ Chunk down_of(const ScaledMatrix& matrix, int64_t expert) const {
    const int first = block_ * L::kHiddenRows / kScaleRow / 2 * 2,
              last = (block_ * L::kHiddenRows + L::kHiddenRows - 1) / kScaleRow;
    return {matrix.values, (expert * L::kHidden + block_ * L::kHiddenRows) * L::kInter,
            L::kHiddenRows * L::kInter,
            matrix.scales + (expert * (L::kHidden / kScaleRow) + first) * (L::kInter / kScaleRow),
            last - first < 2 ? 4 : 8};
  }
};

// ---- consumer warps

template <typename Row, typename L, bool kOfRanks>
class Layers : public Steps<Row, L, Layers<Row, L, kOfRanks>> {
 public:
  using Base = Steps<Row, L, Layers<Row, L, kOfRanks>>;
  using Base::Base;
  static constexpr bool kMeetsRanks = kOfRanks;

  __device__ static void run_aside(Shared<L>&, const DecodeLayersArguments&, int) {}

  __device__ void half_layer(int l, bool is_attention) {
    if (!is_attention) router();
    constexpr int kShared = 2;  // chunks of the shared expert's gate and up
    if constexpr (kRows == 1) {
      // Some warps choose while others begin with the shared expert.
      if (!is_attention) choose();
      products_of_hidden(is_attention ? num_qkv_chunks() : kShared + 2 * num_units(shared_), 0);
    } else if (is_attention) {
      products_of_hidden(num_qkv_chunks(), 0);
    } else {
      // The shared expert while logits are on their way; then all warps choose.
#pragma unroll 1
      for (int first = 0; first <= kShared; first += kShared) {
        if (first > 0) {
          choose();
          sync_consumers();
          if (warp_ == 0) make_units(shared_, a_, lane_);
          sync_consumers();
        }
        products_of_hidden(first > 0 ? 2 * num_units(shared_) : kShared, first);
      }
    }
    if (is_attention) {
      put_rows<kMostQkvRows>(exchange_.input[share()],
                             [&](int i) { return sums()[i * 2] + sums()[i * 2 + 1]; });
      q_b(a_.pages + l * a_.layer_bytes);
      absorb();
      attend(l);
      values();
      o();
    } else {
      put_rows<L::kExperts * L::kInterRows>(exchange_.activation[share()],
                                            [&](int i) { return activation(i); });
      down();
    }
  }

  // absorb() has met all warps since.
  __device__ void wait_for_new_key(int, int) const {}

  __device__ float hidden_row(int i, bool) const { return sums()[i]; }

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
  using Base::layer_;
  using Base::new_key;
  using Base::pair_;
  using Base::put_rows;
  using Base::receive;
  using Base::receive_values;
  using Base::release_chunk;
  using Base::row;
  using Base::share;
  using Base::shared_;
  using Base::slot_of;
  using Base::sum_over_token;
  using Base::sums;
  using Base::thread_;
  using Base::token_thread;
  using Base::token_warp;
  using Base::values;
  using Base::vector;
  using Base::wait_for_chunk;
  using Base::warp_;
  using Base::write_cache_row;
  using Base::write_value;
  // ---- GEMVs

  // Multiplies 512 kSteps columns of two rows, kStride bytes apart, with the vectors of kTokens
  // tokens; vectors and their scales: the first one's; scales: those of the columns' blocks. The
  // sums are the first row's in the lower lanes, the second row's in the upper ones (sum_pairs()).
  template <int kTokens, int kStride, int kSteps>
  __device__ float two_rows(const uint8_t* weights, const float* scales, const uint8_t* vectors,
                            const float* x_scales) const {
    // Whole loops of several tokens spill registers.
    constexpr int kUnroll = kRows == 1 ? kSteps : kTokens == 4 ? 1 : 2;
    Pair sums[kTokens] = {};
    weights += lane_ * 16;
    vectors += lane_ * 32;
    scales += lane_ / 8;
#pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int r = 0; r < kTokens; ++r) {
        const auto* const x =
            reinterpret_cast<const uint4*>(vectors + r * kVectorBytes + i * 2 * kStepBytes);
        const Pair more = multiply_step<kStride>(weights + i * kStepBytes, {x[0], x[1]}, lane_);
        float scale = scales[i * 4];
        if (x_scales != nullptr) scale *= x_scales[r * L::kMostScales + i * 4 + lane_ / 8];
        sums[r].first = fmaf(more.first, scale, sums[r].first);
        sums[r].second = fmaf(more.second, scale, sums[r].second);
      }
    }
#pragma unroll
    for (Pair& pair : sums) {
      if (!is_on_diagonal(lane_)) pair = {0, 0};
    }
    return sum_pairs(sums, lane_);
  }

  // Stores what two_rows() returned: for each token, whose sums lie kSums apart, the first row's
  // sum at `to` and the second row's `step` behind it.
  template <int kTokens>
  __device__ void store_two_rows(float sum, float* to, int step) const {
    constexpr int kLanes = 16 / kTokens;  // that have the same sum
    if (lane_ % kLanes != 0) return;
    to[lane_ % 16 / kLanes * L::kSums + lane_ / 16 * step] = sum;
  }

  __device__ int num_qkv_chunks() const {
    return first_qkv_pair(block_ + 1) - first_qkv_pair(block_);
  }

  // Rows of q_kv_a, or of the experts' gate and up in turn: two rows a chunk, half the columns a
  // warp. Sums of chunk i go to the place of chunk `first` + i. Routed experts, behind the first
  // chunks, are multiplied with the vectors of those tokens that have chosen them.
  __device__ void products_of_hidden(int count, int first) {
    constexpr int kSteps = L::kHidden / 2 / kStepBytes;
#pragma unroll 1
    for (int i = pair_; i < count; i += kPairs) {
      const uint8_t* const slot = wait_for_chunk(i);
      const auto* const scales = reinterpret_cast<const float*>(slot + L::kWeightBytes) +
                                 half_ * (L::kHidden / 2 / kScaleRow);
      const auto multiply = [&]<int kTokens>(std::integral_constant<int, kTokens>, int r) {
        const float sum = two_rows<kTokens, L::kHidden, kSteps>(
            slot + half_ * (L::kHidden / 2), scales,
            shared_.vector + r * kVectorBytes + half_ * L::kHidden, nullptr);
        store_two_rows<kTokens>(sum, shared_.sums + r * L::kSums + (first + i) * 4 + half_, 2);
      };
      constexpr uint32_t kAll = (1u << kRows) - 1;
      uint32_t tokens = kAll;
      if constexpr (kRows > 1) {
        if (first > 0) tokens = shared_.of_rows.tokens_of[(first + i) / 2];
      }
      if (tokens == kAll) {
        multiply(std::integral_constant<int, kRows>(), 0);
      } else if constexpr (kRows > 1) {
#pragma unroll 1
        for (; tokens != 0; tokens &= tokens - 1) {
          multiply(std::integral_constant<int, 1>(), __ffs(static_cast<int>(tokens)) - 1);
        }
      }
      __syncwarp();
      if (lane_ == 0) release_chunk(i, kWarps / 2);
    }
    chunks_ += count;
    sync_consumers();
  }

  // kChunkRows rows of kColumns a chunk; each warp of the pair multiplies half of them. Results go
  // to `sums`.
  template <int kChunkRows, int kColumns>
  __device__ void products(int chunks, const float* x_scales) const {
    constexpr int kHalf = kChunkRows / 2;
    if (pair_ >= chunks) return;
    const uint8_t* const slot = wait_for_chunk(pair_);
    const auto* const scales = reinterpret_cast<const float*>(slot + L::kWeightBytes);
#pragma unroll 1
    for (int i = half_ * kHalf; i < (half_ + 1) * kHalf; i += 2) {
      const float sum = two_rows<kRows, kColumns, kColumns / kStepBytes>(
          slot + i * kColumns, scales, shared_.vector, x_scales);
      store_two_rows<kRows>(sum, shared_.sums + pair_ * kChunkRows + i, 1);
    }
    if (lane_ == 0) release_chunk(pair_, kWarps / 2);
  }

  // Normalized q_a; the new cache rows; the head's queries.
  __device__ void q_b(std::byte* pages) {
    receive_qkv();
    products<L::kQueryChunkRows, L::kQLora>(L::kQueryChunks, nullptr);
    chunks_ += L::kQueryChunks;
    sync_consumers();
    put_rows<kQueryRows>(exchange_.query[share()], [&](int i) { return sums()[i]; });
    // While the other CTAs' queries arrive.
    if (token_warp() == kTokenWarps - 1) write_cache_row(pages);
  }

  __device__ void receive_qkv() const {
    constexpr int kPackets = kBlocks * kQkvPackets,  // of a token
        kTimes = (kPackets + kTokenThreads - 1) / kTokenThreads;
    int first[kTimes], count[kTimes];  // rows of a packet
    float weights[kTimes][kQkvValues];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int p = token_thread() + i * kTokenThreads;
      const int from = min(p / kQkvPackets, kBlocks - 1);
      first[i] = first_qkv_pair(from) * 2 + p % kQkvPackets * kQkvValues;
      count[i] = p < kPackets ? first_qkv_pair(from + 1) * 2 - first[i] : 0;
#pragma unroll
      for (int j = 0; j < kQkvValues; ++j) {
        weights[i][j] = load_ahead(layer_->q_a_norm + min(first[i] + j, L::kQLora - 1));
      }
    }
    const Packet* const all = exchange_.input[row() * kBlocks] + token_thread();
    Packet packets[kTimes] = {};
    if (kTimes > 1 || count[0] > 0) {
      wait_for_packets(packets, epoch_, [&](int i) {
        return kTimes > 1 && count[i] <= 0 ? nullptr : all + i * kTokenThreads;
      });
    }
    float values[kTimes][kQkvValues], squares = 0;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      unpack_bf16(packets[i], values[i]);
#pragma unroll
      for (int j = 0; j < kQkvValues; ++j) {
        const int at = first[i] + j;
        if (j < count[i] && at < L::kQLora) squares += values[i][j] * values[i][j];
        if (j < count[i] && at >= L::kQLora) new_key()[at - L::kQLora] = values[i][j];
      }
    }
    const float inverse = inverse_rms(sum_over_token(squares), L::kQLora, a_.inner_eps);
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
#pragma unroll
      for (int j = 0; j < kQkvValues; ++j) {
        if (j < count[i] && first[i] + j < L::kQLora) {
          write_value(vector(), first[i] + j, weights[i][j] * (values[i][j] * inverse));
        }
      }
    }
    sync_consumers();
  }

  __device__ void o() {
    receive_values();
    products<L::kOChunkRows, kHeads * kV>(L::kOChunks, shared_.x_scales);
    chunks_ += L::kOChunks;
    sync_consumers();
  }

  // ---- experts

  // Seven warps a row, 256 columns at a time.
  __device__ void router() {
    constexpr int kColumns = kWarp * 8, kRowWarps = 7, kSteps = L::kHidden / kColumns / kRowWarps;
    static_assert(kSteps * kRowWarps * kColumns == L::kHidden && L::kRouterRows == 2);
    const int expert = warp_ / 8, part = warp_ % 8;
    if (part < kRowWarps) {
      const uint8_t* const weights = wait_for_chunk(expert);
      float sums[kRows] = {};
#pragma unroll 2
      for (int i = 0; i < kSteps; ++i) {
        const int at = (part * kSteps + i) * kColumns + lane_ * 8;
        const Eight w = widen(*reinterpret_cast<const uint4*>(weights + at * 2));
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const uint4 x =
              *reinterpret_cast<const uint4*>(shared_.vector + r * kVectorBytes + at * 2);
          const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 two = widen_f16(words[j]);
            sums[r] = fmaf(w.v[2 * j], two.x, sums[r]);
            sums[r] = fmaf(w.v[2 * j + 1], two.y, sums[r]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane_ == 0) shared_.warp_sums[r * kWarps + warp_] = sum;
      }
    }
    sync_consumers();
    if (thread_ < kRows) {
      const float* const parts = shared_.warp_sums + thread_ * kWarps;
      float logits[2] = {};
#pragma unroll
      for (int j = 0; j < kRowWarps; ++j) {
        logits[0] += parts[j];
        logits[1] += parts[8 + j];
      }
      store_packet(&exchange_.logits[thread_ * kBlocks + block_],
                   __float_as_uint(logits[0]) | uint64_t{__float_as_uint(logits[1])} << 32,
                   uint64_t{epoch_} << 48);
      if (thread_ == 0) {
        for (int i = 0; i < L::kRouterRows; ++i) release_chunk(i, kWarps);
      }
    }
    chunks_ += L::kRouterRows;
  }

  // The rules of gate() (ops/gate/gate.h) for kSigmoidBias and groups of 32, by eight warps, one
  // token's the last: one group a warp, one expert a lane; of four tokens two at a time. The other
  // warps of one token do not wait: the chunks of routed experts come later. A NaN ranks below all
  // numbers.
  __device__ void choose() const {
    static_assert(kThreads == 2 * L::kRouted);
    constexpr int kTogether = kRows == 4 ? 2 : 1;
    if (kRows == 1 && warp_ < kWarps - L::kGroups) return;
    const int half = warp_ / L::kGroups, barrier = kSomeConsumers + half;
    const int expert = thread_ & (L::kRouted - 1), group = expert / kWarp;
    const auto token = [&](int t) { return kRows == 1 ? 0 : half * kTogether + t; };
    const auto group_values = [&](int t) {
      return shared_.scratch + kRows * L::kRouted + token(t) * L::kGroups;
    };
    const auto keys = [&](int t) {
      return reinterpret_cast<uint32_t*>(shared_.scratch) + token(t) * L::kRouted;
    };
    const auto weights = [&](int t) { return shared_.weights + token(t) * L::kExperts; };
    const float bias = load_ahead(layer_->router_bias + expert);
    Packet packets[kTogether];
    wait_for_packets(packets, epoch_,
                     [&](int t) { return exchange_.logits + token(t) * kBlocks + expert / 2; });
    float scores[kTogether];
    uint32_t own_keys[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const float logit =
          __uint_as_float(static_cast<uint32_t>(packets[t].low >> (expert % 2 * 32)));
      scores[t] = 1 / (1 + expf(-logit));
      const float choice = scores[t] + bias;
      const uint32_t key = own_keys[t] = keys(t)[expert] = order_key(choice);
      // A group's rank is the sum of its best two scores.
      const uint32_t best = __reduce_max_sync(~0u, key);
      const bool is_best = lane_ == __ffs(static_cast<int>(__ballot_sync(~0u, key == best))) - 1;
      const uint32_t second = __reduce_max_sync(~0u, is_best ? 0 : key);
      const bool is_second =
          lane_ == __ffs(static_cast<int>(__ballot_sync(~0u, !is_best && key == second))) - 1;
      const float both = warp_sum(is_best || is_second ? choice : 0);
      if (lane_ == 0) group_values(t)[group] = both;
    }
    named_barrier(barrier, L::kRouted);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const uint32_t own = order_key(group_values(t)[lane_ % L::kGroups]), key = own_keys[t];
      int better = 0;
#pragma unroll
      for (int i = 0; i < L::kGroups; ++i) {
        const uint32_t other = __shfl_sync(~0u, own, i);
        better += other > own || (other == own && i < lane_ % L::kGroups);
      }
      uint32_t kept = __ballot_sync(
          ~0u, lane_ < L::kGroups && better < static_cast<int>(a_.gate.groups_per_token));
      // An expert's rank within the kept groups; ties go to the lower index.
      const bool runs = (kept >> group & 1) != 0;
      int place = 0;
#pragma unroll 1
      for (; runs && kept != 0; kept &= kept - 1) {
        const int other_group = __ffs(static_cast<int>(kept)) - 1;
        const uint32_t least = other_group < group ? key : key + 1;
#pragma unroll 4
        for (int i = 0; i < kWarp; i += 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(keys(t) + other_group * kWarp + i);
          place += static_cast<int>(four.x >= least) + static_cast<int>(four.y >= least) +
                   static_cast<int>(four.z >= least) + static_cast<int>(four.w >= least);
        }
      }
      place += __popc(__match_any_sync(~0u, key) & ((1u << lane_) - 1));
      if (runs && place < L::kChosen) {
        if constexpr (kRows == 1) {
          shared_.ids[place] = expert;
        } else {
          shared_.of_rows.chosen_ids[token(t)][place] = expert;
        }
        weights(t)[1 + place] = scores[t];
      }
    }
    named_barrier(barrier, L::kRouted);
    // A thread of another warp for each token.
    if (expert % kWarp != kWarp - 1 || group < L::kGroups - kTogether) return;
    if (kRows == 1) barrier_arrive(&shared_.chosen);
    float* const own_weights = weights(L::kGroups - 1 - group);
    float sum = 0;
#pragma unroll
    for (int i = 1; i < L::kExperts; ++i) sum += own_weights[i];
    const float factor = a_.gate.scaling / (a_.gate.normalize ? sum + 1e-20f : 1.0f);
#pragma unroll
    for (int i = 1; i < L::kExperts; ++i) own_weights[i] *= factor;
    own_weights[0] = 1;
    if (FATHOM_PLANTED(a_, kDroppedExpert)) own_weights[L::kChosen] = 0;
  }

  // The activation from the sums of gate and up, which alternate for each expert.
  __device__ float activation(int i) const {
    int unit = i / L::kInterRows;
    if constexpr (kRows > 1) unit = shared_.of_rows.unit_of[row()][unit];
    const float* const sums = this->sums() + unit * 8 + i % L::kInterRows * 2;
    const float gate = sums[0] + sums[1], up = sums[4] + sums[5];
    return gate / (1 + expf(-gate)) * up;
  }

  __device__ void down() {
    constexpr int kBlocksOfK = L::kInter / kScaleRow;
    if constexpr (kRows == 1) {
      static_assert(L::kExperts <= L::kSlots);
#pragma unroll 1
      for (int i = 0; i < L::kExperts; ++i) wait_for_chunk(i);
    }
    receive<L::kExperts * L::kInterRows, kBlocks>(
        [&](int r) { return exchange_.activation[r * kBlocks]; },
        [&](int r, int block, int i, float value) {
          reinterpret_cast<__nv_bfloat16*>(
              shared_.scratch)[(r * L::kExperts + i / L::kInterRows) * L::kInter +
                               block * L::kInterRows + i % L::kInterRows] =
              __float2bfloat16_rn(value);
        });
    sync_consumers();
    this->template write_scaled<L::kExperts * L::kInter / kScaleRow>();
    // A warp has four rows of all experts; two of them are 512 bytes. A CTA's rows touch at most
    // two blocks of 128: the slot holds the scales of the first block's pair and of the next pair.
    constexpr int kRowWarps = L::kHiddenRows / 4;
    const int k_block = lane_ / 8 % kBlocksOfK, first_row = warp_ * 4 + lane_ / 16;
    const int in_pair = block_ * L::kHiddenRows % (2 * kScaleRow) + first_row;
    const int at = in_pair / kScaleRow * kBlocksOfK + k_block,
              next_at = (in_pair + 2) / kScaleRow * kBlocksOfK + k_block;
    Pair sums[kRows] = {};
    // Adds an expert's rows times the activations of token r, which has it at `place`.
    const auto add = [&](const uint8_t* slot, int r, int place) {
      const auto* const scales = reinterpret_cast<const float*>(slot + L::kWeightBytes);
      const float x_scale = shared_.x_scales[r * L::kMostScales + place * kBlocksOfK + k_block] *
                            shared_.weights[r * L::kExperts + place];
      const auto* const x = reinterpret_cast<const uint4*>(
          shared_.vector + r * kVectorBytes + (place * L::kInter + lane_ * 16 % L::kInter) * 2);
      const Pair more = multiply_step<kStepBytes>(slot + warp_ * 2 * kStepBytes + lane_ * 16,
                                                  {x[0], x[1]}, lane_);
      sums[r].first = fmaf(more.first, scales[at] * x_scale, sums[r].first);
      sums[r].second = fmaf(more.second, scales[next_at] * x_scale, sums[r].second);
    };
    if constexpr (kRows == 1) {
      if (warp_ < kRowWarps) {
#pragma unroll 3
        for (int i = 0; i < L::kExperts; ++i) add(slot_of(i), 0, i);
      }
      __syncwarp();
      if (lane_ < L::kExperts) release_chunk(lane_, 1);
      chunks_ += L::kExperts;
    } else {
      // More chunks than slots: each is released by itself, also by warps without rows, and by them
      // not before it has come, so that they are never a turn ahead.
      const int units = 1 + num_units(shared_);
#pragma unroll 1
      for (int i = 0; i < units; ++i) {
        const uint8_t* const slot = wait_for_chunk(i);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int place = shared_.of_rows.place_of[r][i];
          if (warp_ < kRowWarps && place >= 0) add(slot, r, place);
        }
        __syncwarp();
        if (lane_ == 0) release_chunk(i, 1);
      }
      chunks_ += units;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!is_on_diagonal(lane_)) sums[r] = {0, 0};
      // Adds the first row's eight lanes into the lower lanes, the second row's into the upper.
      const bool upper = (lane_ & 8) != 0;
      float sum = (upper ? sums[r].second : sums[r].first) +
                  __shfl_xor_sync(~0u, upper ? sums[r].first : sums[r].second, 8);
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane_ % 8 == 0 && warp_ < kRowWarps) {
        shared_.sums[r * L::kSums + first_row + (upper ? 2 : 0)] = sum;
      }
    }
    sync_consumers();
  }
};

// What launch_layers() takes.
template <int kTokens, bool kOfRanks>
struct Parts {
  template <typename Row>
  using FeederOf = Feeder<Row, Layout<kTokens>>;
  template <typename Row>
  using LayersOf = Layers<Row, Layout<kTokens>, kOfRanks>;

  static void launch(const DecodeLayersArguments& arguments, GpuStream stream) {
    launch_layers<Layout<kTokens>, FeederOf, LayersOf>(arguments, stream);
  }
};

// Launches of one token, of two and of four have areas of their own, in this order.
constexpr int64_t kExchangeOfOne = sizeof(Layout<1>::Exchanged),
                  kExchangeOfTwo = sizeof(Layout<2>::Exchanged);
static_assert(kExchangeOfOne % alignof(Packet) == 0 && kExchangeOfTwo % alignof(Packet) == 0);

}  // namespace

void launch_v3_tp8(const DecodeLayersArguments& arguments, GpuStream stream) {
  const bool meets_ranks = arguments.peers.ranks > 1;
  const auto launch = [&]<int kTokens>(std::integral_constant<int, kTokens>, int64_t at) {
    DecodeLayersArguments own = arguments;
    own.exchange = static_cast<std::byte*>(arguments.exchange) + at;
    (meets_ranks ? Parts<kTokens, true>::launch : Parts<kTokens, false>::launch)(own, stream);
  };
  if (arguments.rows == 1) return launch(std::integral_constant<int, 1>(), 0);
  if (arguments.rows == 2) return launch(std::integral_constant<int, 2>(), kExchangeOfOne);
  launch(std::integral_constant<int, 4>(), kExchangeOfOne + kExchangeOfTwo);
}
int64_t v3_tp8_exchange_bytes() {
  return kExchangeOfOne + kExchangeOfTwo + int64_t{sizeof(Layout<4>::Exchanged)};
}

}  // namespace fathom::cuda::decode_layers_kernel
