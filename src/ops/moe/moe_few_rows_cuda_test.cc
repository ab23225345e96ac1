// The mixture of experts of few tokens and of one on the GPU against a plain computation on the
// host.
#include "ops/moe/moe_few_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

constexpr uint16_t kNan = 0x7FC0;

// By moe_few_rows, by such a plan if there is one, or by moe_one_row.
struct Way {
  const MoeFewRowsPlan* plan = nullptr;
  bool one_row = false;
};

float dot(const float* a, const float* b, int64_t count) {
  float sums[16] = {};
  for (int64_t i = 0; i < count; i += 16) {
    for (int64_t j = 0; j < 16; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return std::accumulate(std::begin(sums), std::end(sums), 0.0f);
}

struct Weights {
  MoeShape shape;
  std::vector<uint16_t> gate_up, down, shared_gate_up, shared_down;
};

Weights random_weights(const MoeShape& s, std::mt19937& random) {
  const float deviation = 1 / std::sqrt(static_cast<float>(s.hidden));
  return {s, random_bf16(int64_t{s.num_experts} * 2 * s.inter * s.hidden, deviation, random),
          random_bf16(int64_t{s.num_experts} * s.inter * s.hidden, deviation, random),
          random_bf16(int64_t{2} * s.shared_inter * s.hidden, deviation, random),
          random_bf16(int64_t{s.shared_inter} * s.hidden, deviation, random)};
}

struct Tokens {
  int32_t rows = 0;
  std::vector<uint16_t> x;
  std::vector<int32_t> ids;
  std::vector<float> factors;
};

// Each token's experts at random among the first `choice`; every seventh token is padding: NaN,
// without experts.
Tokens random_tokens(const MoeShape& s, int32_t rows, int32_t choice, std::mt19937& random) {
  Tokens tokens;
  tokens.rows = rows;
  tokens.x = random_bf16(int64_t{rows} * s.hidden, 1.0f, random);
  std::vector<int32_t> experts(static_cast<size_t>(choice));
  std::iota(experts.begin(), experts.end(), 0);
  for (int32_t row = 0; row < rows; ++row) {
    std::shuffle(experts.begin(), experts.end(), random);
    const bool padding = row % 7 == 6;
    for (int32_t i = 0; i < s.experts_per_token; ++i) {
      tokens.ids.push_back(padding ? -1 : experts[static_cast<size_t>(i)]);
      tokens.factors.push_back(static_cast<float>(random() % 1000) / 1000);
    }
    if (padding) {
      std::fill_n(tokens.x.begin() + int64_t{row} * s.hidden, s.hidden, kNan);
    }
  }
  return tokens;
}

// Adds factor * mlp(x).
void add_mlp(const std::vector<float>& x, const float* gate_up, const float* down, int64_t inter,
             float factor, std::vector<double>& out) {
  const int64_t hidden = std::ssize(x);
  std::vector<float> activations(static_cast<size_t>(inter));
  for (int64_t i = 0; i < inter; ++i) {
    const float gate = dot(gate_up + i * hidden, x.data(), hidden);
    const float up = dot(gate_up + (inter + i) * hidden, x.data(), hidden);
    activations[static_cast<size_t>(i)] = from_bf16(bf16_bits(gate / (1 + std::exp(-gate)) * up));
  }
  for (int64_t i = 0; i < hidden; ++i) {
    out[static_cast<size_t>(i)] +=
        double{factor} * dot(down + i * inter, activations.data(), inter);
  }
}

class OnHost {
 public:
  explicit OnHost(const Weights& weights)
      : shape_(weights.shape),
        gate_up_(widen(weights.gate_up)),
        down_(widen(weights.down)),
        shared_gate_up_(widen(weights.shared_gate_up)),
        shared_down_(widen(weights.shared_down)) {}

  std::vector<double> row(const Tokens& tokens, int64_t row) const {
    const int64_t hidden = shape_.hidden, inter = shape_.inter, k = shape_.experts_per_token;
    std::vector<float> x(static_cast<size_t>(hidden));
    for (int64_t i = 0; i < hidden; ++i) {
      x[static_cast<size_t>(i)] = from_bf16(tokens.x[static_cast<size_t>(row * hidden + i)]);
    }
    std::vector<double> out(static_cast<size_t>(hidden));
    for (int64_t i = 0; i < k; ++i) {
      const int64_t expert = tokens.ids[static_cast<size_t>(row * k + i)];
      add_mlp(x, gate_up_.data() + expert * 2 * inter * hidden,
              down_.data() + expert * inter * hidden, inter,
              tokens.factors[static_cast<size_t>(row * k + i)], out);
    }
    if (shape_.shared_inter > 0) {
      add_mlp(x, shared_gate_up_.data(), shared_down_.data(), shape_.shared_inter, 1, out);
    }
    return out;
  }

 private:
  MoeShape shape_;
  std::vector<float> gate_up_, down_, shared_gate_up_, shared_down_;
};

class OnGpu {
 public:
  explicit OnGpu(const Weights& weights)
      : shape_(weights.shape),
        gate_up_(weights.gate_up),
        down_(weights.down),
        shared_gate_up_(weights.shared_gate_up),
        shared_down_(weights.shared_down),
        progress_(kMoeProgressWords) {
    check(cudaMemset(progress_.data(), 0, progress_.bytes()), "clearing");
  }

  // The bytes of out after one launch into poisoned memory, over a poisoned workspace.
  template <typename T>
  std::vector<T> run(const Tokens& tokens, const Way& way = {}) const {
    const DeviceArray<uint16_t> x(tokens.x);
    const DeviceArray<int32_t> ids(tokens.ids);
    const DeviceArray<float> factors(tokens.factors);
    const DeviceArray<T> out(int64_t{tokens.rows} * shape_.hidden);
    const DeviceArray<std::byte> workspace(std::max(
        moe_few_rows_workspace_bytes(shape_, tokens.rows), moe_one_row_workspace_bytes(shape_)));
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    check(cudaMemset(workspace.data(), 0xFF, workspace.bytes()), "poison");
    const MoeArguments arguments = {.shape = shape_,
                                    .rows = tokens.rows,
                                    .x = x.data(),
                                    .expert_ids = ids.data(),
                                    .expert_weights = factors.data(),
                                    .gate_up = gate_up_.data(),
                                    .down = down_.data(),
                                    .shared_gate_up = shared_gate_up_.data(),
                                    .shared_down = shared_down_.data(),
                                    .out = out.data(),
                                    .out_type = sizeof(T) == 4 ? DType::kF32 : DType::kBF16,
                                    .workspace = workspace.data(),
                                    .progress = progress_.data()};
    if (way.one_row) {
      moe_one_row(arguments, nullptr);
    } else if (way.plan != nullptr) {
      moe_few_rows(*way.plan, arguments, nullptr);
    } else {
      moe_few_rows(arguments, nullptr);
    }
    check(cudaDeviceSynchronize(), "synchronize");
    return out.to_host();
  }

 private:
  MoeShape shape_;
  DeviceArray<uint16_t> gate_up_, down_, shared_gate_up_, shared_down_;
  DeviceArray<uint64_t> progress_;
};

// Of every `step`-th row.
void expect_equal(const OnHost& host, const Tokens& tokens, const std::vector<float>& out,
                  int64_t step) {
  const int64_t hidden = std::ssize(out) / tokens.rows;
  double error = 0, norm = 0;
  for (int64_t row = 0; row < tokens.rows; row += step) {
    if (row % 7 == 6) continue;
    const auto expected = host.row(tokens, row);
    for (int64_t i = 0; i < hidden; ++i) {
      const double actual = out[static_cast<size_t>(row * hidden + i)];
      ASSERT_TRUE(std::isfinite(actual)) << "row " << row << ", column " << i;
      const double difference = actual - expected[static_cast<size_t>(i)];
      error += difference * difference;
      norm += expected[static_cast<size_t>(i)] * expected[static_cast<size_t>(i)];
      ASSERT_LE(std::abs(difference), 0.15) << "row " << row << ", column " << i;
    }
  }
  // bf16 activations on both sides, the expert's weight before or after their rounding.
  EXPECT_LE(std::sqrt(error / norm), 5e-3);
}

void compare(const Weights& weights, const OnHost& host, const OnGpu& gpu, int32_t rows,
             int32_t choice, int64_t step, const Way& way = {}) {
  SCOPED_TRACE(testing::Message() << rows << " rows, among " << choice << " experts");
  std::mt19937 random(static_cast<uint32_t>(rows * 1000 + choice));
  const Tokens tokens = random_tokens(weights.shape, rows, choice, random);
  const auto f32 = gpu.run<float>(tokens, way);
  expect_equal(host, tokens, f32, step);
  const auto again = gpu.run<float>(tokens, way);
  EXPECT_EQ(std::memcmp(f32.data(), again.data(), f32.size() * 4), 0);
  const auto narrow = gpu.run<uint16_t>(tokens, way);
  for (size_t i = 0; i < f32.size(); ++i) {
    if (std::isnan(f32[i])) continue;  // a row of padding
    ASSERT_EQ(narrow[i], bf16_bits(f32[i])) << i;
  }
}

void compare_all(const MoeShape& shape, const std::vector<int32_t>& all_rows,
                 int64_t rows_checked) {
  std::mt19937 random(static_cast<uint32_t>(shape.hidden + shape.num_experts));
  const Weights weights = random_weights(shape, random);
  const OnHost host(weights);
  const OnGpu gpu(weights);
  for (const int32_t rows : all_rows) {
    const int64_t step = std::max<int64_t>(1, rows / rows_checked) | 1;
    compare(weights, host, gpu, rows, shape.num_experts, step);
    if (rows == 1) compare(weights, host, gpu, 1, shape.num_experts, 1, {.one_row = true});
    // All tokens in as few experts as there can be.
    compare(weights, host, gpu, rows, shape.experts_per_token, step);
  }
}

TEST(MoeFewRows, TinyEqualsTheHost) {
  compare_all({256, 16, 4, 128, 128}, {1, 2, 5, 8, 9, 31, 64, 65, 130, 200, 448}, 24);
}

TEST(MoeFewRows, OddShapesEqualTheHost) {
  compare_all({320, 7, 3, 192, 0}, {1, 3, 17, 40, 100}, 30);
  compare_all({64, 256, 8, 64, 64}, {1, 33, 300, 448}, 60);
  compare_all({192, 5, 1, 64, 320}, {1, 12, 70}, 30);
}

TEST(MoeFewRows, V2LiteColumnsEqualTheHost) {
  compare_all({2048, 8, 6, 1408, 2816}, {1, 20, 64, 333}, 3);
}

TEST(MoeFewRows, V3ColumnsEqualTheHost) { compare_all({7168, 3, 2, 512, 256}, {1, 30}, 3); }

TEST(MoeFewRows, EveryPlanEqualsTheHost) {
  const MoeShape shape = {512, 16, 4, 256, 384};
  std::mt19937 random(9);
  const Weights weights = random_weights(shape, random);
  const OnHost host(weights);
  const OnGpu gpu(weights);
  const MoeFewRowsPlan chosen = plan_moe_few_rows({1, 512, 16, 4, 256, 384}, count_clusters());
  for (const int warpgroups : {1, 2}) {
    for (const int splits : {1, 2}) {
      for (const int clusters : {4, 9, 64}) {
        if (64 / clusters > 8 * warpgroups) continue;
        for (const int32_t rows : {3, 60, 140}) {
          const MoeFewRowsPlan plan = {
              .blocks = chosen.blocks,
              .warpgroups = warpgroups,
              .splits = splits,
              .clusters = clusters,
              .ring_bytes = (clusters == 9 ? 2 : 3) * moe_stage_bytes(rows, warpgroups)};
          compare(weights, host, gpu, rows, 16, rows / 3, {.plan = &plan});
        }
      }
    }
  }
}

// What racecheck takes a minute for.
TEST(MoeFewRows, ThreeTokensEqualTheHost) {
  const MoeShape shape = {64, 4, 2, 64, 64};
  std::mt19937 random(8);
  const Weights weights = random_weights(shape, random);
  const Tokens tokens = random_tokens(shape, 3, 4, random);
  expect_equal(OnHost(weights), tokens, OnGpu(weights).run<float>(tokens), 1);
}

TEST(MoeOneRow, OfFewColumnsEqualsTheHost) {
  const MoeShape shape = {64, 4, 2, 64, 64};
  std::mt19937 random(8);
  const Weights weights = random_weights(shape, random);
  const Tokens tokens = random_tokens(shape, 1, 4, random);
  expect_equal(OnHost(weights), tokens, OnGpu(weights).run<float>(tokens, {.one_row = true}), 1);
}

TEST(MoeFewRows, GivesTheSameBitsAgain) {
  const MoeShape shape = {512, 64, 6, 256, 512};
  std::mt19937 random(11);
  const OnGpu gpu(random_weights(shape, random));
  const Tokens tokens = random_tokens(shape, 37, 64, random);
  const auto first = gpu.run<uint16_t>(tokens);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(gpu.run<uint16_t>(tokens), first);
}

TEST(MoeOneRow, GivesTheSameBitsAgainAndPaddingDisturbsNothing) {
  const MoeShape shape = {2048, 64, 6, 1408, 2816};
  std::mt19937 random(12);
  const OnGpu gpu(random_weights(shape, random));
  const Tokens tokens = random_tokens(shape, 1, 64, random);
  Tokens padding = tokens;
  std::fill(padding.ids.begin(), padding.ids.end(), -1);
  std::fill(padding.x.begin(), padding.x.end(), kNan);
  const auto first = gpu.run<uint16_t>(tokens, {.one_row = true});
  for (int i = 0; i < 50; ++i) {
    if (i % 7 == 3) gpu.run<uint16_t>(padding, {.one_row = true});
    if (i % 5 == 2) gpu.run<uint16_t>(tokens);  // counts with the same counters
    EXPECT_EQ(gpu.run<uint16_t>(tokens, {.one_row = true}), first);
  }
}

// A token alone has what it has among others, but for the order of sums.
TEST(MoeFewRows, PaddingChangesNoOtherRow) {
  const MoeShape shape = {256, 16, 4, 128, 128};
  std::mt19937 random(10);
  const OnGpu gpu(random_weights(shape, random));
  Tokens tokens = random_tokens(shape, 48, 16, random);
  const auto before = gpu.run<float>(tokens);
  for (int64_t row = 6; row < 48; row += 7) {
    for (int64_t i = 0; i < 256; ++i) {
      tokens.x[static_cast<size_t>(row * 256 + i)] = static_cast<uint16_t>(random());
    }
  }
  const auto after = gpu.run<float>(tokens);
  for (size_t i = 0; i < before.size(); ++i) {
    if (i / 256 % 7 == 6) continue;
    ASSERT_EQ(before[i], after[i]) << i;
  }
}

}  // namespace
}  // namespace fathom::cuda
