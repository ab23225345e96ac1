// Both mixtures of experts on the GPU with all of DeepSeek-V3's weights of a layer (256 experts of
// 2048 columns: 11 GB in e4m3, 23 GB in bf16, beyond 2^31 and 2^32 bytes) and with skewed routing:
// one expert takes half of the tokens. Each row is compared with double precision on its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/bf16_cuda/moe_problem_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_problem_cuda.h"
#include "tensor/dtype.h"

namespace fathom::cuda {
namespace {

constexpr MoeShape kV3 = {.hidden = 7168,
                          .num_experts = 256,
                          .experts_per_token = 8,
                          .inter = 2048,
                          .shared_inter = 2048};
constexpr int32_t kTaken = 250;  // expert of half of the tokens: beyond 4 GiB in either type
constexpr int32_t kMostRows = 1024;
constexpr size_t kSamples = 5;

// Distinct experts for each row: every second row has kTaken and the last expert, the others never
// kTaken.
std::vector<int32_t> skewed_experts() {
  std::mt19937 random(41);
  std::vector<int32_t> ids;
  for (int32_t row = 0; row < kMostRows; ++row) {
    std::vector<int32_t> chosen;
    if (row % 2 == 0) chosen = {kTaken, kV3.num_experts - 1};
    while (std::ssize(chosen) < kV3.experts_per_token) {
      const auto id = static_cast<int32_t>(random() % static_cast<uint32_t>(kV3.num_experts));
      if (id != kTaken && std::find(chosen.begin(), chosen.end(), id) == chosen.end()) {
        chosen.push_back(id);
      }
    }
    std::shuffle(chosen.begin(), chosen.end(), random);
    ids.insert(ids.end(), chosen.begin(), chosen.end());
  }
  return ids;
}

// The rows to compare: the first, the last and others in between, every second an even one.
std::vector<int32_t> sampled(int32_t rows) {
  std::vector<int32_t> chosen;
  for (size_t i = 0; i < kSamples; ++i) {
    const auto row = static_cast<int32_t>(i * static_cast<size_t>(rows - 1) / (kSamples - 1));
    chosen.push_back(i % 2 == 1 ? row / 2 * 2 : row);
  }
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

// Compares rows of `out` with expected(row), computed on as many threads.
template <typename Expected>
void compare(const std::vector<float>& out, int32_t rows, double most, const Expected& expected) {
  const std::vector<int32_t> chosen = sampled(rows);
  std::vector<std::vector<double>> right(chosen.size());
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < chosen.size(); ++i) {
      threads.emplace_back([&, i] { right[i] = expected(chosen[i]); });
    }
  }
  for (size_t i = 0; i < chosen.size(); ++i) {
    double error = 0, norm = 0;
    for (size_t c = 0; c < right[i].size(); ++c) {
      const double off =
          double{out[static_cast<size_t>(chosen[i]) * right[i].size() + c]} - right[i][c];
      error += off * off;
      norm += right[i][c] * right[i][c];
    }
    const double share = std::sqrt(error / norm);
    std::printf("%4d rows, row %4d: %.5f off\n", rows, chosen[i], share);
    EXPECT_LE(share, most) << "row " << chosen[i] << " of " << rows;
  }
  // Rows that are not compared must be written, too.
  for (size_t i = 0; i < static_cast<size_t>(rows) * static_cast<size_t>(kV3.hidden); ++i) {
    ASSERT_TRUE(std::isfinite(out[i])) << "element " << i;
  }
}

// One row, few, the most that the few-row launches take, one more, many.
constexpr int32_t kRowCounts[] = {1, 8, 64, 65, kMostRows};

TEST(LargeMoe, ScaledWithSkewedRouting) {
  const ScaledMoeProblem problem(kV3, kMostRows, skewed_experts(), 42);
  const ScaledMoeReference reference(problem);
  const DeviceArray<uint8_t> workspace(scaled_moe_workspace_bytes(kV3, kMostRows));
  for (const int32_t rows : kRowCounts) {
    for (const bool batch_invariant : {false, true}) {
      SCOPED_TRACE(batch_invariant);
      ScaledMoeArguments arguments = problem.arguments(DType::kF32);
      arguments.rows = rows;
      arguments.workspace = workspace.data();
      arguments.batch_invariant = batch_invariant;
      const auto run = [&] {
        check(cudaMemset(problem.out.data(), 0xFF, problem.out.bytes()), "poison");
        check(cudaMemset(workspace.data(), 0xFF, workspace.bytes()), "poison");
        scaled_moe(arguments, nullptr);
        check(cudaDeviceSynchronize(), "synchronize");
        return problem.out.to_host();
      };
      const std::vector<float> out = run();
      // Some activations round to the neighbouring e4m3 (scaled_moe_many_rows_cuda_test.cc).
      compare(out, rows, 2e-2, [&](int32_t row) { return reference.row(row); });
      const std::vector<float> again = run();
      EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)), 0) << rows;
    }
  }
}

