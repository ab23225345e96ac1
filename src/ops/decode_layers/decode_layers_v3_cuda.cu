// decode_layers() for an eighth of DeepSeek-V3: 16 heads with query compression, 256 experts of 256
// columns and a shared one, weights in e4m3.
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
#include "ops/decode_layers/decode_layers_feed_cuda.cuh"
#include "ops/decode_layers/decode_layers_launch_cuda.cuh"
#include "ops/decode_layers/decode_layers_steps_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {
namespace {

constexpr int kQkvPairs = (V3Eighth::kQLora + kLatent + kRope) / 2;  // pairs of rows
constexpr int kMostQkvRows = 2 * (kQkvPairs / kBlocks + 1);
constexpr int kQkvPackets = packets(kMostQkvRows), kQkvValues = packet_values(kMostQkvRows);

// Pairs of rows of q_kv_a before CTA b's.
__device__ constexpr int first_qkv_pair(int b) { return b * kQkvPairs / kBlocks; }

struct Layout : V3Eighth {
  static constexpr bool kHasBf16Weights = false;
  static constexpr int kExperts = kChosen + 1;           // the shared expert first
  static constexpr int kHiddenRows = kHidden / kBlocks;  // of o and of down
  static constexpr int kInterRows = kInter / kBlocks;    // of gate, and of up, of an expert
  static constexpr int kHiddenPackets = packets(kHiddenRows),
                       kActivationPackets = packets(kExperts * kInterRows);
  using Exchanged = Exchange<kQkvPackets, kHiddenPackets, kActivationPackets>;
  // A pair of warps takes one chunk.
  static constexpr int kSlots = 10, kWeightBytes = 16384, kSlotBytes = kWeightBytes + 512;
  static constexpr int kInFlight = 4;
  static constexpr int kScratch = kWarps * kLatent;            // floats
  static constexpr int kSums = 2 * kExperts * kInterRows * 2;  // rows, or halves of rows
  static constexpr int kMostScales = 32;
};
static_assert(Layout::kGroups == Layout::kRouted / kWarp);
static_assert(kHeads * kV / kScaleRow <= Layout::kMostScales &&
              Layout::kExperts * Layout::kInter / kScaleRow <= Layout::kMostScales);
static_assert(sizeof(Shared<Layout>) <= 227 * 1024);

constexpr int kQueryChunkRows = 8, kOChunkRows = 8;
constexpr int kQueryChunks = kQueryRows / kQueryChunkRows,
              kOChunks = Layout::kHiddenRows / kOChunkRows;
constexpr int kRouterRowBytes = Layout::kHidden * 2;
static_assert(2 * Layout::kHidden <= Layout::kWeightBytes &&
              kQueryChunkRows * Layout::kQLora <= Layout::kWeightBytes);
static_assert(kOChunkRows * kHeads * kV <= Layout::kWeightBytes &&
              Layout::kHiddenRows * Layout::kInter <= Layout::kWeightBytes);
static_assert(kQueryRows % kQueryChunkRows == 0 && Layout::kHiddenRows % kOChunkRows == 0);

// ---- producer threads

template <typename Row>
class Feeder : public FeederOf<Row, Layout, Feeder<Row>> {
 public:
  using Base = FeederOf<Row, Layout, Feeder<Row>>;
  using Base::Base;
  static constexpr int kSteps = 9;

  __device__ static unsigned in_flight(int) { return Layout::kInFlight; }

  __device__ int count_of(int step, int l) {
    switch (step) {
      case kQkvA:
        return first_qkv_pair(block_ + 1) - first_qkv_pair(block_);
      case kQueryB:
        return kQueryChunks;
      case kKeys:
        return this->count_of_keys(l);
      case kO:
        return kOChunks;
      case kRouter:
        return Layout::kRouted / kBlocks;
      case kGateUp:
        return 2 * Layout::kExperts;
      case kDown:
        return Layout::kExperts;
      default:
        return 1;
    }
  }

