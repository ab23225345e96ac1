// The mixture of experts in e4m3 of few tokens on the GPU: time of a launch in a CUDA graph over
// several layers' weights, more than the L2 holds together; median of 11 replays. The floor is the
// reading of the weights of all experts that have tokens.
//
//   scaled_moe_few_rows_cuda_bench [--json | --sweep] [name]
//
// --sweep times several plans of scaled_moe_few_rows for each shape. With a name only the shapes
// whose names begin with it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/scaled_moe_few_rows_cuda.h"
#include "ops/moe/scaled_moe_one_row_cuda.h"

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
      {"v3", {7168, 256, 8, 2048, 2048}, {1, 2, 4, 8, 16, 32, 64, 128}},
      {"8 experts x 1", {7168, 8, 8, 2048, 0}, {1}, true},
      {"32 experts x 4", {7168, 32, 8, 2048, 0}, {16}, true},
      {"32 experts x 20", {7168, 32, 8, 2048, 0}, {80}, true},
      {"32 experts x 40", {7168, 32, 8, 2048, 0}, {160}, true},
      {"256 experts x 1", {7168, 256, 8, 2048, 0}, {32}, true},
      {"256 experts x 4", {7168, 256, 8, 2048, 0}, {128}, true},
      {"eighth v3", {7168, 256, 8, 256, 256}, {1, 2, 4, 8, 16, 32, 64, 128}},
      {"eighth 8 experts x 1", {7168, 8, 8, 256, 0}, {1}, true},
      {"eighth 32 experts x 4", {7168, 32, 8, 256, 0}, {16}, true},
      {"eighth 32 experts x 20", {7168, 32, 8, 256, 0}, {80}, true},
      {"eighth 32 experts x 40", {7168, 32, 8, 256, 0}, {160}, true},
      {"eighth 256 experts x 1", {7168, 256, 8, 256, 0}, {32}, true},
      {"dense", {7168, 1, 1, 18432, 0}, {1, 16, 64}},
      {"dense eighth", {7168, 1, 1, 2304, 0}, {1, 16, 64}}};
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
  DeviceArray<uint8_t> weights, x;
  DeviceArray<float> scales, x_scales;  // for any number of layers: they take a layer's each
};

Memory make_memory() {
  Memory memory{DeviceArray<uint8_t>(int64_t{12} << 30), DeviceArray<uint8_t>(512 * 7168),
                DeviceArray<float>(int64_t{1} << 22), DeviceArray<float>(512 * 56)};
  std::mt19937 random(1);
  const auto numbers = [&](int64_t count) {  // e4m3 of magnitudes up to 16
    std::vector<uint8_t> bytes(static_cast<size_t>(count));
    for (uint8_t& byte : bytes) {
      const auto bits = static_cast<uint32_t>(random());
      byte = static_cast<uint8_t>((bits & 128) | (bits & 127) % 88);
    }
    return bytes;
  };
  const auto some = numbers(1 << 23);
  for (int64_t at = 0; at < memory.weights.size(); at += std::ssize(some)) {
    const bool is_first = at == 0;
    const int64_t count = std::min(std::ssize(some), memory.weights.size() - at);
    check(cudaMemcpy(memory.weights.data() + at, is_first ? some.data() : memory.weights.data(),
                     static_cast<size_t>(count), cudaMemcpyDefault),
          "filling memory");
  }
  memory.x.copy_from(numbers(memory.x.size()));
  const auto positive = [&](int64_t count, float most) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = most * (0.5f + static_cast<float>(random() % 1000) / 2000);
    return values;
  };
  memory.scales.copy_from(positive(memory.scales.size(), 0.003f));
  memory.x_scales.copy_from(positive(memory.x_scales.size(), 0.1f));
  return memory;
}

class Problem {
 public:
  Problem(const Memory& memory, const MoeShape& shape, int32_t rows, bool even)
      : memory_(memory),
        shape_(shape),
        rows_(rows),
        out_(int64_t{rows} * shape.hidden),
        progress_(kScaledMoeProgressWords) {
    check(cudaMemset(progress_.data(), 0, progress_.bytes()), "clearing");
    std::mt19937 random(2);
    const int64_t layer = layer_bytes();
    const int64_t copies = std::clamp<int64_t>(memory.weights.size() / layer, 1, 12);
    int64_t experts = 0;
    for (int64_t i = 0; i < copies; ++i) {
      const auto ids = choose(shape, rows, even, random);
      experts += std::ssize(std::set<int32_t>(ids.begin(), ids.end()));
      ids_.emplace_back(ids);
    }
    factors_ = DeviceArray<float>(
        std::vector<float>(static_cast<size_t>(rows * shape.experts_per_token), 0.2f));
    workspace_ = DeviceArray<std::byte>(std::max(scaled_moe_few_rows_workspace_bytes(shape, rows),
                                                 scaled_moe_one_row_workspace_bytes(shape)));
    bytes_ = 3.0 * shape.hidden *
             (static_cast<double>(experts) / static_cast<double>(copies) * shape.inter +
              shape.shared_inter);
  }

  double bytes() const { return bytes_; }  // that a layer must read
  int copies() const { return static_cast<int>(ids_.size()); }