// An expert's matrices, copied from the device on first use.
class Bf16Reference {
 public:
  explicit Bf16Reference(const MoeProblem& problem)
      : problem_(problem), x_(widen(problem.x.to_host())), weights_(problem.weights.to_host()) {
    for (const int32_t row_count : kRowCounts) {
      for (const int32_t row : sampled(row_count)) {
        for (int j = 0; j < kV3.experts_per_token; ++j) fetch(expert(row, j));
      }
    }
    shared_ = {matrix(problem.shared_gate_up.data(), 0, kGateUp),
               matrix(problem.shared_down.data(), 0, kDown)};
  }

  std::vector<double> row(int32_t row) const {
    std::vector<double> out(static_cast<size_t>(kV3.hidden));
    const float* const x = x_.data() + int64_t{row} * kV3.hidden;
    for (int j = 0; j < kV3.experts_per_token; ++j) {
      add(experts_.at(expert(row, j)), x,
          weights_[static_cast<size_t>(row * kV3.experts_per_token + j)], out);
    }
    add(shared_, x, 1, out);
    return out;
  }

 private:
  static constexpr int64_t kGateUp = int64_t{2} * kV3.inter * kV3.hidden,
                           kDown = int64_t{kV3.inter} * kV3.hidden;
  struct Mlp {
    std::vector<uint16_t> gate_up, down;  // bits
  };

  int32_t expert(int32_t row, int j) const {
    return problem_.expert_ids[static_cast<size_t>(row * kV3.experts_per_token + j)];
  }
  static std::vector<uint16_t> matrix(const uint16_t* all, int64_t index, int64_t elements) {
    std::vector<uint16_t> bits(static_cast<size_t>(elements));
    check(cudaMemcpy(bits.data(), all + index * elements, bits.size() * 2, cudaMemcpyDeviceToHost),
          "copying an expert");
    return bits;
  }
  void fetch(int32_t expert) {
    if (experts_.contains(expert)) return;
    experts_[expert] = {matrix(problem_.gate_up.data(), expert, kGateUp),
                        matrix(problem_.down.data(), expert, kDown)};
  }

  template <typename T>
  static double dot(const uint16_t* weights, const T* x, int64_t n) {
    double sums[4] = {};  // independent sums
    for (int64_t i = 0; i < n; i += 4) {
      for (int64_t j = 0; j < 4; ++j) sums[j] += double{to_float(bf16{weights[i + j]})} * x[i + j];
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
  }
  static void add(const Mlp& mlp, const float* x, double weight, std::vector<double>& out) {
    std::vector<double> inner;
    for (int64_t i = 0; i < kV3.inter; ++i) {
      const double gate = dot(mlp.gate_up.data() + i * kV3.hidden, x, kV3.hidden);
      const double up = dot(mlp.gate_up.data() + (i + kV3.inter) * kV3.hidden, x, kV3.hidden);
      inner.push_back(gate / (1 + std::exp(-gate)) * up);
    }
    for (int64_t i = 0; i < kV3.hidden; ++i) {
      out[static_cast<size_t>(i)] +=
          weight * dot(mlp.down.data() + i * kV3.inter, inner.data(), kV3.inter);
    }
  }

  const MoeProblem& problem_;
  const std::vector<float> x_, weights_;
  std::map<int32_t, Mlp> experts_;
  Mlp shared_;
};

TEST(LargeMoe, Bf16WithSkewedRouting) {
  const MoeProblem problem(kV3, kMostRows, skewed_experts(), 43);
  const Bf16Reference reference(problem);
  const DeviceArray<uint8_t> workspace(moe_workspace_bytes(kV3, kMostRows));
  const DeviceArray<uint64_t> progress{std::vector<uint64_t>(kMoeProgressWords)};
  for (const int32_t rows : kRowCounts) {
    MoeArguments arguments = problem.arguments(DType::kF32);
    arguments.rows = rows;
    arguments.workspace = workspace.data();
    arguments.progress = progress.data();
    const auto run = [&] {
      check(cudaMemset(problem.out.data(), 0xFF, problem.out.bytes()), "poison");
      check(cudaMemset(workspace.data(), 0xFF, workspace.bytes()), "poison");
      moe(arguments, nullptr);
      check(cudaDeviceSynchronize(), "synchronize");
      return problem.out.to_host();
    };
    const std::vector<float> out = run();
    compare(out, rows, 1e-2, [&](int32_t row) { return reference.row(row); });
    const std::vector<float> again = run();
    EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)), 0) << rows;
  }
}

}  // namespace
}  // namespace fathom::cuda
