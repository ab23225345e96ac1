#include "ops/moe/moe_few_rows_cuda.h"

#include "base/math.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/moe_few_rows_parts_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kAlignment = 1024;

// The parts of the workspace, one after the other from `memory`; returns its end.
char* lay_out(char* memory, const MoeShape& shape, int64_t rows, MoeFewRowsWorkspace& parts) {
  const auto take = [&]<typename T>(T*& part, int64_t count) {
    part = reinterpret_cast<T*>(memory);
    memory += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
  };
  const int64_t pairs = rows * shape.experts_per_token;
  take(parts.num_tiles, 1);
  take(parts.tiles, kMaxTokenTiles);
  take(parts.tokens, pairs);
  take(parts.routed, pairs * shape.inter);
  take(parts.shared, rows * shape.shared_inter);
  return memory;
}

}  // namespace

int64_t moe_few_rows_workspace_bytes(const MoeShape& shape, int32_t rows) {
  MoeFewRowsWorkspace parts;
  return lay_out(nullptr, shape, rows, parts) - static_cast<char*>(nullptr);
}

void moe_few_rows(const MoeFewRowsPlan& plan, const MoeArguments& arguments, cudaStream_t stream) {
  MoeFewRowsWorkspace workspace;
  lay_out(static_cast<char*>(arguments.workspace), arguments.shape, arguments.rows, workspace);
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