  ScaledMoeArguments arguments(int copy) const {
    const uint8_t* weights = memory_.weights.data() + copy * layer_bytes();
    const int64_t expert = int64_t{shape_.inter} * shape_.hidden * shape_.num_experts;
    const int64_t shared = int64_t{shape_.shared_inter} * shape_.hidden, block = 128 * 128;
    const float* scales = memory_.scales.data() + copy * (layer_bytes() / block / 12 / 4 * 4);
    return {.shape = shape_,
            .rows = rows_,
            .x = memory_.x.data(),
            .x_scales = memory_.x_scales.data(),
            .x_scales_stride = 512,
            .expert_ids = ids_[static_cast<size_t>(copy)].data(),
            .expert_weights = factors_.data(),
            .gate_up = weights,
            .gate_up_scales = scales,
            .down = weights + 2 * expert,
            .down_scales = scales + 2 * expert / block,
            .shared_gate_up = weights + 3 * expert,
            .shared_gate_up_scales = scales + 3 * expert / block,
            .shared_down = weights + 3 * expert + 2 * shared,
            .shared_down_scales = scales + (3 * expert + 2 * shared) / block,
            .out = out_.data(),
            .out_type = DType::kBF16,
            .workspace = workspace_.data(),
            .progress = progress_.data()};
  }

 private:
  int64_t layer_bytes() const {
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
    scaled_moe_few_rows(plan, problem.arguments(copy), stream);
  });
}

double measure_one_row(const Problem& problem) {
  return time_in_graph(problem.copies(), [&](int copy, cudaStream_t stream) {
    scaled_moe_one_row(problem.arguments(copy), stream);
  });
}

MoeFewRowsPlan plan_for(const Case& c, int32_t rows, const ClusterCounts& counts) {
  return plan_moe_few_rows({rows, c.shape.hidden, c.shape.num_experts, c.shape.experts_per_token,
                            c.shape.inter, c.shape.shared_inter, true},
                           counts);
}

void sweep(const Memory& memory, const Case& c, const ClusterCounts& counts) {
  for (const int32_t rows : c.rows) {
    const Problem problem(memory, c.shape, rows, c.even);
    const MoeFewRowsPlan chosen = plan_for(c, rows, counts);
    std::printf("%s, %d rows, floor %.1f us:", c.name, rows, problem.bytes() / kReadBytesPerUs);
    for (const int warpgroups : {1, 2}) {
      if (warpgroups == 1 && rows > 192) continue;
      for (const int splits : {1, 2}) {
        MoeFewRowsPlan plan = chosen;
        plan.warpgroups = warpgroups;
        plan.splits = splits;
        plan.clusters = std::min(plan.blocks / splits, c.shape.hidden / 8);
        if (plan.hidden_groups(c.shape.hidden) > 8 * warpgroups) continue;
        for (const int kilobytes : {64, 96, 128, 160, 192}) {
          plan.ring_bytes = kilobytes * 1024;
          if (plan.ring_bytes < 2 * moe_stage_bytes(rows, warpgroups)) continue;
          if (plan.ring_bytes + scaled_moe_sum_bytes(rows, warpgroups) +
                  scaled_moe_table_bytes(rows * c.shape.experts_per_token) >
              kMoeSharedBytes) {
            continue;
          }
          std::printf("  %dx%dx%d %.1f", warpgroups, splits, kilobytes, measure(problem, plan));
        }
      }
    }
    std::printf("  (%dx%dx%d)\n", chosen.warpgroups, chosen.splits, chosen.ring_bytes / 1024);
  }
}

void run(const Memory& memory, const Case& c, const ClusterCounts& counts, bool json,
         const char** separator) {
  for (const int32_t rows : c.rows) {
    const Problem problem(memory, c.shape, rows, c.even);
    const double few = measure(problem, plan_for(c, rows, counts));
    const double us = rows == 1 ? measure_one_row(problem) : few;
    const double floor = problem.bytes() / kReadBytesPerUs;
    if (json) {
      std::printf(
          "%s\n  {\"shape\": \"%s\", \"hidden\": %d, \"experts\": %d, \"experts_per_token\": %d, "
          "\"inter\": %d, \"shared_inter\": %d, \"rows\": %d, \"us\": %.2f, \"floor_us\": %.2f}",
          *separator, c.name, c.shape.hidden, c.shape.num_experts, c.shape.experts_per_token,
          c.shape.inter, c.shape.shared_inter, rows, us, floor);
      *separator = ",";
    } else {
      std::printf("%-24s %4d %8.2f %8.2f %5.0f %5.1f", c.name, rows, us, floor,
                  problem.bytes() / us / 1e3, 100 * floor / us);
      if (rows == 1) std::printf("  few rows' %.2f", few);
      std::printf("\n");
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  using namespace fathom::cuda;
  const bool is_json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  const bool is_sweep = argc > 1 && std::strcmp(argv[1], "--sweep") == 0;
  const int at = is_json || is_sweep ? 2 : 1;
  const std::string wanted = argc > at ? argv[at] : "";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const Memory memory = make_memory();
  const ClusterCounts counts = count_clusters();
  const char* separator = "";
  if (is_json) {
    std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
  } else {
    std::printf("%s\n%-24s rows       us    floor  GB/s     %%\n", device_line().c_str(), "shape");
  }
  for (const Case& c : cases()) {
    if (!std::string(c.name).starts_with(wanted)) continue;
    if (is_sweep) {
      sweep(memory, c, counts);
    } else {
      run(memory, c, counts, is_json, &separator);
    }
  }
  if (is_json) std::printf("\n]}\n");
  return 0;
}
