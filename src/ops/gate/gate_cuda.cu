// What: logits = x weight^T in fp32; each row's k experts and their weights by the rules of gate().
//
// Inputs/outputs: gate_cuda.h.
//
// Layout: a cluster has a tile of kRowTiles * 8 rows, kParts of its CTAs kExpertTiles * 16 of the
// experts. Their eight warps take an eighth of the columns each; a warp's tiles of 16 experts x 8
// rows lie in the registers of mma.sync, experts on M: few rows waste no weight bandwidth. With few
// experts several CTAs share a tile: weights reach many SMs faster, and small CTAs fit beside those
// of neighbouring launches.
//
// Algorithm: weights of the first columns are loaded before the PDL wait. A lane reads 16
// neighbouring bytes of a row, eight columns, and passes them to two instructions as their pairs of
// k: any assignment of columns to instructions is valid, as long as both operands agree. The warps'
// sums are added in shared memory and sent to the CTA of the cluster that selects for the row;
// there a warp has a row (gate_choice_cuda.cuh). fp32 weights are split exactly into three bf16
// numbers.
//
// Determinism: the order of a logit's sum depends on the number of columns alone.
//
// Limits: hidden a multiple of 32; 512 experts.
//
// Source: DeepSeek-V2 (2024, section 2.1.2), DeepSeek-V3 (2024, section 2.1.2); weights before the
// PDL wait from TensorRT-LLM's router kernels (2025).
//
// Measured: docs/kernels/fused.md.
#include "base/check.h"
#include "base/math.h"
#include "device/cuda/launch.h"
#include "ops/gate/gate_cuda.h"
#include "ops/gate/gate_product_cuda.cuh"
#include "ops/gate/gate_spread_cuda.cuh"
#include "ops/linear/linear_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int kMaxCluster = 16;

template <typename Weights, int kExpertTiles, int kRowTiles, int kAhead, int kParts>
__global__ void __launch_bounds__(kGateWarps / kParts * kWarp, 1)
    gate_kernel(const __grid_constant__ GateShape shape) {
  constexpr int kExperts = kExpertTiles * 16, kRows = kRowTiles * 8;
  extern __shared__ float shared[];
  const GateBlock<kExperts, kRows, kParts> block;
  float* const sums = shared;
  float* const logits = shared + block.kWarps * kExperts * kRows;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) / block.blocks * kRows;
  const auto num_rows = static_cast<int>(min(shape.rows - first_row, int64_t{kRows}));
  cluster_arrive();
  let_next_launch_begin();
  GateProduct<Weights, kExpertTiles, kRowTiles, kAhead> product(
      shape, block.first_expert(), block.first_warp() + block.warp, kGateWarps);
  product.prefetch();
  wait_for_earlier_launches();
  product.run(shape.x + first_row * shape.hidden, num_rows);
  product.store(sums + block.warp * kExperts * kRows);
  exchange_and_choose(shape, block, sums, logits, first_row, num_rows);
}

template <typename Weights, int kExpertTiles, int kRowTiles, int kAhead, int kParts = 1>
void launch_for(const GateShape& shape, GpuStream stream) {
  const auto kernel = gate_kernel<Weights, kExpertTiles, kRowTiles, kAhead, kParts>;
  constexpr int kRows = kRowTiles * 8, kExperts = kExpertTiles * 16;
  using Block = GateBlock<kExperts, kRows, kParts>;
  stream.device().allow_shared_memory(
      kernel, (kGateWarps * kExperts + Block::kSums * kMostGateExperts) * kRows * sizeof(float));
  stream.device().allow_large_clusters(kernel);
  const auto cluster = static_cast<unsigned>(ceil_div(shape.experts, kExperts)) * kParts;
  const int64_t own_rows = ceil_div(kRows, cluster);
  launch(kernel,
         {.blocks = static_cast<unsigned>(ceil_div(shape.rows, kRows)) * cluster,
          .threads = Block::kThreads,
          .shared_bytes = static_cast<unsigned>(
              (Block::kWarps * kExperts * kRows + own_rows * Block::kSums * shape.experts) *
              sizeof(float)),
          .cluster = cluster},
         stream, shape);
}

// More rows share a CTA's reads of the weights, and more experts its reads of x; few rows are
// spread over more SMs in small tiles.
constexpr int64_t kFewGateRows = 96, kManyRows = 1536;
constexpr int kFewParts = 4;
constexpr int32_t kFewExperts = 16 * kMaxCluster / kFewParts;

