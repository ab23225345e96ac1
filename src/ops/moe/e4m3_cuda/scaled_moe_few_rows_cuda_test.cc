// The mixture of experts in e4m3 for few tokens and for one on the GPU against a reference on the
// host over the same e4m3 values and scales.
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_few_rows_trial_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

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

// e4m3 with scales for blocks of `block_rows` rows and 128 columns.
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
    for (size_t j = 0; j < 4; ++j) {  // magnitudes from 1/8 to 16, some of them 0
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

// Round-trips 128 fp32 values through quantize_block().
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

struct OnDevice {
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;

  explicit OnDevice(const Scaled& s) : values(s.values), scales(s.scales) {}
};

class E4m3 {
 public:
  using Rows = Scaled;  // scales [rows, hidden / 128]
  using Tokens = FewRowsTokens<Rows>;
  static constexpr bool kScaled = true;

  static Rows random_rows(int64_t rows, int64_t hidden, std::mt19937& random) {
    return random_scaled(rows, hidden, 1, 1.0f, random);
  }
  static void set_nan(Rows& x, int64_t row, int64_t hidden) {
    std::fill_n(x.values.begin() + row * hidden, hidden, uint8_t{0x7F});
  }
  static void set_random(Rows& x, int64_t row, int64_t hidden, std::mt19937& random) {
    std::generate_n(x.values.begin() + row * hidden, hidden,
                    [&] { return static_cast<uint8_t>(random()); });
  }
  // Sums that differ in their last bits may round activations to neighbouring e4m3 values, which
  // differ by up to a fourteenth. wgmma's sums keep 14 bits; a single row averages over few such
  // values.
  static double most_error(const FewRowsWay& way, int32_t rows) {
    if (way.one_row) return 2e-3;
    return rows == 1 ? 3e-2 : 1e-2;
  }

  struct Weights {
    MoeShape shape;
    Scaled gate_up, down, shared_gate_up, shared_down;
  };

  static Weights random_weights(const MoeShape& s, std::mt19937& random) {
    const float up = 1 / std::sqrt(static_cast<float>(s.hidden));
    const float down = 1 / std::sqrt(static_cast<float>(s.inter));
    return {s, random_scaled(int64_t{s.num_experts} * 2 * s.inter, s.hidden, 128, up, random),
            random_scaled(int64_t{s.num_experts} * s.hidden, s.inter, 128, down, random),
            random_scaled(int64_t{2} * s.shared_inter, s.hidden, 128, up, random),
            random_scaled(s.shared_inter == 0 ? 0 : s.hidden, s.shared_inter, 128, down, random)};
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
        add_mlp(x, hidden, shared_gate_up_.data(), shared_down_.data(), shape_.shared_inter, 1,
                form, out);
      }
      return out;
    }

   private:
    MoeShape shape_;
    std::vector<float> gate_up_, down_, shared_gate_up_, shared_down_;
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

    // The bytes of out after each of `launches` overlapping launches into poisoned memory, over a
    // poisoned workspace.
    template <typename T>
    std::vector<T> run(const Tokens& tokens, const FewRowsWay& way, int launches = 1) const {
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
};

using Trial = MoeFewRowsTrial<E4m3>;

void compare_all(const MoeShape& shape, const std::vector<int32_t>& all_rows,
                 int64_t rows_checked) {
  ASSERT_TRUE(scaled_moe_one_row_takes(shape, DeviceContext::current().budget()));
  for (const int32_t rows : all_rows)
    ASSERT_TRUE(scaled_moe_few_rows_takes(shape, rows, DeviceContext::current().budget()));
  Trial(shape, static_cast<uint32_t>(shape.hidden + shape.num_experts))
      .compare_all(all_rows, rows_checked);
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

// Kimi K2 has 384 experts.
TEST(ScaledMoeFewRows, MoreExpertsThan256EqualTheHost) {
  compare_all({128, 384, 8, 128, 128}, {1, 2, 33, 64, 192}, 40);
  compare_all({128, 512, 8, 128, 0}, {1, 64, 192}, 40);
}

TEST(ScaledMoeFewRows, EveryPlanEqualsTheHost) {
  Trial({512, 16, 4, 256, 384}, 9).compare_every_plan({3, 60, 120});
}

// A short case: it takes racecheck a minute.
TEST(ScaledMoeFewRows, ThreeTokensEqualTheHost) {
  Trial({128, 4, 2, 128, 128}, 8).compare(3, 4, 1);
}
TEST(ScaledMoeOneRow, OfFewColumnsEqualsTheHost) {
  Trial({128, 4, 2, 128, 128}, 8).compare(1, 4, 1, {.one_row = true});
}

TEST(ScaledMoeFewRows, GivesTheSameBitsAgain) {
  Trial({512, 64, 6, 256, 512}, 11).expect_the_same_bits_again();
}

TEST(ScaledMoeOneRow, GivesTheSameBitsAgainAndPaddingDisturbsNothing) {
  Trial({2048, 64, 6, 1408, 2816}, 12).expect_one_row_to_give_the_same_bits_again();
}

// Launches back to back in a stream, without waiting between.
void expect_same_bits_in_a_row(Trial& trial, int32_t rows, const FewRowsWay& way) {
  constexpr int kLaunches = 40;
  const auto tokens = trial.random_tokens(rows);
  const auto first = trial.gpu().run<uint16_t>(tokens, way);
  const auto all = trial.gpu().run<uint16_t>(tokens, way, kLaunches);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], first[i % first.size()]) << i;
}

TEST(ScaledMoeFewRows, LaunchesInARowGiveTheSameBits) {
  for (const MoeShape& shape : {MoeShape{7168, 32, 8, 256, 0}, MoeShape{7168, 16, 8, 256, 256},
                                MoeShape{1024, 16, 4, 512, 512}}) {
    Trial trial(shape, 13);
    expect_same_bits_in_a_row(trial, 1, {.one_row = true});
    for (const int32_t rows : {1, 6, 16, 48, 128}) expect_same_bits_in_a_row(trial, rows, {});
  }
}

TEST(ScaledMoeFewRows, PaddingChangesNoOtherRow) {
  Trial({256, 16, 4, 128, 128}, 10).expect_padding_to_change_no_other_row();
}

}  // namespace
}  // namespace fathom::cuda
