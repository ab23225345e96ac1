// Several ranks, each with a stream of its own, against sums in the same order on the host.
#include "ops/peer_sum/peer_sum_cuda.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "base/math.h"
#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "ops/peer_sum/peer_trial_cuda.h"
#include "ops/scaled_linear/quantize_rows.h"

namespace fathom::cuda {
namespace {

constexpr float kEps = 1e-6f;
constexpr int64_t kMostRows = 128;
// A rank that never comes fails a test within seconds.
constexpr std::chrono::seconds kLimit{5};

class PeerSum : public testing::TestWithParam<PeerShape> {
 protected:
  PeerSum() { use(GetParam()); }

  void use(const PeerShape& shape, std::chrono::nanoseconds limit = kLimit) {
    shape_ = shape;
    stride_ = shape.n + 8;
    ranks_.clear();
    group_ = std::make_unique<PeerGroup>(trial_devices(shape.ranks), kMostRows, shape.n, limit);
    for (const int device : trial_devices(shape.ranks)) {
      ranks_.push_back(std::make_unique<PeerTrialRank>(device, shape, stride_));
    }
    weight_ = random_f32(shape.n, 1, random_);
    device_weight_ = DeviceArray<float>(weight_);
  }

  // New random inputs on all ranks, of sizes so different that sums in another order differ;
  // expected residuals.
  void draw() {
    const int64_t size = shape_.rows * shape_.n;
    const auto residual = random_f32(size, 3, random_);
    std::vector<float> sum;
    for (int r = 0; r < shape_.ranks; ++r) {
      const auto delta =
          random_bf16(shape_.rows * stride_, std::ldexp(1.0f, 7 * (r * 3 % 4)), random_);
      rank(r).delta.copy_from(delta);
      rank(r).residual.copy_from(residual);
      rank(r).poison();
      const auto wide = widen(delta);
      if (r == 0) sum.assign(static_cast<size_t>(size), 0);
      for (int64_t row = 0; row < shape_.rows; ++row) {
        for (int64_t i = 0; i < shape_.n; ++i) {
          float& to = sum[static_cast<size_t>(row * shape_.n + i)];
          const float value = wide[static_cast<size_t>(row * stride_ + i)];
          to = r == 0 ? value : to + value;
        }
      }
    }
    residual_.resize(residual.size());
    for (size_t i = 0; i < residual.size(); ++i) residual_[i] = residual[i] + sum[i];
  }

  PeerSumArguments arguments(int r, bool norm = true) {
    PeerSumArguments a;
    a.norm = {.residual = rank(r).residual.data(),
              .delta = rank(r).delta.data(),
              .delta_stride = stride_,
              .weight = norm ? device_weight_.data() : nullptr,
              .eps = kEps,
              .out = norm ? rank(r).out.data() : nullptr,
              .rows = shape_.rows,
              .n = shape_.n};
    if (norm && shape_.n % kScaleBlock == 0) {
      a.norm.quantized = {.values = rank(r).values.data(),
                          .values_row_stride = shape_.n,
                          .scales = rank(r).scales.data(),
                          .scales_block_stride = round_up(shape_.rows, int64_t{4})};
    }
    a.peers = group_->rank(r);
    a.sms = DeviceContext::current().num_multiprocessors() / shape_.ranks;
    return a;
  }

  void wait() {
    for (auto& rank : ranks_) check(cudaStreamSynchronize(rank->stream()), "peer_sum");
  }