  __device__ Chunk chunk_of(int step, int i, int l) {
    const DecodeLayer& layer = shared_.layers[l & 1];
    switch (step) {
      case kQkvA:
        return rows_of(layer.q_kv_a, (first_qkv_pair(block_) + i) * 2, 2, Layout::kHidden);
      case kQueryB:
        return rows_of(layer.q_b, (block_ * kQueryChunks + i) * kQueryChunkRows, kQueryChunkRows,
                       Layout::kQLora);
      case kAbsorb:  // scales of the whole head
        return {layer.uk.values, int64_t{block_} * kAbsorbRows * kNope, kAbsorbRows * kNope,
                layer.uk.scales + block_ / kHeadBlocks * (kLatent / kScaleRow),
                kLatent / kScaleRow};
      case kKeys:
        return this->keys_of(i, l);
      case kValues:
        return rows_of(layer.uv, block_ * kValueRows, kValueRows, kLatent);
      case kO: {
        Chunk chunk =
            rows_of(layer.o, (block_ * kOChunks + i) * kOChunkRows, kOChunkRows, kHeads * kV);
        if (FATHOM_PLANTED(a_, kWrongLayerScale) && block_ > kBlocks / 2) {
          chunk.scales -= kHeads * kV / kScaleRow;
        }
        return chunk;
      }
      case kRouter:
        return {layer.router, int64_t{block_ * (Layout::kRouted / kBlocks) + i} * kRouterRowBytes,
                kRouterRowBytes, nullptr, 0};
      case kGateUp: {
        if (i >= 2) barrier_wait(&shared_.chosen, l & 1);
        const int64_t row =
            (expert_of(i / 2) * 2 + i % 2) * Layout::kInter + block_ * Layout::kInterRows;
        return rows_of(i < 2 ? layer.shared_gate_up : layer.gate_up, row, Layout::kInterRows,
                       Layout::kHidden);
      }
      default:
        return down_of(i == 0 ? layer.shared_down : layer.down, expert_of(i));
    }
  }

 private:
  enum Step { kQkvA, kQueryB, kAbsorb, kKeys, kValues, kO, kRouter, kGateUp, kDown };
  using Base::a_;
  using Base::block_;
  using Base::shared_;

  __device__ int64_t expert_of(int i) const { return i == 0 ? 0 : shared_.ids[i - 1]; }

  // Rows that share one row of scales.
  __device__ static Chunk rows_of(const ScaledMatrix& matrix, int64_t row, int rows, int columns) {
    const int scales = columns / kScaleRow;
    return {matrix.values, row * columns, rows * columns, matrix.scales + row / kScaleRow * scales,
            scales};
  }

  // Scales of the rows' one or two blocks of 128, starting at an even block.
  __device__ Chunk down_of(const ScaledMatrix& matrix, int64_t expert) const {
    const int first = block_ * Layout::kHiddenRows / kScaleRow / 2 * 2,
              last = (block_ * Layout::kHiddenRows + Layout::kHiddenRows - 1) / kScaleRow;
    return {matrix.values,
            (expert * Layout::kHidden + block_ * Layout::kHiddenRows) * Layout::kInter,
            Layout::kHiddenRows * Layout::kInter,
            matrix.scales +
                (expert * (Layout::kHidden / kScaleRow) + first) * (Layout::kInter / kScaleRow),
            last - first < 2 ? 4 : 8};
  }
};

// ---- consumer warps

template <typename Row, bool kOfRanks>
class Layers : public Steps<Row, Layout, Layers<Row, kOfRanks>> {
 public:
  using Base = Steps<Row, Layout, Layers<Row, kOfRanks>>;
  using Base::Base;
  static constexpr bool kMeetsRanks = kOfRanks;

  __device__ static void run_aside(Shared<Layout>&, const DecodeLayersArguments&) {}

  __device__ void half_layer(int l, bool is_attention) {
    if (!is_attention) {
      router();
      choose();
    }
    products_of_hidden(is_attention);
    if (is_attention) {
      put_rows<kMostQkvRows>(exchange_.input[block_], [&](int row) {
        return shared_.sums[row * 2] + shared_.sums[row * 2 + 1];
      });
      q_b(a_.pages + l * a_.layer_bytes);
      absorb();
      attend(l);
      values();
      o();
    } else {
      put_rows<Layout::kExperts * Layout::kInterRows>(exchange_.activation[block_],
                                                      [&](int row) { return activation(row); });
      down();
    }
  }

  // absorb() has met all warps since.
  __device__ void wait_for_new_key(int) const {}

  __device__ float hidden_row(int row, bool) const { return shared_.sums[row]; }

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
  using Base::layer_;
  using Base::load_x;
  using Base::pair_;
  using Base::put_rows;
  using Base::receive;
  using Base::receive_values;
  using Base::release_chunk;
  using Base::shared_;
  using Base::slot_of;
  using Base::sum_over_block;
  using Base::thread_;
  using Base::values;
  using Base::wait_for_chunk;
  using Base::warp_;
  using Base::write_cache_row;
  using Base::write_scaled;
  using Base::write_value;
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

