// Shared by the benchmarks of few-token MoE on a GPU, bf16 and e4m3: time of a launch in a CUDA
// graph over the weights of several layers, together larger than the L2; median of 11 replays. The
// roofline counts the weight bytes of all experts that have tokens. One token takes another launch.
//
//   PROGRAM [--json | --sweep] [--routing uniform|zipf] [--only NAME]
//
// --sweep times several plans of the few-row launch for each shape. --only: the shapes whose names
// begin with it. --routing zipf: the shapes with drawn experts, drawn so (expert_draw.h).
//
// A benchmark is a class that holds the memory of weights, with
//   static const std::vector<MoeFewRowsCase>& cases();
//   static constexpr bool kScaled;
//   static int64_t behind_ring(int rows, int64_t pairs, int warpgroups);  bytes of shared memory
//   class Problem, made of (const Bench&, const MoeShape&, rows, Routing), with
//     double bytes() const;  that a layer must read
//     double measure(const MoeFewRowsPlan&) const;
//     double measure_one_row() const;
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/co_resident.h"
#include "device/cuda/graph_timer.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/expert_draw.h"
#include "ops/moe/plans/moe_few_rows_plan.h"

namespace fathom::cuda {

struct MoeFewRowsCase {
  const char* name;
  MoeShape shape;
  std::vector<int32_t> rows;
  bool even = false;  // every expert has the same number of tokens
};

// Weight elements of a layer.
inline int64_t layer_elements(const MoeShape& shape) {
  return int64_t{3} * shape.hidden *
         (int64_t{shape.inter} * shape.num_experts + shape.shared_inter);
}

// The tokens' experts in each of the layers that fit into `memory` weights.
struct LayersOfTokens {
  std::vector<std::vector<int32_t>> ids;
  double weights_read = 0;  // per layer, on average

  LayersOfTokens(int64_t memory, const MoeShape& shape, int32_t rows, Routing routing) {
    const int64_t layers = std::clamp<int64_t>(memory / layer_elements(shape), 1, 12);
    int64_t experts = 0;
    for (int64_t i = 0; i < layers; ++i) {
      ids.push_back(draw_experts(routing, shape.num_experts, shape.experts_per_token, rows,
                                 static_cast<uint32_t>(2 + i)));
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
    bool is_json = false, is_sweep = false;
    std::string wanted;
    for (int i = 1; i < argc; ++i) {
      is_json = is_json || std::strcmp(argv[i], "--json") == 0;
      is_sweep = is_sweep || std::strcmp(argv[i], "--sweep") == 0;
      if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) wanted = argv[++i];
    }
    const Routing routing = routing_flag(argc, argv);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    if (is_json) {
      std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
    } else {
      std::printf("%s\n%-24s rows       us    floor  GB/s     %%\n", device_line().c_str(),
                  "shape");
    }
    for (const MoeFewRowsCase& c : Bench::cases()) {
      if (!std::string(c.name).starts_with(wanted)) continue;
      // One expert, or as many tokens for each, is no draw.
      const bool is_drawn = !c.even && c.shape.num_experts > 1;
      if (routing == Routing::kZipf && !is_drawn) continue;
      for (const int32_t rows : c.rows) {
        const typename Bench::Problem problem(bench_, c.shape, rows,
                                              c.even ? Routing::kEven : routing);
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
