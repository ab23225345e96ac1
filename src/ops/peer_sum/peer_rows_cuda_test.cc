// Several ranks: rows divided over them, against sums in the same order on
// the host and against peer_sum(); columns gathered on the first.
#include "ops/peer_sum/peer_rows_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "base/math.h"
#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "ops/peer_sum/peer_trial_cuda.h"

namespace fathom::cuda {
namespace {

constexpr float kEps = 1e-6f;
constexpr int64_t kMostRows = 1024;
// A rank that never comes fails a test within seconds.
constexpr std::chrono::seconds kLimit{5};

class PeerRowsTest : public testing::TestWithParam<PeerShape> {
 protected:
  PeerRowsTest()
      : shape_(GetParam()), group_(trial_devices(shape_.ranks), kMostRows, shape_.n, kLimit) {
    for (const int device : trial_devices(shape_.ranks)) {
      ranks_.push_back(std::make_unique<PeerTrialRank>(device, shape_, shape_.n));
      gathered_.emplace_back(shape_.rows * shape_.n);
    }
    weight_ = DeviceArray<float>(random_f32(shape_.n, 1, random_));
  }

  // New inputs, of sizes so different that sums in another order differ; expected residuals. A rank
  // begins with the whole residual, or where it is divided with its share, and NaN elsewhere.
  void draw(bool divided) {
    const int64_t size = shape_.rows * shape_.n;
    const auto residual = random_f32(size, 3, random_);
    std::vector<float> sum(static_cast<size_t>(size), 0);
    for (int r = 0; r < shape_.ranks; ++r) {
      const auto delta = random_bf16(size, std::ldexp(1.0f, 7 * (r * 3 % 4)), random_);
      rank(r).delta.copy_from(delta);
      std::vector<float> own = residual;
      for (int64_t row = 0; row < shape_.rows && divided; ++row) {
        if (owner(row) == r) continue;
        std::fill_n(own.begin() + row * shape_.n, shape_.n, std::nanf(""));
      }
      rank(r).residual.copy_from(own);
      rank(r).poison();
      const auto wide = widen(delta);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = r == 0 ? wide[i] : sum[i] + wide[i];
    }
    expected_.resize(sum.size());
    for (size_t i = 0; i < sum.size(); ++i) expected_[i] = residual[i] + sum[i];
  }

  int owner(int64_t row) const {
    return static_cast<int>(row / rows_of_each(shape_.rows, shape_.ranks));
  }

  QuantizedRows quantized(int r) {
    if (shape_.n % kScaleBlock != 0) return {};
    return {.values = rank(r).values.data(),
            .values_row_stride = shape_.n,
            .scales = rank(r).scales.data(),
            .scales_block_stride = round_up(shape_.rows, int64_t{4})};
  }

  PeerRowsArguments arguments(int r) {
    PeerRowsArguments a;
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      PeerTrialRank& of = rank(peer);
      a.ranks[peer] = {of.residual.data(), of.delta.data(), of.out.data(), quantized(peer)};
    }
    a.weight = weight_.data();
    a.eps = kEps;
    a.rows = shape_.rows;
    a.n = shape_.n;
    a.peers = group_.rank(r);
    a.sms = 32 / shape_.ranks;
    return a;
  }

  // The same by peer_sum(), on copies of what draw() made.
  void sum_at_once() {
    for (int r = 0; r < shape_.ranks; ++r) {
      PeerSumArguments a;
      a.norm = {.residual = rank(r).residual.data(),
                .delta = rank(r).delta.data(),
                .delta_stride = shape_.n,
                .weight = weight_.data(),
                .eps = kEps,
                .out = rank(r).out.data(),
                .quantized = quantized(r),
                .rows = shape_.rows,
                .n = shape_.n};
      a.peers = group_.rank(r);
      a.sms = 32 / shape_.ranks;
      peer_sum(a, rank(r).stream());
    }
    wait();
  }

  void wait() {
    for (auto& rank : ranks_) check(cudaStreamSynchronize(rank->stream()), "peer_sum_rows");
    ASSERT_FALSE(group_.stopped());
  }

  // In a new order each time, some long after the others.
  template <typename Enqueue>
  void on_all(const Enqueue& enqueue) {
    std::vector<int> order(static_cast<size_t>(shape_.ranks));
    for (int r = 0; r < shape_.ranks; ++r) order[static_cast<size_t>(r)] = r;
    std::shuffle(order.begin(), order.end(), random_);
    for (const int r : order) {
      if (random_() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      enqueue(r);
    }
  }

  PeerTrialRank& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }

  std::mt19937 random_{11};
  const PeerShape shape_;
  PeerGroup group_;
  std::vector<std::unique_ptr<PeerTrialRank>> ranks_;
  std::vector<DeviceArray<float>> gathered_;  // of each rank
  DeviceArray<float> weight_;
  std::vector<float> expected_;
};

INSTANTIATE_TEST_SUITE_P(Shapes, PeerRowsTest,
                         testing::Values(PeerShape{2, 129, 7168}, PeerShape{2, 1, 256},
                                         PeerShape{3, 200, 2048}, PeerShape{4, 513, 5120},
                                         PeerShape{5, 7, 200}, PeerShape{8, 3, 7168},
                                         PeerShape{8, 1000, 2048}, PeerShape{4, 2, 8},
                                         PeerShape{2, 131, 8192}),
                         [](const auto& test) { return test.param.name(); });

// Each rank has the residual of its share, and the norm of all rows; both with peer_sum()'s bits.
TEST_P(PeerRowsTest, HaveTheBitsOfPeerSum) {
  draw(false);
  std::vector<std::vector<float>> residuals;
  for (int r = 0; r < shape_.ranks; ++r) residuals.push_back(rank(r).residual.to_host());
  sum_at_once();
  ASSERT_EQ(rank(0).residual.to_host(), expected_);
  const auto out = rank(0).out.to_host();
  const auto values = rank(0).values.to_host();
  const auto scales = rank(0).scales.to_host();
  for (int round = 0; round < 6; ++round) {
    for (int r = 0; r < shape_.ranks; ++r) {
      rank(r).residual.copy_from(residuals[static_cast<size_t>(r)]);
      rank(r).poison();
    }
    on_all([&](int r) { peer_sum_rows(arguments(r), rank(r).stream()); });
    wait();
    for (int r = 0; r < shape_.ranks; ++r) {
      ASSERT_EQ(rank(r).out.to_host(), out) << "rank " << r << ", round " << round;
      ASSERT_EQ(rank(r).values.to_host(), values) << "rank " << r << ", round " << round;
      const auto actual = rank(r).scales.to_host();
      if (shape_.n % kScaleBlock == 0) {
        ASSERT_EQ(std::memcmp(actual.data(), scales.data(), scales.size() * sizeof(float)), 0);
      }
      const auto residual = rank(r).residual.to_host();
      for (int64_t row = 0; row < shape_.rows; ++row) {
        const auto& from = owner(row) == r ? expected_ : residuals[static_cast<size_t>(r)];
        ASSERT_TRUE(std::equal(residual.begin() + row * shape_.n,
                               residual.begin() + (row + 1) * shape_.n,
                               from.begin() + row * shape_.n))
            << "rank " << r << ", row " << row;
      }
    }
  }
}

// Each rank's part is made in its stream just before the launch, long after other ranks have begun
// theirs; and what a rank does after the launch finds the results of all ranks, of which one is
// slow.
TEST_P(PeerRowsTest, WaitForTheOthersPartsAndResults) {
  draw(false);
  std::vector<std::vector<float>> residuals;
  std::vector<DeviceArray<uint16_t>> parts, snapshots;
  for (int r = 0; r < shape_.ranks; ++r) {
    residuals.push_back(rank(r).residual.to_host());
    parts.emplace_back(rank(r).delta.to_host());
    snapshots.emplace_back(rank(r).out.size());
  }
  sum_at_once();
  const auto out = rank(0).out.to_host();
  for (int round = 0; round < 4; ++round) {
    for (int r = 0; r < shape_.ranks; ++r) {
      rank(r).residual.copy_from(residuals[static_cast<size_t>(r)]);
      check(cudaMemset(rank(r).delta.data(), 0xFF, rank(r).delta.bytes()), "poisoning");
      rank(r).poison();
    }
    const int slow = round % shape_.ranks;
    on_all([&](int r) {
      const auto copy = [&](const DeviceArray<uint16_t>& to, const DeviceArray<uint16_t>& from) {
        check(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDeviceToDevice,
                              rank(r).stream()),
              "copying");
      };
      if (r == slow) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      copy(rank(r).delta, parts[static_cast<size_t>(r)]);
      PeerRowsArguments a = arguments(r);
      if (r == slow) a.sms = 1;
      peer_sum_rows(a, rank(r).stream());
      copy(snapshots[static_cast<size_t>(r)], rank(r).out);
    });
    wait();
    for (int r = 0; r < shape_.ranks; ++r) {
      ASSERT_EQ(snapshots[static_cast<size_t>(r)].to_host(), out)
          << "rank " << r << ", slow rank " << slow;
    }
  }
}