  // Rows of q_kv_a, or of the experts' gate and up in turn: two rows a chunk, half the columns a
  // warp.
  __device__ void products_of_hidden(bool is_attention) {
    constexpr int kSteps = Layout::kHidden / 2 / kStepBytes;
    const int count =
        is_attention ? first_qkv_pair(block_ + 1) - first_qkv_pair(block_) : 2 * Layout::kExperts;
#pragma unroll 1
    for (int i = pair_; i < count; i += kPairs) {
      const uint8_t* const slot = wait_for_chunk(i);
      const Pair sums = two_rows<Layout::kHidden, kSteps, kSteps>(
          slot + half_ * (Layout::kHidden / 2),
          reinterpret_cast<const float*>(slot + Layout::kWeightBytes) +
              half_ * (Layout::kHidden / 2 / kScaleRow),
          shared_.vector + half_ * Layout::kHidden, nullptr);
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
    const auto* const scales = reinterpret_cast<const float*>(slot + Layout::kWeightBytes);
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

  // Normalized q_a; the new cache row; the head's queries.
  __device__ void q_b(std::byte* pages) {
    receive_qkv();
    products<kQueryChunkRows, Layout::kQLora>(kQueryChunks, nullptr);
    chunks_ += kQueryChunks;
    sync_consumers();
    put_rows<kQueryRows>(exchange_.query[block_], [&](int row) { return shared_.sums[row]; });
    if (warp_ == kWarps - 1) write_cache_row(pages);  // while the other CTAs' queries arrive
  }

  __device__ void receive_qkv() const {
    static_assert(kBlocks * kQkvPackets <= kThreads);
    const int from = min(thread_ / kQkvPackets, kBlocks - 1),
              at = thread_ % kQkvPackets * kQkvValues;
    const int first = first_qkv_pair(from) * 2 + at;
    const int count = thread_ < kBlocks * kQkvPackets ? first_qkv_pair(from + 1) * 2 - first : 0;
    float weights[kQkvValues];
#pragma unroll
    for (int j = 0; j < kQkvValues; ++j) {
      weights[j] = load_ahead(layer_->q_a_norm + min(first + j, Layout::kQLora - 1));
    }
    Packet packet[1] = {};
    if (count > 0) {
      wait_for_packets(packet, epoch_, [&](int) { return &exchange_.input[0][thread_]; });
    }
    float values[kQkvValues], squares = 0;
    unpack_bf16(packet[0], values);
#pragma unroll
    for (int j = 0; j < kQkvValues; ++j) {
      if (j < count && first + j < Layout::kQLora) squares += values[j] * values[j];
      if (j < count && first + j >= Layout::kQLora)
        shared_.scratch[kKeyAt + first + j - Layout::kQLora] = values[j];
    }
    const float inverse = inverse_rms(sum_over_block(squares), Layout::kQLora, a_.inner_eps);
#pragma unroll
    for (int j = 0; j < kQkvValues; ++j) {
      if (j < count && first + j < Layout::kQLora) {
        write_value(first + j, weights[j] * (values[j] * inverse));
      }
    }
    sync_consumers();
  }

  __device__ void o() {
    receive_values();
    products<kOChunkRows, kHeads * kV>(kOChunks, shared_.x_scales);
    chunks_ += kOChunks;
    sync_consumers();
  }

  // ---- experts

  // Seven warps a row, 256 columns at a time.
  __device__ void router() {
    constexpr int kColumns = kWarp * 8, kRowWarps = 7,
                  kSteps = Layout::kHidden / kColumns / kRowWarps;
    static_assert(kSteps * kRowWarps * kColumns == Layout::kHidden);
    constexpr int kRows = Layout::kRouted / kBlocks;
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
    if (warp_ < kWarps - Layout::kGroups) return;
    const int expert = thread_ - kThreads + Layout::kRouted, group = expert / kWarp;
    const float bias = load_ahead(layer_->router_bias + expert);
    Packet packet[1];
    wait_for_packets(packet, epoch_, [&](int) { return exchange_.logits + expert / 2; });
    const float logit = __uint_as_float(static_cast<uint32_t>(packet[0].low >> (expert % 2 * 32)));
    const float score = 1 / (1 + expf(-logit)), choice = score + bias;
    const uint32_t key = order_key(choice);
    auto* const keys = reinterpret_cast<uint32_t*>(shared_.scratch);
    float* const group_values = shared_.scratch + Layout::kRouted;
    keys[expert] = key;
    // A group's rank is the sum of its best two scores.
    const uint32_t best = __reduce_max_sync(~0u, key);
    const bool is_best = lane_ == __ffs(static_cast<int>(__ballot_sync(~0u, key == best))) - 1;
    const uint32_t second = __reduce_max_sync(~0u, is_best ? 0 : key);
    const bool is_second =
        lane_ == __ffs(static_cast<int>(__ballot_sync(~0u, !is_best && key == second))) - 1;
    const float both = warp_sum(is_best || is_second ? choice : 0);
    if (lane_ == 0) group_values[group] = both;
    named_barrier(kSomeConsumers, Layout::kRouted);
    const uint32_t own = order_key(group_values[lane_ % Layout::kGroups]);
    int better = 0;
#pragma unroll
    for (int i = 0; i < Layout::kGroups; ++i) {
      const uint32_t other = __shfl_sync(~0u, own, i);
      better += other > own || (other == own && i < lane_ % Layout::kGroups);
    }
    uint32_t kept = __ballot_sync(
        ~0u, lane_ < Layout::kGroups && better < static_cast<int>(a_.gate.groups_per_token));
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
    if (runs && place < Layout::kChosen) {
      shared_.ids[place] = expert;
      shared_.weights[1 + place] = score;
    }
    named_barrier(kSomeConsumers, Layout::kRouted);
    if (thread_ != kThreads - 1) return;
    barrier_arrive(&shared_.chosen);
    float sum = 0;
#pragma unroll
    for (int i = 1; i < Layout::kExperts; ++i) sum += shared_.weights[i];
    const float factor = a_.gate.scaling / (a_.gate.normalize ? sum + 1e-20f : 1.0f);
#pragma unroll
    for (int i = 1; i < Layout::kExperts; ++i) shared_.weights[i] *= factor;
    shared_.weights[0] = 1;
    if (FATHOM_PLANTED(a_, kDroppedExpert)) shared_.weights[Layout::kChosen] = 0;
  }

  // The activation from the sums of gate and up, which alternate for each expert.
  __device__ float activation(int row) const {
    const float* const sums =
        shared_.sums + row / Layout::kInterRows * 8 + row % Layout::kInterRows * 2;
    const float gate = sums[0] + sums[1], up = sums[4] + sums[5];
    return gate / (1 + expf(-gate)) * up;
  }

  __device__ void down() {
    constexpr int kBlocksOfK = Layout::kInter / kScaleRow;
    static_assert(kBlocks * Layout::kActivationPackets <= kThreads);
    static_assert(Layout::kExperts <= Layout::kSlots);
#pragma unroll 1
    for (int i = 0; i < Layout::kExperts; ++i) wait_for_chunk(i);
    receive<Layout::kExperts * Layout::kInterRows>(
        exchange_.activation[0], kBlocks, [&](int block, int row) {
          return row / Layout::kInterRows * Layout::kInter + block * Layout::kInterRows +
                 row % Layout::kInterRows;
        });
    sync_consumers();
    write_scaled(Layout::kExperts * Layout::kInter / kScaleRow);
    // A warp has four rows of all experts; two of them are 512 bytes. A CTA's rows touch at most
    // two blocks of 128: the slot holds the scales of the first block's pair and of the next pair.
    constexpr int kRowWarps = Layout::kHiddenRows / 4;
    const int k_block = lane_ / 8 % kBlocksOfK, row = warp_ * 4 + lane_ / 16;
    const int in_pair = block_ * Layout::kHiddenRows % (2 * kScaleRow) + row;
    const int at = in_pair / kScaleRow * kBlocksOfK + k_block,
              next_at = (in_pair + 2) / kScaleRow * kBlocksOfK + k_block;
    Pair sums = {0, 0};
    if (warp_ < kRowWarps) {
#pragma unroll 3
      for (int i = 0; i < Layout::kExperts; ++i) {
        const uint8_t* const slot = slot_of(i);
        const auto* const scales = reinterpret_cast<const float*>(slot + Layout::kWeightBytes);
        const float x_scale = shared_.x_scales[i * kBlocksOfK + k_block] * shared_.weights[i];
        const Pair more = multiply_step<kStepBytes>(
            slot + warp_ * 2 * kStepBytes + lane_ * 16,
            load_x(i * Layout::kInter + lane_ * 16 % Layout::kInter), lane_);
        sums.first = fmaf(more.first, scales[at] * x_scale, sums.first);
        sums.second = fmaf(more.second, scales[next_at] * x_scale, sums.second);
      }
    }
    __syncwarp();
    if (lane_ < Layout::kExperts) release_chunk(lane_, 1);
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
    chunks_ += Layout::kExperts;
    sync_consumers();
  }
};

template <typename Row>
using LayersAlone = Layers<Row, false>;
template <typename Row>
using LayersOfRanks = Layers<Row, true>;

}  // namespace

void launch_v3_eighth(const DecodeLayersArguments& arguments, GpuStream stream) {
  if (arguments.peers.ranks > 1) {
    launch_layers<Layout, Feeder, LayersOfRanks>(arguments, stream);
  } else {
    launch_layers<Layout, Feeder, LayersAlone>(arguments, stream);
  }
}
int64_t v3_eighth_exchange_bytes() { return sizeof(Layout::Exchanged); }

}  // namespace fathom::cuda::decode_layers_kernel
