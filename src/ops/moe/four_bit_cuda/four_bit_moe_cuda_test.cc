// MoE with four-bit experts on the GPU against double precision over the same codes and scales.
#include "ops/moe/four_bit_cuda/four_bit_moe_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/moe/four_bit_cuda/four_bit_problem_cuda.h"

namespace fathom::cuda {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Way {
  const char* name;
  void (*launch)(const FourBitMoeArguments&, GpuStream);
  int64_t (*workspace_bytes)(const MoeShape&, int32_t);
  bool rounds_weights;  // and the experts' results, to bf16
  double most_error;    // relative, of all rows together
};

// With few rows, some activations round to the neighbouring bf16.
const Way kWays[] = {
    {"Few", four_bit_moe_few_rows, four_bit_moe_few_rows_workspace_bytes, false, 3e-4},
    {"Many", four_bit_moe_many_rows, four_bit_moe_many_rows_workspace_bytes, true, 2.5e-3}};

class FourBitMoe : public testing::TestWithParam<Way> {
 protected:
  void use(const MoeShape& shape, FourBitCode code = FourBitCode::kInteger) {
    experts_ = std::make_unique<FourBitExperts>(shape, code, random_());
    gate_up_ = DeviceArray<uint8_t>(gate_up_in_tiles(experts_->gate_up, shape.inter));
    down_ = DeviceArray<uint8_t>(down_in_tiles(experts_->down));
  }
  const MoeShape& shape() const { return experts_->shape; }

  // Rows whose number is `padding` modulo 7 have no experts, and NaN in x.
  FourBitTokens tokens(int32_t rows, const std::function<int32_t(int32_t row, int32_t i)>& id = {},
                       int32_t padding = 7) {
    const MoeShape& s = shape();
    FourBitTokens t{.rows = rows, .x = random_bf16(int64_t{rows} * s.hidden, 1.0f, random_)};
    std::vector<int32_t> all(static_cast<size_t>(s.num_experts));
    std::iota(all.begin(), all.end(), 0);
    for (int32_t row = 0; row < rows; ++row) {
      std::shuffle(all.begin(), all.end(), random_);
      const bool is_padding = row % 7 == padding;
      for (int32_t i = 0; i < s.experts_per_token; ++i) {
        t.ids.push_back(is_padding ? -1 : id ? id(row, i) : all[static_cast<size_t>(i)]);
        t.weights.push_back(0.1f + static_cast<float>(random_() % 1000) / 1000);
      }
      if (!is_padding) continue;
      std::fill_n(t.x.begin() + int64_t{row} * s.hidden, s.hidden, uint16_t{0x7FC0});
    }
    t.addend = random_bf16(int64_t{rows} * s.hidden, 0.1f, random_);
    return t;
  }

  // Over poisoned memory.
  template <typename T>
  std::vector<T> run(const FourBitTokens& t) const {
    const MoeShape& s = shape();
    const DeviceArray<uint16_t> x(t.x);
    const DeviceArray<int32_t> ids(t.ids);
    const DeviceArray<float> weights(t.weights);
    const DeviceArray<uint16_t> addend(t.addend);
    const DeviceArray<T> out(
        std::vector<T>(static_cast<size_t>(t.rows) * static_cast<size_t>(s.hidden),
                       T(sizeof(T) == 2 ? 0x7FC0 : kNan)));
    const DeviceArray<uint8_t> workspace(
        std::vector<uint8_t>(static_cast<size_t>(GetParam().workspace_bytes(s, t.rows)), 0xFF));
    GetParam().launch({.shape = s,
                       .code = experts_->gate_up.code,
                       .rows = t.rows,
                       .x = x.data(),
                       .expert_ids = ids.data(),
                       .expert_weights = weights.data(),
                       .gate_up = gate_up_.data(),
                       .down = down_.data(),
                       .addend = t.addend.empty() ? nullptr : addend.data(),
                       .out = out.data(),
                       .out_type = sizeof(T) == 2 ? DType::kBF16 : DType::kF32,
                       .workspace = workspace.data()},
                      nullptr);
    check(cudaDeviceSynchronize(), "running experts");
    return out.to_host();
  }

