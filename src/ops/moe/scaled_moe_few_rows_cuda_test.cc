// The mixture of experts in e4m3 of few tokens and of one on the GPU against a plain computation on
// the host, over the same e4m3 values and scales.
#include "ops/moe/scaled_moe_few_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/moe/scaled_moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

constexpr uint8_t kNanE4M3 = 0x7F;

// By scaled_moe_few_rows, by such a plan if there is one, or by scaled_moe_one_row.
struct Way {
  const MoeFewRowsPlan* plan = nullptr;
  bool one_row = false;
  ScaleForm form = ScaleForm::kF32;
};

const std::vector<float>& values_of_e4m3() {
  static const std::vector<float> values = [] {
    std::vector<float> all;
    for (int bits = 0; bits < 256; ++bits) {
      all.push_back(to_float(std::bit_cast<e4m3>(static_cast<uint8_t>(bits))));
    }
    return all;
  }();
  return values;
}

// e4m3 with scales by blocks of `block_rows` rows and 128 columns.
struct Scaled {
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

Scaled random_scaled(int64_t rows, int64_t columns, int64_t block_rows, float deviation,
                     std::mt19937& random) {
  Scaled s;
  s.values.resize(static_cast<size_t>(rows * columns));
  for (size_t i = 0; i < s.values.size(); i += 4) {
    const auto bits = static_cast<uint32_t>(random());
    for (size_t j = 0; j < 4; ++j) {  // of magnitudes from 1/8 to 16, some of them 0
      const uint32_t byte = bits >> (8 * j) & 255;
      const uint32_t magnitude = (byte & 127) % 56;
      s.values[i + j] =
          static_cast<uint8_t>((byte & 128) | (magnitude == 0 ? 0 : magnitude + 0x20));
    }
  }
  s.scales.resize(static_cast<size_t>(rows / block_rows * (columns / 128)));
  for (float& scale : s.scales) {
    scale = deviation / 6 * (0.5f + static_cast<float>(random() % 1000) / 1000);
  }
  return s;
}

std::vector<float> widened(const Scaled& s, int64_t columns, int64_t block_rows) {
  const auto& table = values_of_e4m3();
  std::vector<float> wide(s.values.size());
  const int64_t blocks = columns / 128, rows = blocks == 0 ? 0 : std::ssize(wide) / columns;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float scale = s.scales[static_cast<size_t>(row / block_rows * blocks + block)];
      const auto first = static_cast<size_t>(row * columns + block * 128);
      for (size_t i = first; i < first + 128; ++i) wide[i] = table[s.values[i]] * scale;
    }
  }
  return wide;
}