  // Residuals to the bit on every rank; out within a rounding of the norm in double precision, and
  // equal on all ranks; e4m3 as of out's bits.
  void compare(bool norm = true) {
    ASSERT_FALSE(group_->late());
    const auto out = rank(0).out.to_host();
    for (int r = 0; r < shape_.ranks; ++r) {
      ASSERT_EQ(rank(r).residual.to_host(), residual_) << "rank " << r;
      ASSERT_EQ(rank(r).out.to_host(), out) << "rank " << r;
      ASSERT_EQ(rank(r).values.to_host(), rank(0).values.to_host()) << "rank " << r;
    }
    if (!norm) {
      for (const uint16_t bits : out) ASSERT_EQ(bits, 0xFFFF);
      return;
    }
    for (int64_t row = 0; row < shape_.rows; ++row) {
      const float* x = residual_.data() + row * shape_.n;
      double square = 0;
      for (int64_t i = 0; i < shape_.n; ++i) square += static_cast<double>(x[i]) * x[i];
      const double scale = 1 / std::sqrt(square / static_cast<double>(shape_.n) + kEps);
      for (int64_t i = 0; i < shape_.n; ++i) {
        const double expected = weight_[static_cast<size_t>(i)] * (x[i] * scale);
        const double actual = from_bf16(out[static_cast<size_t>(row * shape_.n + i)]);
        ASSERT_LE(std::abs(actual - expected), std::abs(expected) * 0.00392)
            << "row " << row << ", column " << i;
      }
    }
    if (shape_.n % kScaleBlock == 0) compare_quantized(out);
  }

  PeerTrialRank& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }

  std::mt19937 random_{7};
  PeerShape shape_ = {};
  int64_t stride_ = 0;
  std::unique_ptr<PeerGroup> group_;
  std::vector<std::unique_ptr<PeerTrialRank>> ranks_;
  std::vector<float> weight_, residual_;
  DeviceArray<float> device_weight_;