  // Every `step`-th row.
  void expect_near_host(const FourBitTokens& t, const std::vector<float>& out, int32_t step = 1) {
    const MoeShape& s = shape();
    double error = 0, norm = 0;
    for (int32_t row = 0; row < t.rows; row += step) {
      std::vector<double> expected(static_cast<size_t>(s.hidden));
      const int64_t first = int64_t{row} * s.hidden;
      for (int32_t c = 0; c < s.hidden && !t.addend.empty(); ++c) {
        expected[static_cast<size_t>(c)] = from_bf16(t.addend[static_cast<size_t>(first + c)]);
      }
      for (int32_t i = 0; i < s.experts_per_token; ++i) {
        const auto pair = static_cast<size_t>(row * s.experts_per_token + i);
        if (t.ids[pair] < 0) continue;
        experts_->add_mlp(t.ids[pair], t.x.data() + first, t.weights[pair],
                          GetParam().rounds_weights, expected);
      }
      for (int32_t c = 0; c < s.hidden; ++c) {
        const double actual = out[static_cast<size_t>(first + c)];
        ASSERT_TRUE(std::isfinite(actual)) << "row " << row << ", column " << c;
        const double difference = actual - expected[static_cast<size_t>(c)];
        error += difference * difference;
        norm += expected[static_cast<size_t>(c)] * expected[static_cast<size_t>(c)];
      }
    }
    EXPECT_GT(norm, 0);
    EXPECT_LE(std::sqrt(error / norm), GetParam().most_error);
  }

  void compare(const FourBitTokens& t, int32_t step = 1) {
    const MoeShape& s = shape();
    SCOPED_TRACE(testing::Message() << t.rows << " rows of " << s.hidden << ", " << s.num_experts
                                    << " experts of " << s.inter);
    const auto out = run<float>(t);
    expect_near_host(t, out, step);
    EXPECT_EQ(std::memcmp(run<float>(t).data(), out.data(), out.size() * 4), 0);
    const auto narrow = run<uint16_t>(t);
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(narrow[i], bf16_bits(out[i])) << i;
  }

