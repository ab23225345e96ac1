#include "ops/moe/moe_few_rows_cuda.h"

#include "base/math.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/moe_few_rows_parts_cuda.h"

namespace fathom::cuda {

MoeFewRowsWorkspace moe_few_rows_workspace(const MoeShape& shape, int32_t rows, void* memory) {
  constexpr int64_t kAlignment = 1024;
  MoeFewRowsWorkspace parts = {};
  const auto take = [&]<typename T>(T*& part, int64_t count) {
    part = reinterpret_cast<T*>(static_cast<char*>(memory) + parts.bytes);
    parts.bytes += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
  };
  const int64_t pairs = int64_t{rows} * shape.experts_per_token;
  take(parts.num_tiles, 1);
  take(parts.tiles, kMaxTokenTiles);
  take(parts.tokens, pairs);
  take(parts.routed, pairs * shape.inter);
  take(parts.shared, int64_t{rows} * shape.shared_inter);
  return parts;
}

int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  return moe_few_rows_workspace(shape, rows, nullptr).bytes;
}

void moe_few_rows(const MoeFewRowsPlan& plan, const MoeArguments& arguments, cudaStream_t stream) {
  const MoeFewRowsWorkspace workspace =
      moe_few_rows_workspace(arguments.shape, arguments.rows, arguments.workspace);
  moe_gate_up(plan, arguments, workspace, stream);
  moe_down(plan, arguments, workspace, stream);
}

void moe_few_rows(const MoeArguments& arguments, cudaStream_t stream) {
  static const ClusterCounts counts = count_clusters();
  const MoeShape& shape = arguments.shape;
  moe_few_rows(plan_moe_few_rows({.rows = arguments.rows,
                                  .hidden = shape.hidden,
                                  .num_experts = shape.num_experts,
                                  .experts_per_token = shape.experts_per_token,
                                  .inter = shape.inter,
                                  .shared_inter = shape.shared_inter},
                                 counts),
               arguments, stream);
}

}  // namespace fathom::cuda
