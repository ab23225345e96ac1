// The mixture of experts of few tokens on the GPU: time of a launch in a CUDA graph over
// several layers' weights, more than the L2 holds together; median of 11 replays. The floor is the
// reading of the weights of all experts that have tokens.
//
// One token is moe_one_row's.
//
//   moe_few_rows_cuda_bench [--json | --sweep]
//
// --sweep times several plans of moe_few_rows for each shape.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/moe_few_rows_cuda.h"
#include "ops/moe/moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

struct Case {
  const char* name;
  MoeShape shape;
  std::vector<int32_t> rows;
  bool even = false;  // every expert has as many tokens
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"v2-lite", {2048, 64, 6, 1408, 2816}, {1, 2, 4, 8, 16, 32, 64, 128, 256, 448}},
      {"v3", {7168, 256, 8, 2048, 2048}, {1, 2, 8}},
      {"v3, 256 experts x 1", {7168, 256, 8, 2048, 0}, {32}, true},
      {"v3, 32 experts x 20", {7168, 32, 8, 2048, 0}, {80}, true},
      {"v3, 32 experts x 64", {7168, 32, 8, 2048, 0}, {256}, true},
      {"v3 / 8, 256 experts x 1", {7168, 256, 8, 256, 256}, {32}, true}};
  return all;
}