// Rows by index, of a residual of which each rank has its share; some rows are padding.
TEST_P(PeerRowsTest, ComeByIndexFromAllRanks) {
  draw(true);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < shape_.rows; ++i) {
    const bool is_padding = i % 5 == 3;
    ids.push_back(is_padding ? -1 : static_cast<int32_t>(random_() % shape_.rows));
  }
  const DeviceArray<int32_t> row_ids(ids);
  for (const auto& gathered : gathered_) {
    check(cudaMemset(gathered.data(), 0xFF, gathered.bytes()), "poisoning");
  }
  check(cudaStreamSynchronize(nullptr), "poisoning");
  on_all([&](int r) {
    PeerRowsArguments a = arguments(r);
    a.row_ids = row_ids.data();
    a.gathered = gathered_[static_cast<size_t>(r)].data();
    a.divided_rows = shape_.rows;
    peer_sum_rows(a, rank(r).stream());
  });
  wait();
  const auto out = rank(0).out.to_host();
  for (int r = 0; r < shape_.ranks; ++r) {
    const auto gathered = gathered_[static_cast<size_t>(r)].to_host();
    ASSERT_EQ(rank(r).out.to_host(), out) << "rank " << r;
    for (int64_t i = 0; i < shape_.rows; ++i) {
      const int32_t id = ids[static_cast<size_t>(i)];
      for (int64_t c = 0; c < shape_.n; ++c) {
        const float actual = gathered[static_cast<size_t>(i * shape_.n + c)];
        if (id < 0) {
          ASSERT_TRUE(std::isnan(actual));
        } else {
          ASSERT_EQ(actual, expected_[static_cast<size_t>(id * shape_.n + c)])
              << "rank " << r << ", row " << i;
        }
      }
    }
  }
}

// Captured, and replayed with ranks that begin long after one another: no launch reads what another
// rank has not written yet, and none overwrites what another still reads.
TEST_P(PeerRowsTest, GraphsRepeatTheSameBits) {
  constexpr int kExchanges = 8;
  std::vector<Graph> graphs;
  for (int r = 0; r < shape_.ranks; ++r) {
    graphs.emplace_back(rank(r).stream(), [&] {
      for (int i = 0; i < kExchanges; ++i) peer_sum_rows(arguments(r), rank(r).stream());
    });
  }
  draw(false);
  const auto start = rank(0).residual.to_host();
  std::vector<uint16_t> first;
  for (int replay = 0; replay < 8; ++replay) {
    for (int r = 0; r < shape_.ranks; ++r) {
      rank(r).residual.copy_from(start);
      rank(r).poison();
    }
    on_all([&](int r) { graphs[static_cast<size_t>(r)].launch(rank(r).stream()); });
    wait();
    if (replay == 0) first = rank(0).out.to_host();
    for (int r = 0; r < shape_.ranks; ++r) {
      ASSERT_EQ(rank(r).out.to_host(), first) << "rank " << r << ", replay " << replay;
    }
  }
}

TEST_P(PeerRowsTest, ColumnsOfAllRanksComeToTheFirst) {
  const int64_t columns = round_up(shape_.n / shape_.ranks, int64_t{8}) + 8;
  const int64_t stride = columns * shape_.ranks;
  for (int round = 0; round < 4; ++round) {
    std::vector<DeviceArray<float>> parts;
    std::vector<float> expected(static_cast<size_t>(shape_.rows * stride));
    DeviceArray<float> all(shape_.rows * stride);
    check(cudaMemset(all.data(), 0xFF, all.bytes()), "poisoning");
    for (int r = 0; r < shape_.ranks; ++r) {
      const auto values = random_f32(shape_.rows * columns, 1, random_);
      for (int64_t row = 0; row < shape_.rows; ++row) {
        std::copy_n(values.begin() + row * columns, columns,
                    expected.begin() + row * stride + r * columns);
      }
      parts.emplace_back(values);
      if (r == 0) {  // the first rank's are there
        check(cudaMemcpy2D(all.data(), static_cast<size_t>(stride) * 4, values.data(),
                           static_cast<size_t>(columns) * 4, static_cast<size_t>(columns) * 4,
                           static_cast<size_t>(shape_.rows), cudaMemcpyHostToDevice),
              "copying");
      }
    }
    // The first rank's stream alone is waited for: its launch ends when all columns are there.
    std::vector<float> seen;
    on_all([&](int r) {
      const float* const from = r == 0 ? all.data() : parts[static_cast<size_t>(r)].data();
      gather_columns({.from = from,
                      .from_stride = r == 0 ? stride : columns,
                      .to = all.data() + r * columns,
                      .to_stride = stride,
                      .rows = shape_.rows,
                      .columns = columns,
                      .peers = group_.rank(r),
                      .sms = 32 / shape_.ranks},
                     rank(r).stream());
    });
    check(cudaStreamSynchronize(rank(0).stream()), "gather_columns");
    ASSERT_EQ(all.to_host(), expected);
    wait();
  }
}

class PeerRowsFaults : public PeerRowsTest {};
INSTANTIATE_TEST_SUITE_P(Shapes, PeerRowsFaults,
                         testing::Values(PeerShape{2, 129, 7168}, PeerShape{8, 200, 2048}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(PeerRowsFaults, StopEndsAWait) {
  draw(false);
  peer_sum_rows(arguments(0), rank(0).stream());
  EXPECT_EQ(cudaStreamQuery(rank(0).stream()), cudaErrorNotReady);
  group_.stop();
  check(cudaStreamSynchronize(rank(0).stream()), "a stopped launch");
  EXPECT_FALSE(group_.late());
}

}  // namespace
}  // namespace fathom::cuda