double dot(const float* a, const float* b, int64_t count) {
  double sums[4] = {};
  for (int64_t i = 0; i < count; i += 4) {
    for (int64_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * b[i + j];
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

struct Weights {
  MoeShape shape;
  Scaled gate_up, down, shared_gate_up, shared_down;
};

Weights random_weights(const MoeShape& s, std::mt19937& random) {
  const float up = 1 / std::sqrt(static_cast<float>(s.hidden));
  const float down = 1 / std::sqrt(static_cast<float>(s.inter));
  return {s, random_scaled(int64_t{s.num_experts} * 2 * s.inter, s.hidden, 128, up, random),
          random_scaled(int64_t{s.num_experts} * s.hidden, s.inter, 128, down, random),
          random_scaled(int64_t{2} * s.shared_inter, s.hidden, 128, up, random),
          random_scaled(s.shared_inter == 0 ? 0 : s.hidden, s.shared_inter, 128, down, random)};
}

struct Tokens {
  int32_t rows = 0;
  Scaled x;  // scales [rows, hidden / 128]
  std::vector<int32_t> ids;
  std::vector<float> factors;
};

// Each token's experts at random among the first `choice`; every seventh token is padding: NaN,
// without experts.
Tokens random_tokens(const MoeShape& s, int32_t rows, int32_t choice, std::mt19937& random) {
  Tokens tokens;
  tokens.rows = rows;
  tokens.x = random_scaled(rows, s.hidden, 1, 1.0f, random);
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
      std::fill_n(tokens.x.values.begin() + int64_t{row} * s.hidden, s.hidden, kNanE4M3);
    }
  }
  return tokens;
}

// What quantize_block() makes of 128 values in fp32, widened again.
void quantize(float* x, ScaleForm form) {
  float magnitude = kLeastMagnitude;
  for (int i = 0; i < 128; ++i) magnitude = std::max(magnitude, std::abs(x[i]));
  float scale = magnitude / kLargestE4M3, inverse = kLargestE4M3 / magnitude;
  if (form == ScaleForm::kPowerOfTwo) {
    scale = std::exp2(std::ceil(std::log2(scale)));
    inverse = 1 / scale;
  }
  for (int i = 0; i < 128; ++i) x[i] = to_float(to_e4m3(x[i] * inverse)) * scale;
}

// Adds factor * mlp(x).
void add_mlp(const float* x, int64_t hidden, const float* gate_up, const float* down, int64_t inter,
             float factor, ScaleForm form, std::vector<double>& out) {
  std::vector<float> activations(static_cast<size_t>(inter));
  for (int64_t i = 0; i < inter; ++i) {
    const double gate = dot(gate_up + i * hidden, x, hidden);
    const double up = dot(gate_up + (inter + i) * hidden, x, hidden);
    activations[static_cast<size_t>(i)] = static_cast<float>(gate / (1 + std::exp(-gate)) * up);
  }
  for (int64_t i = 0; i < inter; i += 128) quantize(&activations[static_cast<size_t>(i)], form);
  for (int64_t i = 0; i < hidden; ++i) {
    out[static_cast<size_t>(i)] +=
        double{factor} * dot(down + i * inter, activations.data(), inter);
  }
}

class OnHost {
 public:
  explicit OnHost(const Weights& w)
      : shape_(w.shape),
        gate_up_(widened(w.gate_up, w.shape.hidden, 128)),
        down_(widened(w.down, w.shape.inter, 128)),
        shared_gate_up_(widened(w.shared_gate_up, w.shape.hidden, 128)),
        shared_down_(widened(w.shared_down, w.shape.shared_inter, 128)) {}

  std::vector<double> row(const Tokens& tokens, int64_t row, ScaleForm form) const {
    const int64_t hidden = shape_.hidden, inter = shape_.inter, k = shape_.experts_per_token;
    const auto all = widened(tokens.x, hidden, 1);
    const float* x = all.data() + row * hidden;
    std::vector<double> out(static_cast<size_t>(hidden));
    for (int64_t i = 0; i < k; ++i) {
      const int64_t expert = tokens.ids[static_cast<size_t>(row * k + i)];
      if (expert < 0) continue;
      add_mlp(x, hidden, gate_up_.data() + expert * 2 * inter * hidden,
              down_.data() + expert * inter * hidden, inter,
              tokens.factors[static_cast<size_t>(row * k + i)], form, out);
    }
    if (shape_.shared_inter > 0) {
      add_mlp(x, hidden, shared_gate_up_.data(), shared_down_.data(), shape_.shared_inter, 1, form,
              out);
    }
    return out;
  }

 private:
  MoeShape shape_;
  std::vector<float> gate_up_, down_, shared_gate_up_, shared_down_;
};

struct OnDevice {
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;

  explicit OnDevice(const Scaled& s) : values(s.values), scales(s.scales) {}
};

class OnGpu {
 public:
  explicit OnGpu(const Weights& w)
      : shape_(w.shape),
        gate_up_(w.gate_up),
        down_(w.down),
        shared_gate_up_(w.shared_gate_up),
        shared_down_(w.shared_down),
        progress_(kScaledMoeProgressWords) {
    check(cudaMemset(progress_.data(), 0, progress_.bytes()), "clearing");
  }

  // The bytes of out after so many launches, one beginning while the other ends, into poisoned
  // memory each, over a poisoned workspace.
  template <typename T>
  std::vector<T> run(const Tokens& tokens, const Way& way = {}, int launches = 1) const {
    const int64_t stride = (tokens.rows + 3) / 4 * 4 + 4, blocks = shape_.hidden / 128;
    std::vector<float> transposed(static_cast<size_t>(blocks * stride), NAN);
    for (int64_t row = 0; row < tokens.rows; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        transposed[static_cast<size_t>(block * stride + row)] =
            tokens.x.scales[static_cast<size_t>(row * blocks + block)];
      }
    }
    const DeviceArray<uint8_t> x(tokens.x.values);
    const DeviceArray<float> x_scales(transposed);
    const DeviceArray<int32_t> ids(tokens.ids);
    const DeviceArray<float> factors(tokens.factors);
    const int64_t size = int64_t{tokens.rows} * shape_.hidden;
    const DeviceArray<T> out(size * launches);
    const DeviceArray<std::byte> workspace(
        std::max(scaled_moe_few_rows_workspace_bytes(shape_, tokens.rows),
                 scaled_moe_one_row_workspace_bytes(shape_)));
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    check(cudaMemset(workspace.data(), 0xFF, workspace.bytes()), "poison");
    ScaledMoeArguments arguments = {.shape = shape_,
                                    .rows = tokens.rows,
                                    .x = x.data(),
                                    .x_scales = x_scales.data(),
                                    .x_scales_stride = stride,
                                    .expert_ids = ids.data(),
                                    .expert_weights = factors.data(),
                                    .gate_up = gate_up_.values.data(),
                                    .gate_up_scales = gate_up_.scales.data(),
                                    .down = down_.values.data(),
                                    .down_scales = down_.scales.data(),
                                    .shared_gate_up = shared_gate_up_.values.data(),
                                    .shared_gate_up_scales = shared_gate_up_.scales.data(),
                                    .shared_down = shared_down_.values.data(),
                                    .shared_down_scales = shared_down_.scales.data(),
                                    .out = out.data(),
                                    .out_type = sizeof(T) == 4 ? DType::kF32 : DType::kBF16,
                                    .workspace = workspace.data(),
                                    .progress = progress_.data(),
                                    .form = way.form};
    for (int i = 0; i < launches; ++i) {
      arguments.out = out.data() + i * size;
      if (way.one_row) {
        scaled_moe_one_row(arguments, nullptr);
      } else if (way.plan != nullptr) {
        scaled_moe_few_rows(*way.plan, arguments, nullptr);
      } else {
        scaled_moe_few_rows(arguments, nullptr);
      }
    }
    check(cudaDeviceSynchronize(), "synchronize");
    return out.to_host();
  }

 private:
  MoeShape shape_;
  OnDevice gate_up_, down_, shared_gate_up_, shared_down_;
  DeviceArray<uint64_t> progress_;
};