  std::mt19937 random_{24};
  std::unique_ptr<FourBitExperts> experts_;
  DeviceArray<uint8_t> gate_up_, down_;
};

// Groups of 1, 2, 4, 8 and 16 warps, shares of unequal size, fewer units than CTAs and more.
TEST_P(FourBitMoe, ShapesOfAllPlans) {
  for (const MoeShape& shape :
       {MoeShape{64, 4, 2, 64}, MoeShape{448, 8, 3, 192}, MoeShape{512, 16, 6, 576},
        MoeShape{2048, 8, 6, 1408}, MoeShape{7168, 4, 2, 256}, MoeShape{5120, 4, 3, 64},
        MoeShape{128, 4, 2, 7168}, MoeShape{1024, 32, 8, 320}, MoeShape{256, 32, 17, 128}}) {
    use(shape);
    for (const int32_t rows : {1, 2, 8, 21}) compare(tokens(rows), std::max(1, rows / 3));
  }
}

TEST_P(FourBitMoe, CodesOfFourBitFloats) {
  for (const MoeShape& shape : {MoeShape{512, 8, 3, 192}, MoeShape{64, 4, 2, 64}}) {
    use(shape, FourBitCode::kE2m1);
    for (const int32_t rows : {1, 9}) compare(tokens(rows));
  }
}

TEST_P(FourBitMoe, ManyExpertsMostWithoutTokens) {
  use({256, 384, 8, 128});
  for (const int32_t rows : {1, 16, 64}) compare(tokens(rows), std::max(1, rows / 4));
  // Only the last experts have tokens.
  compare(tokens(3, [](int32_t, int32_t i) { return 376 + i; }));
}

// An expert's tokens are several tiles of eight, the last of them not full.
TEST_P(FourBitMoe, OneExpertHasHalfOfTheTokens) {
  use({256, 32, 2, 192});
  for (const int32_t rows : {7, 9, 16, 41}) {
    compare(tokens(rows, [](int32_t row, int32_t i) { return i == 0 ? 5 : 6 + row % 20; }));
  }
}

TEST_P(FourBitMoe, PaddingRowsAreTheAddendAlone) {
  use({256, 16, 4, 128});
  for (const int32_t padding : {0, 3}) {
    const FourBitTokens t = tokens(20, {}, padding);
    compare(t);
    const auto out = run<float>(t);
    const auto first = static_cast<size_t>(padding * 256);
    for (size_t c = first; c < first + 256; ++c) ASSERT_EQ(out[c], from_bf16(t.addend[c]));
  }
}

TEST_P(FourBitMoe, WithoutAnAddend) {
  use({256, 16, 4, 128});
  FourBitTokens t = tokens(5);
  t.addend.clear();
  compare(t);
}

TEST_P(FourBitMoe, ARowsBitsDoNotDependOnTheOthers) {
  use({1024, 32, 4, 320});
  const FourBitTokens all =
      tokens(40, [](int32_t row, int32_t i) { return i == 0 ? 3 : (row + i) % 28 + 4; });
  const auto together = run<float>(all);
  for (int32_t row = 0; row < all.rows; row += 3) {
    FourBitTokens one{.rows = 1};
    const auto cut = [row](const auto& from, auto* to, int64_t width) {
      to->assign(from.begin() + row * width, from.begin() + (row + 1) * width);
    };
    cut(all.x, &one.x, 1024), cut(all.addend, &one.addend, 1024);
    cut(all.ids, &one.ids, 4), cut(all.weights, &one.weights, 4);
    const auto alone = run<float>(one);
    EXPECT_EQ(std::memcmp(alone.data(), together.data() + row * 1024, 4096), 0) << row;
  }
}

TEST_P(FourBitMoe, AsManyPairsAsFewRowsTake) {
  use({128, 64, 8, 64});
  compare(tokens(512), 37);
}

// Tiles of 64, 128 and 256 tokens of many rows, and weights that are read several times.
TEST_P(FourBitMoe, AnExpertHasManyTokens) {
  if (!GetParam().rounds_weights) GTEST_SKIP();
  for (const MoeShape& shape : {MoeShape{320, 4, 2, 192}, MoeShape{256, 2, 1, 64}}) {
    use(shape);
    for (const int32_t rows : {70, 130, 300, 700}) compare(tokens(rows), rows / 5);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, FourBitMoe, testing::ValuesIn(kWays),
                         [](const auto& test) { return std::string(test.param.name); });

// Chooses by rows; batch-invariant rows all take the launches of many.
TEST(FourBitMoeRows, ABatchInvariantRowHasTheBitsOfMany) {
  const MoeShape shape{256, 8, 2, 128};
  std::mt19937 random(5);
  const FourBitExperts experts(shape, FourBitCode::kInteger, 6);
  const DeviceArray<uint8_t> gate_up(gate_up_in_tiles(experts.gate_up, shape.inter)),
      down(down_in_tiles(experts.down));
  constexpr int32_t kRows = 200;
  const DeviceArray<uint16_t> x(random_bf16(kRows * 256, 1.0f, random));
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < kRows; ++i) ids.insert(ids.end(), {i % 8, (i + 3) % 8});
  const DeviceArray<int32_t> expert_ids(ids);
  const DeviceArray<float> weights(std::vector<float>(2 * kRows, 0.5f));
  const DeviceArray<uint8_t> workspace(four_bit_moe_workspace_bytes(shape, kRows));
  const auto run = [&](int32_t rows, bool batch_invariant) {
    const DeviceArray<float> out(int64_t{rows} * 256);
    four_bit_moe({.shape = shape,
                  .rows = rows,
                  .x = x.data(),
                  .expert_ids = expert_ids.data(),
                  .expert_weights = weights.data(),
                  .gate_up = gate_up.data(),
                  .down = down.data(),
                  .out = out.data(),
                  .workspace = workspace.data(),
                  .batch_invariant = batch_invariant},
                 nullptr);
    check(cudaDeviceSynchronize(), "running experts");
    auto first = out.to_host();
    first.resize(256);
    return first;
  };
  EXPECT_EQ(run(1, true), run(kRows, false));
  EXPECT_NE(run(1, false), run(1, true)) << "few rows do not round weights";
}

}  // namespace
}  // namespace fathom::cuda
