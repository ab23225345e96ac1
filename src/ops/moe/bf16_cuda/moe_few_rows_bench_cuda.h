// Shared by the benchmarks of few-token MoE on a GPU, bf16 and e4m3: time of a launch in a CUDA
// graph over the weights of several layers, together larger than the L2; median of 11 replays. The
// roofline counts the weight bytes of all experts that have tokens. One token takes another launch.
//
//   PROGRAM [--json | --sweep] [name]
//
// --sweep times several plans of the few-row launch for each shape. With a name only the shapes
// whose names begin with it.
//
// A benchmark is a class that holds the memory of weights, with
//   static const std::vector<MoeFewRowsCase>& cases();
//   static constexpr bool kScaled;
//   static int64_t behind_ring(int rows, int64_t pairs, int warpgroups);  bytes of shared memory
//   class Problem, made of (const Bench&, const MoeShape&, rows, even), with
//     double bytes() const;  that a layer must read
//     double measure(const MoeFewRowsPlan&) const;
//     double measure_one_row() const;
#pragma once

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/co_resident.h"
#include "device/cuda/graph_timer.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/plans/moe_few_rows_plan.h"

namespace fathom::cuda {

struct MoeFewRowsCase {
  const char* name;
  MoeShape shape;
  std::vector<int32_t> rows;
  bool even = false;  // every expert has the same number of tokens
};

// Experts of each token: at random, or in turn.
inline std::vector<int32_t> choose_experts(const MoeShape& shape, int32_t rows, bool even,
                                           std::mt19937& random) {
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

// Weight elements of a layer.
inline int64_t layer_elements(const MoeShape& shape) {
  return int64_t{3} * shape.hidden *
         (int64_t{shape.inter} * shape.num_experts + shape.shared_inter);
}

// The tokens' experts in each of the layers that fit into `memory` weights.
struct LayersOfTokens {
  std::vector<std::vector<int32_t>> ids;
  double weights_read = 0;  // per layer, on average

  LayersOfTokens(int64_t memory, const MoeShape& shape, int32_t rows, bool even) {
    std::mt19937 random(2);
    const int64_t layers = std::clamp<int64_t>(memory / layer_elements(shape), 1, 12);
    int64_t experts = 0;
    for (int64_t i = 0; i < layers; ++i) {
      ids.push_back(choose_experts(shape, rows, even, random));
      experts += std::ssize(std::set<int32_t>(ids.back().begin(), ids.back().end()));
    }
    weights_read = 3.0 * shape.hidden *
                   (static_cast<double>(experts) / static_cast<double>(layers) * shape.inter +
                    shape.shared_inter);
  }
};

template <typename Bench>
class MoeFewRowsBench {
 public:
  void run(int argc, char** argv) {
    const std::string flag = argc > 1 ? argv[1] : "";
    const bool is_json = flag == "--json", is_sweep = flag == "--sweep";
    const int at = is_json || is_sweep ? 2 : 1;
    const std::string wanted = argc > at ? argv[at] : "";
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    if (is_json) {
      std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
    } else {
      std::printf("%s\n%-24s rows       us    floor  GB/s     %%\n", device_line().c_str(),
                  "shape");
    }
    for (const MoeFewRowsCase& c : Bench::cases()) {
      if (!std::string(c.name).starts_with(wanted)) continue;
      for (const int32_t rows : c.rows) {
        const typename Bench::Problem problem(bench_, c.shape, rows, c.even);
        if (is_sweep) {
          sweep(c, rows, problem);
        } else {
          time(c, rows, problem, is_json);
        }
      }
    }
    if (is_json) std::printf("\n]}\n");
  }

 private:
  using Problem = typename Bench::Problem;

  MoeFewRowsPlan plan_for(const MoeFewRowsCase& c, int32_t rows) const {
    return plan_moe_few_rows({rows, c.shape.hidden, c.shape.num_experts, c.shape.experts_per_token,
                              c.shape.inter, c.shape.shared_inter, Bench::kScaled},
                             counts_);
  }

  void sweep(const MoeFewRowsCase& c, int32_t rows, const Problem& problem) const {
    const MoeFewRowsPlan chosen = plan_for(c, rows);
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
          const int64_t behind =
              Bench::behind_ring(rows, int64_t{rows} * c.shape.experts_per_token, warpgroups);
          if (plan.ring_bytes + behind > kMoeSharedBytes) continue;
          std::printf("  %dx%dx%d %.2f", warpgroups, splits, kilobytes, problem.measure(plan));
        }
      }
    }
    std::printf("  (%dx%dx%d)\n", chosen.warpgroups, chosen.splits, chosen.ring_bytes / 1024);
  }

  void time(const MoeFewRowsCase& c, int32_t rows, const Problem& problem, bool json) {
    const MoeShape& s = c.shape;
    const double us = rows == 1 ? problem.measure_one_row() : problem.measure(plan_for(c, rows));
    const double floor = problem.bytes() / kReadBytesPerUs;
    if (json) {
      std::printf(
          "%s\n  {\"shape\": \"%s\", \"hidden\": %d, \"experts\": %d, \"experts_per_token\": %d, "
          "\"inter\": %d, \"shared_inter\": %d, \"rows\": %d, \"us\": %.2f, \"floor_us\": %.2f}",
          separator_, c.name, s.hidden, s.num_experts, s.experts_per_token, s.inter, s.shared_inter,
          rows, us, floor);
      separator_ = ",";
    } else {
      std::printf("%-24s %4d %8.2f %8.2f %5.0f %5.1f", c.name, rows, us, floor,
                  problem.bytes() / us / 1e3, 100 * floor / us);
      if (rows == 1) std::printf("  few rows' %.2f", problem.measure(plan_for(c, rows)));
      std::printf("\n");
    }
  }

  Bench bench_;
  const ClusterCounts counts_ = DeviceContext::current().budget().clusters;
  const char* separator_ = "";
};

}  // namespace fathom::cuda