// Of every `step`-th row.
void expect_equal(const OnHost& host, const Tokens& tokens, const std::vector<float>& out,
                  int64_t step, const Way& way) {
  const int64_t hidden = std::ssize(out) / tokens.rows;
  double error = 0, norm = 0;
  for (int64_t row = 0; row < tokens.rows; row += step) {
    if (row % 7 == 6) continue;
    const auto expected = host.row(tokens, row, way.form);
    for (int64_t i = 0; i < hidden; ++i) {
      const double actual = out[static_cast<size_t>(row * hidden + i)];
      ASSERT_TRUE(std::isfinite(actual)) << "row " << row << ", column " << i;
      const double difference = actual - expected[static_cast<size_t>(i)];
      error += difference * difference;
      norm += expected[static_cast<size_t>(i)] * expected[static_cast<size_t>(i)];
    }
  }
  const double relative = std::sqrt(error / norm);
  // Where two sums differ in their last bits, what is between the products may be rounded to
  // neighbouring e4m3, which differ by up to a fourteenth. wgmma's sums keep 14 bits.
  EXPECT_LE(relative, way.one_row ? 2e-3 : 1e-2);
  if (std::getenv("SHOW_ERRORS") != nullptr) std::printf("    relative error %.1e\n", relative);
}

void compare(const Weights& weights, const OnHost& host, const OnGpu& gpu, int32_t rows,
             int32_t choice, int64_t step, const Way& way = {}) {
  SCOPED_TRACE(testing::Message() << rows << " rows, among " << choice << " experts"
                                  << (way.one_row ? ", one row's" : ""));
  std::mt19937 random(static_cast<uint32_t>(rows * 1000 + choice));
  const Tokens tokens = random_tokens(weights.shape, rows, choice, random);
  const auto f32 = gpu.run<float>(tokens, way);
  expect_equal(host, tokens, f32, step, way);
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
    ASSERT_TRUE(scaled_moe_few_rows_takes(shape, rows));
    const int64_t step = std::max<int64_t>(1, rows / rows_checked) | 1;
    compare(weights, host, gpu, rows, shape.num_experts, step);
    if (rows == 1) {
      ASSERT_TRUE(scaled_moe_one_row_takes(shape));
      compare(weights, host, gpu, 1, shape.num_experts, 1, {.one_row = true});
      compare(weights, host, gpu, 1, shape.num_experts, 1,
              {.one_row = true, .form = ScaleForm::kPowerOfTwo});
    }
    // All tokens in as few experts as there can be.
    compare(weights, host, gpu, rows, shape.experts_per_token, step,
            {.form = ScaleForm::kPowerOfTwo});
  }
}

TEST(ScaledMoeFewRows, TinyEqualsTheHost) {
  compare_all({256, 16, 4, 128, 128}, {1, 2, 5, 8, 9, 31, 64, 65, 130, 192}, 12);
}

TEST(ScaledMoeFewRows, OddShapesEqualTheHost) {
  compare_all({384, 7, 3, 384, 0}, {1, 3, 17, 40, 100}, 10);
  compare_all({128, 256, 8, 128, 128}, {1, 33, 150, 192}, 40);
  compare_all({640, 5, 1, 128, 640}, {1, 12, 70}, 10);
  compare_all({2176, 5, 2, 256, 2176}, {1, 12, 70}, 3);
}

TEST(ScaledMoeFewRows, V2LiteColumnsEqualTheHost) {
  compare_all({2048, 8, 6, 1408, 2816}, {1, 20, 64, 160}, 2);
}