// Experts of each token: at random, or in turn.
std::vector<int32_t> choose(const MoeShape& shape, int32_t rows, bool even, std::mt19937& random) {
  std::vector<int32_t> ids, experts(static_cast<size_t>(shape.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (int32_t row = 0; row < rows; ++row) {
    if (!even) std::shuffle(experts.begin(), experts.end(), random);
    for (int32_t i = 0; i < shape.experts_per_token; ++i) {
      const int32_t at = even ? (row * shape.experts_per_token + i) % shape.num_experts : i;
      ids.push_back(experts[static_cast<size_t>(at)]);
    }
  }
  return ids;
}

struct Memory {
  DeviceArray<uint16_t> weights, x;
};

Memory make_memory() {
  Memory memory{DeviceArray<uint16_t>(int64_t{12} << 30), DeviceArray<uint16_t>(512 * 7168)};
  std::mt19937 random(1);
  const auto some = random_bf16(1 << 23, 0.02f, random);
  for (int64_t at = 0; at < memory.weights.size(); at += std::ssize(some)) {
    if (at == 0) {
      check(cudaMemcpy(memory.weights.data(), some.data(), some.size() * 2, cudaMemcpyHostToDevice),
            "filling memory");
    } else {
      const int64_t count = std::min(at, std::min(std::ssize(some), memory.weights.size() - at));
      check(cudaMemcpy(memory.weights.data() + at, memory.weights.data(),
                       static_cast<size_t>(count) * 2, cudaMemcpyDeviceToDevice),
            "filling memory");
    }
  }
  memory.x.copy_from(random_bf16(memory.x.size(), 1.0f, random));
  return memory;
}

class Problem {
 public:
  Problem(const Memory& memory, const MoeShape& shape, int32_t rows, bool even)
      : memory_(memory),
        shape_(shape),
        rows_(rows),
        out_(int64_t{rows} * shape.hidden),
        progress_(kMoeProgressWords) {
    check(cudaMemset(progress_.data(), 0, progress_.bytes()), "clearing");
    std::mt19937 random(2);
    const int64_t layer = layer_elements();
    const int64_t copies = std::clamp<int64_t>(memory.weights.size() / layer, 1, 12);
    int64_t experts = 0;
    for (int64_t i = 0; i < copies; ++i) {
      const auto ids = choose(shape, rows, even, random);
      experts += std::ssize(std::set<int32_t>(ids.begin(), ids.end()));
      ids_.emplace_back(ids);
    }
    factors_ = DeviceArray<float>(
        std::vector<float>(static_cast<size_t>(rows * shape.experts_per_token), 0.2f));
    workspace_ = DeviceArray<std::byte>(
        std::max(moe_few_rows_workspace_bytes(shape, rows), moe_one_row_workspace_bytes(shape)));
    bytes_ = 6.0 * shape.hidden *
             (static_cast<double>(experts) / static_cast<double>(copies) * shape.inter +
              shape.shared_inter);
  }

  double bytes() const { return bytes_; }  // that a layer must read
  int copies() const { return static_cast<int>(ids_.size()); }

  MoeArguments arguments(int copy) const {
    const uint16_t* weights = memory_.weights.data() + copy * layer_elements();
    const int64_t expert = int64_t{shape_.inter} * shape_.hidden * shape_.num_experts;
    const int64_t shared = int64_t{shape_.shared_inter} * shape_.hidden;
    return {.shape = shape_,
            .rows = rows_,
            .x = memory_.x.data(),
            .expert_ids = ids_[static_cast<size_t>(copy)].data(),
            .expert_weights = factors_.data(),
            .gate_up = weights,
            .down = weights + 2 * expert,
            .shared_gate_up = weights + 3 * expert,
            .shared_down = weights + 3 * expert + 2 * shared,
            .out = out_.data(),
            .out_type = DType::kF32,
            .workspace = workspace_.data(),
            .progress = progress_.data()};
  }

 private:
  int64_t layer_elements() const {
    return int64_t{3} * shape_.hidden *
           (int64_t{shape_.inter} * shape_.num_experts + shape_.shared_inter);
  }

  const Memory& memory_;
  MoeShape shape_;
  int32_t rows_;
  std::vector<DeviceArray<int32_t>> ids_;
  DeviceArray<float> factors_, out_;
  DeviceArray<std::byte> workspace_;
  DeviceArray<uint64_t> progress_;
  double bytes_ = 0;
};

double measure(const Problem& problem, const MoeFewRowsPlan& plan) {
  return time_in_graph(problem.copies(), [&](int copy, cudaStream_t stream) {
    moe_few_rows(plan, problem.arguments(copy), stream);
  });
}

double measure_one_row(const Problem& problem) {
  return time_in_graph(problem.copies(), [&](int copy, cudaStream_t stream) {
    moe_one_row(problem.arguments(copy), stream);
  });
}

MoeFewRowsPlan plan_for(const Case& c, int32_t rows, const ClusterCounts& counts) {
  return plan_moe_few_rows({rows, c.shape.hidden, c.shape.num_experts, c.shape.experts_per_token,
                            c.shape.inter, c.shape.shared_inter},
                           counts);
}

void sweep(const Memory& memory, const ClusterCounts& counts) {
  for (const Case& c : cases()) {
    for (const int32_t rows : c.rows) {
      const Problem problem(memory, c.shape, rows, c.even);
      const MoeFewRowsPlan chosen = plan_for(c, rows, counts);
      std::printf("%s, %d rows, floor %.1f us:", c.name, rows, problem.bytes() / kReadBytesPerUs);
      for (const int warpgroups : {1, 2}) {
        for (const int splits : {1, 2}) {
          MoeFewRowsPlan plan = chosen;
          plan.warpgroups = warpgroups;
          plan.splits = splits;
          plan.clusters = std::min(plan.blocks / splits, c.shape.hidden / 8);
          if (plan.hidden_groups(c.shape.hidden) > 8 * warpgroups) continue;
          for (const int kilobytes : {64, 96, 128, 160, 192}) {
            plan.ring_bytes = kilobytes * 1024;
            if (plan.ring_bytes < 2 * moe_stage_bytes(rows, warpgroups)) continue;
            if (plan.ring_bytes + rows * moe_sum_bytes(warpgroups) +
                    moe_table_bytes(rows * c.shape.experts_per_token) >
                kMoeSharedBytes) {
              continue;
            }
            std::printf("  %dx%dx%d %.2f", warpgroups, splits, kilobytes, measure(problem, plan));
          }
        }
      }
      std::printf("  (%dx%dx%d)\n", chosen.warpgroups, chosen.splits, chosen.ring_bytes / 1024);
    }
  }
}

void run(const Memory& memory, const ClusterCounts& counts, bool json) {
  const char* separator = "";
  if (json) {
    std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
  } else {
    std::printf("%s\n%-24s rows       us    floor  GB/s     %%\n", device_line().c_str(), "shape");
  }
  for (const Case& c : cases()) {
    for (const int32_t rows : c.rows) {
      const Problem problem(memory, c.shape, rows, c.even);
      const double us =
          rows == 1 ? measure_one_row(problem) : measure(problem, plan_for(c, rows, counts));
      const double floor = problem.bytes() / kReadBytesPerUs;
      if (json) {
        std::printf(
            "%s\n  {\"shape\": \"%s\", \"hidden\": %d, \"experts\": %d, \"experts_per_token\": %d, "
            "\"inter\": %d, \"shared_inter\": %d, \"rows\": %d, \"us\": %.2f, \"floor_us\": %.2f}",
            separator, c.name, c.shape.hidden, c.shape.num_experts, c.shape.experts_per_token,
            c.shape.inter, c.shape.shared_inter, rows, us, floor);
        separator = ",";
      } else {
        std::printf("%-24s %4d %8.2f %8.2f %5.0f %5.1f\n", c.name, rows, us, floor,
                    problem.bytes() / us / 1e3, 100 * floor / us);
      }
    }
  }
  if (json) std::printf("\n]}\n");
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  const auto memory = fathom::cuda::make_memory();
  const auto counts = fathom::cuda::count_clusters();
  if (argc > 1 && std::strcmp(argv[1], "--sweep") == 0) {
    fathom::cuda::sweep(memory, counts);
  } else {
    fathom::cuda::run(memory, counts, argc > 1 && std::strcmp(argv[1], "--json") == 0);
  }
  return 0;
}