void launch_narrow(const GateShape& shape, GpuStream stream) {
  if (shape.rows > kManyRows) {
    launch_for<NarrowWeights, 4, 4, 2>(shape, stream);
  } else if (shape.rows > kFewGateRows || shape.experts > kFewExperts) {
    launch_for<NarrowWeights, 2, 2, 8>(shape, stream);
  } else {
    launch_for<NarrowWeights, 1, 1, 8, kFewParts>(shape, stream);
  }
}

void launch_wide(const GateShape& shape, GpuStream stream) {
  if (shape.rows > kFewGateRows || shape.experts > 16 * kMaxCluster) {
    launch_for<WideWeights, 2, 2, 2>(shape, stream);
  } else if (shape.experts <= kFewExperts) {
    launch_for<WideWeights, 1, 1, 8, kFewParts>(shape, stream);
  } else {
    launch_for<WideWeights, 1, 1, 8>(shape, stream);
  }
}

// Whether gate_spread serves the shape; few experts use a cluster's shared memory instead.
bool spreads(const GateArguments& arguments) {
  return arguments.experts > kFewExperts && arguments.experts % 8 == 0 &&
         arguments.hidden % 64 == 0;
}

GateShape gate_shape(const GateArguments& arguments) {
  const GateOptions& options = arguments.options;
  const int64_t k = options.experts_per_token, experts = arguments.experts;
  const bool grouped = options.scoring != GateScoring::kSoftmaxGreedy;
  const int64_t groups = grouped ? options.num_groups : 1;
  const int64_t kept = grouped ? options.groups_per_token : 1;
  FATHOM_CHECK(arguments.hidden > 0 && arguments.hidden % kGateColumns == 0, "rows of {}",
               arguments.hidden);
  FATHOM_CHECK(experts >= 1 && experts <= kMostGateExperts && k >= 1 && k <= experts && k <= kWarp,
               "{} of {} experts a token", k, experts);
  FATHOM_CHECK(groups >= 1 && groups <= kWarp && experts % groups == 0 && kept >= 1 &&
                   kept <= groups && kept * (experts / groups) >= k,
               "{} experts in {} groups, {} kept, {} experts a token", experts, groups, kept, k);
  FATHOM_CHECK((arguments.bias != nullptr) == (options.scoring == GateScoring::kSigmoidBias),
               "a bias with sigmoid scores only");
  FATHOM_CHECK(arguments.weight_type == DType::kBF16 || arguments.weight_type == DType::kF32,
               "weights of {}", name_of(arguments.weight_type));
  return {.x = static_cast<const __nv_bfloat16*>(arguments.x),
          .weight = arguments.weight,
          .bias = arguments.bias,
          .num_valid_rows = arguments.num_valid_rows,
          .expert_ids = arguments.expert_ids,
          .expert_weights = arguments.expert_weights,
          .options = options,
          .rows = arguments.rows,
          .hidden = arguments.hidden,
          .experts = static_cast<int32_t>(experts)};
}

}  // namespace

void gate(const GateArguments& arguments, GpuStream stream) {
  const GateShape shape = gate_shape(arguments);
  if (shape.rows == 0) return;
  if (arguments.weight_type == DType::kF32) return launch_wide(shape, stream);
  if (!spreads(arguments)) return launch_narrow(shape, stream);
  FATHOM_CHECK(arguments.scratch != nullptr, "no scratch memory for {} experts", shape.experts);
  if (!arguments.batch_invariant && shape.rows <= kMostSpreadRows) {
    return gate_spread(shape, arguments.scratch, arguments.sms, stream);
  }
  float* const logits = arguments.scratch + gate_spread_words(kMostSpreadRows, shape.experts,
                                                              shape.hidden, arguments.sms);
  linear({.x = arguments.x,
          .x_row_stride = shape.hidden,
          .weight = arguments.weight,
          .out = logits,
          .out_row_stride = shape.experts,
          .out_type = DType::kF32,
          .rows = static_cast<int32_t>(shape.rows),
          .n = shape.experts,
          .k = static_cast<int32_t>(shape.hidden),
          .batch_invariant = arguments.batch_invariant,
          .library = arguments.library},
         stream);
  gate_choose(shape, logits, stream);
}

int64_t gate_scratch_words(int64_t rows, int64_t hidden, int64_t experts, int sms) {
  if (experts <= kFewExperts) return 0;
  return gate_spread_words(kMostSpreadRows, experts, hidden, sms) + rows * experts;
}

}  // namespace fathom::cuda