TEST(ScaledMoeFewRows, V3ColumnsEqualTheHost) {
  compare_all({7168, 3, 2, 512, 256}, {1, 30}, 2);
  compare_all({7168, 10, 8, 256, 256}, {1, 30}, 1);
  compare_all({7168, 2, 1, 2048, 2048}, {1, 3}, 1);
}

TEST(ScaledMoeFewRows, DenseLayersEqualTheHost) {
  compare_all({1024, 1, 1, 18432, 0}, {1, 2, 40}, 1);
  compare_all({7168, 1, 1, 2304, 0}, {1, 16}, 1);
}

TEST(ScaledMoeFewRows, EveryPlanEqualsTheHost) {
  const MoeShape shape = {512, 16, 4, 256, 384};
  std::mt19937 random(9);
  const Weights weights = random_weights(shape, random);
  const OnHost host(weights);
  const OnGpu gpu(weights);
  const MoeFewRowsPlan chosen =
      plan_moe_few_rows({1, 512, 16, 4, 256, 384, true}, count_clusters());
  for (const int warpgroups : {1, 2}) {
    for (const int splits : {1, 2}) {
      for (const int clusters : {4, 9, 64}) {
        if (64 / clusters > 8 * warpgroups) continue;
        for (const int32_t rows : {3, 60, 120}) {
          const MoeFewRowsPlan plan = {
              .blocks = chosen.blocks,
              .warpgroups = warpgroups,
              .splits = splits,
              .clusters = clusters,
              .ring_bytes = (clusters == 9 ? 3 : 2) * moe_stage_bytes(rows, warpgroups)};
          compare(weights, host, gpu, rows, 16, rows / 3, {.plan = &plan});
        }
      }
    }
  }
}

TEST(ScaledMoeFewRows, GivesTheSameBitsAgain) {
  const MoeShape shape = {512, 64, 6, 256, 512};
  std::mt19937 random(11);
  const OnGpu gpu(random_weights(shape, random));
  const Tokens tokens = random_tokens(shape, 37, 64, random);
  const auto first = gpu.run<uint16_t>(tokens);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(gpu.run<uint16_t>(tokens), first);
}

TEST(ScaledMoeOneRow, GivesTheSameBitsAgainAndPaddingDisturbsNothing) {
  const MoeShape shape = {2048, 64, 6, 1408, 2816};
  std::mt19937 random(12);
  const OnGpu gpu(random_weights(shape, random));
  const Tokens tokens = random_tokens(shape, 1, 64, random);
  Tokens padding = tokens;
  std::fill(padding.ids.begin(), padding.ids.end(), -1);
  std::fill(padding.x.values.begin(), padding.x.values.end(), kNanE4M3);
  const auto first = gpu.run<uint16_t>(tokens, {.one_row = true});
  for (int i = 0; i < 50; ++i) {
    if (i % 7 == 3) gpu.run<uint16_t>(padding, {.one_row = true});
    if (i % 5 == 2) gpu.run<uint16_t>(tokens);  // counts with the same counters
    EXPECT_EQ(gpu.run<uint16_t>(tokens, {.one_row = true}), first);
  }
}

// In a stream, without waiting between.
void expect_same_bits_in_a_row(const OnGpu& gpu, const Tokens& tokens, const Way& way) {
  constexpr int kLaunches = 40;
  const auto first = gpu.run<uint16_t>(tokens, way);
  const auto all = gpu.run<uint16_t>(tokens, way, kLaunches);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], first[i % first.size()]) << i;
}

TEST(ScaledMoeFewRows, LaunchesInARowGiveTheSameBits) {
  for (const MoeShape& shape : {MoeShape{7168, 32, 8, 256, 0}, MoeShape{7168, 16, 8, 256, 256},
                                MoeShape{1024, 16, 4, 512, 512}}) {
    std::mt19937 random(13);
    const OnGpu gpu(random_weights(shape, random));
    expect_same_bits_in_a_row(gpu, random_tokens(shape, 1, shape.num_experts, random),
                              {.one_row = true});
    for (const int32_t rows : {1, 6, 16, 48, 128}) {
      const Tokens tokens = random_tokens(shape, rows, shape.num_experts, random);
      expect_same_bits_in_a_row(gpu, tokens, {});
    }
  }
}

// A token alone has what it has among others, but for the order of sums.
TEST(ScaledMoeFewRows, PaddingChangesNoOtherRow) {
  const MoeShape shape = {256, 16, 4, 128, 128};
  std::mt19937 random(10);
  const OnGpu gpu(random_weights(shape, random));
  Tokens tokens = random_tokens(shape, 48, 16, random);
  const auto before = gpu.run<float>(tokens);
  for (int64_t row = 6; row < 48; row += 7) {
    for (int64_t i = 0; i < 256; ++i) {
      tokens.x.values[static_cast<size_t>(row * 256 + i)] = static_cast<uint8_t>(random());
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
