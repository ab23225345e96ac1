// The mixture of experts for few tokens and for one on the GPU against a reference on the host.
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_few_rows_trial_cuda.h"
#include "ops/moe/bf16_cuda/moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

float dot(const float* a, const float* b, int64_t count) {
  float sums[16] = {};
  for (int64_t i = 0; i < count; i += 16) {
    for (int64_t j = 0; j < 16; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return std::accumulate(std::begin(sums), std::end(sums), 0.0f);
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

class Bf16 {
 public:
  using Rows = std::vector<uint16_t>;
  using Tokens = FewRowsTokens<Rows>;
  static constexpr bool kScaled = false;

  static Rows random_rows(int64_t rows, int64_t hidden, std::mt19937& random) {
    return random_bf16(rows * hidden, 1.0f, random);
  }
  static void set_nan(Rows& x, int64_t row, int64_t hidden) {
    std::fill_n(x.begin() + row * hidden, hidden, uint16_t{0x7FC0});
  }
  static void set_random(Rows& x, int64_t row, int64_t hidden, std::mt19937& random) {
    std::generate_n(x.begin() + row * hidden, hidden,
                    [&] { return static_cast<uint16_t>(random()); });
  }
  // Both sides round activations to bf16; the expert's weight is applied before or after that.
  static double most_error(const FewRowsWay&, int32_t) { return 5e-3; }

  struct Weights {
    MoeShape shape;
    std::vector<uint16_t> gate_up, down, shared_gate_up, shared_down;
  };

  static Weights random_weights(const MoeShape& s, std::mt19937& random) {
    const float deviation = 1 / std::sqrt(static_cast<float>(s.hidden));
    return {s, random_bf16(int64_t{s.num_experts} * 2 * s.inter * s.hidden, deviation, random),
            random_bf16(int64_t{s.num_experts} * s.inter * s.hidden, deviation, random),
            random_bf16(int64_t{2} * s.shared_inter * s.hidden, deviation, random),
            random_bf16(int64_t{s.shared_inter} * s.hidden, deviation, random)};
  }

  class OnHost {
   public:
    explicit OnHost(const Weights& weights)
        : shape_(weights.shape),
          gate_up_(widen(weights.gate_up)),
          down_(widen(weights.down)),
          shared_gate_up_(widen(weights.shared_gate_up)),
          shared_down_(widen(weights.shared_down)) {}

    std::vector<double> row(const Tokens& tokens, int64_t row, ScaleForm) const {
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
    std::vector<T> run(const Tokens& tokens, const FewRowsWay& way) const {
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
};

using Trial = MoeFewRowsTrial<Bf16>;

void compare_all(const MoeShape& shape, const std::vector<int32_t>& all_rows,
                 int64_t rows_checked) {
  Trial(shape, static_cast<uint32_t>(shape.hidden + shape.num_experts))
      .compare_all(all_rows, rows_checked);
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

// Kimi K2 has 384 experts: the lists are longer than 256, and lanes have 12 or 16 each.
TEST(MoeFewRows, MoreExpertsThan256EqualTheHost) {
  compare_all({64, 384, 8, 64, 64}, {1, 2, 33, 96, 448}, 60);
  compare_all({64, 512, 8, 64, 0}, {1, 96, 448}, 60);
  compare_all({64, 300, 32, 64, 64}, {1, 96, 128}, 60);
}

TEST(MoeFewRows, EveryPlanEqualsTheHost) {
  Trial({512, 16, 4, 256, 384}, 9).compare_every_plan({3, 60, 140});
}

// A short case: it takes racecheck a minute.
TEST(MoeFewRows, ThreeTokensEqualTheHost) { Trial({64, 4, 2, 64, 64}, 8).compare(3, 4, 1); }
TEST(MoeOneRow, OfFewColumnsEqualsTheHost) {
  Trial({64, 4, 2, 64, 64}, 8).compare(1, 4, 1, {.one_row = true});
}

TEST(MoeFewRows, GivesTheSameBitsAgain) {
  Trial({512, 64, 6, 256, 512}, 11).expect_the_same_bits_again();
}

TEST(MoeOneRow, GivesTheSameBitsAgainAndPaddingDisturbsNothing) {
  Trial({2048, 64, 6, 1408, 2816}, 12).expect_one_row_to_give_the_same_bits_again();
}

TEST(MoeFewRows, PaddingChangesNoOtherRow) {
  Trial({256, 16, 4, 128, 128}, 10).expect_padding_to_change_no_other_row();
}

}  // namespace
}  // namespace fathom::cuda