 private:
  void compare_quantized(const std::vector<uint16_t>& out) {
    const int64_t blocks = shape_.n / kScaleBlock, stride = round_up(shape_.rows, int64_t{4});
    const auto values = rank(0).values.to_host();
    const auto scales = rank(0).scales.to_host();
    for (int64_t row = 0; row < shape_.rows; ++row) {
      for (int64_t block = 0; block < blocks; ++block) {
        std::vector<bf16> x;
        for (int64_t i = 0; i < kScaleBlock; ++i) {
          x.push_back({out[static_cast<size_t>(row * shape_.n + block * kScaleBlock + i)]});
        }
        std::vector<e4m3> expected(x.size());
        const float scale = quantize_block(x, ScaleForm::kF32, expected);
        ASSERT_EQ(scales[static_cast<size_t>(block * stride + row)], scale) << row << ' ' << block;
        for (int64_t i = 0; i < kScaleBlock; ++i) {
          ASSERT_EQ(values[static_cast<size_t>(row * shape_.n + block * kScaleBlock + i)],
                    expected[static_cast<size_t>(i)].bits);
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, PeerSum,
                         testing::Values(PeerShape{2, 1, 7168}, PeerShape{2, 128, 7168},
                                         PeerShape{3, 5, 2048}, PeerShape{4, 64, 5120},
                                         PeerShape{5, 7, 200}, PeerShape{8, 1, 7168},
                                         PeerShape{8, 16, 2048}, PeerShape{8, 128, 7168},
                                         PeerShape{2, 3, 8192}, PeerShape{4, 2, 8}),
                         [](const auto& test) { return test.param.name(); });

// The ranks begin in a new order each time, and some long after the others.
TEST_P(PeerSum, EqualsTheOrderedSum) {
  for (int round = 0; round < 12; ++round) {
    draw();
    std::vector<int> order(static_cast<size_t>(shape_.ranks));
    for (int r = 0; r < shape_.ranks; ++r) order[static_cast<size_t>(r)] = r;
    std::shuffle(order.begin(), order.end(), random_);
    for (const int r : order) {
      if (random_() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      peer_sum(arguments(r), rank(r).stream());
    }
    wait();
    compare();
    if (HasFatalFailure()) FAIL() << "round " << round;
  }
}

TEST_P(PeerSum, WritesTheResidualAlone) {
  draw();
  for (int r = 0; r < shape_.ranks; ++r) peer_sum(arguments(r, false), rank(r).stream());
  wait();
  compare(false);
}

// Several exchanges a graph, of which the last one's result is compared, many times; 16 bits of the
// epoch wrap around.
TEST_P(PeerSum, GraphsRepeatTheSameBits) {
  constexpr int kExchanges = 16, kReplays = 12;
  std::vector<Graph> graphs;
  for (int r = 0; r < shape_.ranks; ++r) {
    graphs.emplace_back(rank(r).stream(), [&] {
      for (int i = 0; i < kExchanges; ++i) peer_sum(arguments(r), rank(r).stream());
    });
  }
  draw();
  const auto start = rank(0).residual.to_host();
  std::vector<float> first;
  for (int replay = 0; replay < kReplays; ++replay) {
    for (int r = 0; r < shape_.ranks; ++r) {
      rank(r).residual.copy_from(start);
      rank(r).poison();
    }
    for (int i = 0; i < shape_.ranks; ++i) {
      const int r = (i + replay) % shape_.ranks;
      graphs[static_cast<size_t>(r)].launch(rank(r).stream());
    }
    wait();
    if (replay == 0) first = rank(0).residual.to_host();
    for (int r = 0; r < shape_.ranks; ++r) {
      ASSERT_EQ(rank(r).residual.to_host(), first) << "rank " << r << ", replay " << replay;
      ASSERT_EQ(rank(r).out.to_host(), rank(0).out.to_host()) << "rank " << r;
    }
  }
}

// One rank has a single CTA for all rows: the other is a whole exchange ahead while its packets
// wait to be read.
TEST_P(PeerSum, ASlowRanksPacketsAreNotOverwritten) {
  constexpr int kExchanges = 8;
  std::vector<Graph> graphs;
  for (int r = 0; r < shape_.ranks; ++r) {
    PeerSumArguments a = arguments(r);
    if (r == 0) a.sms = 1;
    graphs.emplace_back(rank(r).stream(), [&] {
      for (int i = 0; i < kExchanges; ++i) peer_sum(a, rank(r).stream());
    });
  }
  for (int replay = 0; replay < 4; ++replay) {
    draw();
    for (int r = 0; r < shape_.ranks; ++r) graphs[static_cast<size_t>(r)].launch(rank(r).stream());
    wait();
    ASSERT_FALSE(group_->late());
    for (int r = 1; r < shape_.ranks; ++r) {
      ASSERT_EQ(rank(r).residual.to_host(), rank(0).residual.to_host()) << "rank " << r;
      ASSERT_EQ(rank(r).out.to_host(), rank(0).out.to_host()) << "rank " << r;
    }
  }
}

class PeerSumFaults : public PeerSum {};
INSTANTIATE_TEST_SUITE_P(Shapes, PeerSumFaults,
                         testing::Values(PeerShape{2, 1, 7168}, PeerShape{8, 16, 2048}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(PeerSumFaults, EpochsWrapAround) {
  PeerShape small = GetParam();
  small.rows = 1;
  small.n = 8;
  use(small);
  constexpr int kExchanges = 256;
  std::vector<Graph> graphs;
  for (int r = 0; r < shape_.ranks; ++r) {
    graphs.emplace_back(rank(r).stream(), [&] {
      for (int i = 0; i < kExchanges; ++i) peer_sum(arguments(r, false), rank(r).stream());
    });
  }
  for (int i = 0; i < 65536 / kExchanges + 2; ++i) {
    for (int r = 0; r < shape_.ranks; ++r) graphs[static_cast<size_t>(r)].launch(rank(r).stream());
    wait();
  }
  draw();
  for (int r = 0; r < shape_.ranks; ++r) peer_sum(arguments(r), rank(r).stream());
  wait();
  compare();
}

// A rank that never comes: the others' launches end, name it, and so do all later ones.
TEST_P(PeerSumFaults, ARankThatDoesNotComeIsNamed) {
  use(GetParam(), std::chrono::milliseconds(50));
  draw();
  const int missing = shape_.ranks - 1;
  for (int r = 0; r < missing; ++r) peer_sum(arguments(r), rank(r).stream());
  wait();
  ASSERT_TRUE(group_->late());
  EXPECT_EQ(group_->late()->missing, missing);
  EXPECT_NE(group_->late()->waiting, missing);
  for (int r = 0; r < missing; ++r) peer_sum(arguments(r), rank(r).stream());
  wait();
}

// Stopped from the host, a wait ends long before its limit.
TEST_P(PeerSumFaults, StopEndsAWait) {
  draw();
  peer_sum(arguments(0), rank(0).stream());
  EXPECT_EQ(cudaStreamQuery(rank(0).stream()), cudaErrorNotReady);
  group_->stop();
  wait();
  EXPECT_FALSE(group_->late());
}

}  // namespace
}  // namespace fathom::cuda
