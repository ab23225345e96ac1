// Experts spread over ranks on the GPUs that there are, against one rank with all of them: the same
// bits, for any division of the rows, and against double precision.
#include "ops/moe/exchange_cuda/moe_over_ranks_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <sstream>
#include <string>

#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_many_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_many_rows_cuda.h"
#include "ops/moe/exchange_cuda/moe_over_ranks_trial_cuda.h"

namespace fathom::cuda {
namespace {

// A rank that never comes fails a test within seconds.
constexpr std::chrono::seconds kLimit{5};

// Nothing may load a kernel while a rank waits for another. Read when the device is first used.
[[maybe_unused]] const int kLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 1);
// Two streams of each of eight ranks on a device, each with a hardware queue of its own.
[[maybe_unused]] const int kQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

constexpr MoeShape kTiny = {
    .hidden = 256, .num_experts = 16, .experts_per_token = 4, .inter = 128, .shared_inter = 128};
// No shared expert; hidden is no multiple of the GEMMs' tiles.
constexpr MoeShape kAlone = {
    .hidden = 384, .num_experts = 61, .experts_per_token = 8, .inter = 128, .shared_inter = 0};
constexpr MoeShape kWide = {
    .hidden = 7168, .num_experts = 24, .experts_per_token = 8, .inter = 256, .shared_inter = 256};

struct Case {
  MoeShape shape;
  std::vector<int64_t> rows;  // of each lane
  int alike = 1;
  bool mixed = false;
  int64_t capacity = 0;  // 0: all rows
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::ostringstream name;
  name << 'H' << c.shape.hidden;
  for (const int64_t rows : c.rows) name << '_' << rows;
  if (c.alike > 1) name << "Alike" << c.alike;
  if (c.mixed) name << "Mixed";
  if (c.capacity > 0) name << "Capacity" << c.capacity;
  return name.str();
}

int64_t total(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

template <typename Experts>
std::vector<float> alone(const typename Experts::Problem& problem) {
  check(cudaMemset(problem.out.data(), 0xFF, problem.out.bytes()), "poisoning");
  Experts::run_alone(problem.arguments(DType::kF32), nullptr);
  check(cudaDeviceSynchronize(), "one rank");
  return problem.out.to_host();
}

// What rank r is to have: its lane's rows, of which those of other shares are 0.
std::vector<float> part_of(const std::vector<float>& all, const MoeShape& shape, int64_t first,
                           int64_t rows, int alike, int rank) {
  const auto hidden = static_cast<int64_t>(shape.hidden);
  std::vector<float> part(all.begin() + first * hidden, all.begin() + (first + rows) * hidden);
  const RowShare own = share_of_rows(rows, alike, rank % alike);
  for (int64_t row = 0; row < rows; ++row) {
    if (row >= own.first && row < own.first + own.count) continue;
    std::fill_n(part.begin() + row * hidden, hidden, 0.0f);
  }
  return part;
}

// in_turn: the rounds, a few times in a row, so that a step follows a step.
template <typename Experts>
void expect_bits_of_one_rank(const Case& c, const std::vector<int32_t>& ids, int repeats = 5,
                             bool in_turn = false) {
  const auto rows = static_cast<int32_t>(total(c.rows));
  const typename Experts::Problem problem(c.shape, rows, ids, 5);
  const std::vector<float> expected = alone<Experts>(problem);
  const int64_t capacity =
      c.capacity > 0 ? c.capacity : std::max<int64_t>(rows, *std::ranges::max_element(c.rows));
  RanksTrial<Experts> trial(problem, c.rows, c.alike, capacity, c.mixed, kLimit);
  std::mt19937 random(3);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int r = 0; r < trial.size(); ++r) trial.poison(trial.rank(r));
    trial.on_all(random, [&](int r) {
      const ExchangeStep step = in_turn ? trial.step_in_turn(r, 1 + repeat) : trial.step(r);
      for (int i = 0; i < (in_turn ? 3 : 1); ++i) trial.enqueue(problem, r, step);
    });
    trial.wait();
    ASSERT_FALSE(trial.group().stopped());
    for (int r = 0; r < trial.size(); ++r) {
      const auto& rank = trial.rank(r);
      if (rank.rows == 0) continue;
      ASSERT_EQ(rank.out.to_host(), part_of(expected, c.shape, rank.first, rank.rows, c.alike, r))
          << "rank " << r << ", repeat " << repeat;
    }
  }
}

class MoeOverRanks : public testing::TestWithParam<Case> {
 protected:
  std::vector<int32_t> random_ids() const {
    return random_experts(GetParam().shape, static_cast<int32_t>(total(GetParam().rows)), 9);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, MoeOverRanks,
    testing::Values(Case{kTiny, {1, 1}}, Case{kTiny, {5, 0}}, Case{kTiny, {0, 0, 3}, 1, true},
                    Case{kTiny, {17, 64, 1, 200}}, Case{kTiny, {90, 7}, 2, true},
                    Case{kTiny, {2, 3}, 2}, Case{kTiny, {50}, 3},
                    Case{kTiny, {100, 0, 130, 3}, 1, false, 130},
                    Case{kTiny, {64, 40}, 2, true, 64},
                    Case{kTiny, {40, 3, 0, 41, 1, 37, 40}, 1, true, 41},
                    Case{kAlone, {1, 2, 3, 4, 5, 6, 7, 8}, 1, true}, Case{kAlone, {300, 1, 0}},
                    Case{kAlone, {33, 20}, 4}, Case{kWide, {1, 1, 1, 1, 1, 1, 1, 1}},
                    Case{kWide, {64, 64}, 1, true}, Case{kWide, {16, 16, 16, 16}},
                    Case{kWide, {700, 100, 0, 41, 3, 9, 80, 1}, 1, true, 704},
                    Case{kWide, {500, 512, 300, 511}, 1, true, 512}),
    name_of);

TEST_P(MoeOverRanks, HasTheBitsOfOneRankInBf16) {
  expect_bits_of_one_rank<Bf16Experts>(GetParam(), random_ids());
}

TEST_P(MoeOverRanks, HasTheBitsOfOneRankInE4m3) {
  expect_bits_of_one_rank<E4m3Experts>(GetParam(), random_ids());
}

TEST_P(MoeOverRanks, RoundsInTurnHaveTheBitsOfOneRank) {
  if (GetParam().capacity == 0) GTEST_SKIP() << "one round";
  expect_bits_of_one_rank<Bf16Experts>(GetParam(), random_ids(), 4, true);
  expect_bits_of_one_rank<E4m3Experts>(GetParam(), random_ids(), 4, true);
}

// All rows meet the same experts, of which some are on no rank but one; rows of padding none.
TEST_P(MoeOverRanks, OfAFewExpertsAndNone) {
  const Case& c = GetParam();
  std::vector<int32_t> ids;
  const int32_t k = c.shape.experts_per_token;
  for (int64_t row = 0; row < total(c.rows); ++row) {
    for (int32_t j = 0; j < k; ++j) ids.push_back(row % 5 == 4 || j % 4 == 3 ? -1 : k - 1 - j);
  }
  expect_bits_of_one_rank<Bf16Experts>(c, ids, 2);
  expect_bits_of_one_rank<E4m3Experts>(c, ids, 2);
}

// One row after the other in double precision, in bf16.
std::vector<double> double_row(const MoeProblem& p, int64_t row) {
  const auto x = widen(p.x.to_host()), gate_up = widen(p.gate_up.to_host()),
             down = widen(p.down.to_host()), shared_gate_up = widen(p.shared_gate_up.to_host()),
             shared_down = widen(p.shared_down.to_host()), weights = p.weights.to_host();
  const int64_t hidden = p.shape.hidden, k = p.shape.experts_per_token;
  std::vector<double> out(static_cast<size_t>(hidden));
  const auto dot = [](const float* a, const auto* b, int64_t size) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += double{a[i]} * b[i];
    return sum;
  };
  const auto add = [&](const float* gu, const float* d, int64_t inter, double weight) {
    std::vector<double> activations;
    for (int64_t i = 0; i < inter; ++i) {
      const double gate = dot(gu + i * hidden, x.data() + row * hidden, hidden);
      const double up = dot(gu + (inter + i) * hidden, x.data() + row * hidden, hidden);
      activations.push_back(gate / (1 + std::exp(-gate)) * up);
    }
    for (int64_t i = 0; i < hidden; ++i) {
      out[static_cast<size_t>(i)] += weight * dot(d + i * inter, activations.data(), inter);
    }
  };
  const int64_t inter = p.shape.inter;
  for (int64_t j = 0; j < k; ++j) {
    const int64_t id = p.expert_ids[static_cast<size_t>(row * k + j)];
    add(gate_up.data() + id * 2 * inter * hidden, down.data() + id * hidden * inter, inter,
        weights[static_cast<size_t>(row * k + j)]);
  }
  add(shared_gate_up.data(), shared_down.data(), p.shape.shared_inter, 1);
  return out;
}

double error_of(const float* actual, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

// Bounds as in the tests of one rank.
TEST(MoeOverRanksAccuracy, EqualsDoublePrecision) {
  const std::vector<int64_t> rows = {9, 0, 14};
  const auto ids = random_experts(kTiny, 23, 4);
  const MoeProblem bf16(kTiny, 23, ids, 8);
  const ScaledMoeProblem e4m3(kTiny, 23, ids, 8);
  RanksTrial<Bf16Experts> of_bf16(bf16, rows, 1, 23, true, kLimit);
  RanksTrial<E4m3Experts> of_e4m3(e4m3, rows, 1, 23, true, kLimit);
  const ScaledMoeReference reference(e4m3);
  for (int r = 0; r < 3; ++r) of_bf16.enqueue(bf16, r, of_bf16.step(r));
  of_bf16.wait();
  for (int r = 0; r < 3; ++r) of_e4m3.enqueue(e4m3, r, of_e4m3.step(r));
  of_e4m3.wait();
  for (const int r : {0, 2}) {
    const auto plain = of_bf16.rank(r).out.to_host(), scaled = of_e4m3.rank(r).out.to_host();
    const int64_t first = of_bf16.rank(r).first;
    for (int64_t row = 0; row < of_bf16.rank(r).rows; row += 4) {
      EXPECT_LE(error_of(plain.data() + row * kTiny.hidden, double_row(bf16, first + row)), 8e-3);
      EXPECT_LE(error_of(scaled.data() + row * kTiny.hidden,
                         reference.row(static_cast<int32_t>(first + row))),
                5e-2);
    }
  }
}

// Captured chains whose rows and their number change from replay to replay, and whose inputs change
// from layer to layer, while ranks begin long after one another: nothing is read before it is
// written, and nothing written before it has been read.
template <typename Experts>
void expect_graphs_repeat(int num_ranks) {
  constexpr int kLayers = 6;
  constexpr int64_t kRows = 24;  // of each rank, padding included
  const auto all = static_cast<int32_t>(kRows * num_ranks);
  std::vector<std::unique_ptr<typename Experts::Problem>> problems;
  std::vector<std::vector<float>> expected;
  for (uint32_t i = 0; i < 2; ++i) {
    problems.push_back(std::make_unique<typename Experts::Problem>(
        kTiny, all, random_experts(kTiny, all, 20 + i), 5));
  }
  // Other rows for the same experts.
  std::mt19937 random(5);
  problems[1]->weights = DeviceArray<float>(random_f32(int64_t{all} * 4, 0.3f, random));
  typename Experts::Problem other(kTiny, all, problems[1]->expert_ids, 31);
  problems[1]->x = std::move(other.x);
  if constexpr (Experts::kScaled) problems[1]->x_scales = std::move(other.x_scales);
  RanksTrial<Experts> trial(*problems[0],
                            std::vector<int64_t>(static_cast<size_t>(num_ranks), kRows), 1, all,
                            true, kLimit);
  std::vector<DeviceArray<float>> outs;
  std::vector<Graph> graphs;
  for (int r = 0; r < num_ranks; ++r) {
    use_device(trial.rank(r).device);
    outs.emplace_back(kLayers * kRows * kTiny.hidden);
  }
  for (int r = 0; r < num_ranks; ++r) {
    ExchangeStep step = trial.step(r);
    step.all_rows = all;
    step.likely_rows = 3;
    step.num_valid_rows = trial.rank(r).valid.data();
    graphs.emplace_back(trial.rank(r).stream(), [&] {
      for (int layer = 0; layer < kLayers; ++layer) {
        trial.put_rows(*problems[static_cast<size_t>(layer % 2)], trial.rank(r),
                       trial.rank(r).stream());
        trial.enqueue(*problems[0], r, step,
                      outs[static_cast<size_t>(r)].data() + layer * kRows * kTiny.hidden);
      }
    });
  }
  for (int replay = 0; replay < 6; ++replay) {
    // Rows beyond the valid ones have no experts; those of another rank are all padding at times.
    std::vector<int32_t> valid;
    for (int r = 0; r < num_ranks; ++r) {
      valid.push_back(random() % 3 == 0 ? 0 : 1 + static_cast<int32_t>(random() % kRows));
    }
    std::vector<std::vector<float>> wanted;
    use_device(0);
    for (const auto& problem : problems) {
      std::vector<int32_t> ids = problem->expert_ids;
      for (int64_t row = 0; row < all; ++row) {
        if (row % kRows < valid[static_cast<size_t>(row / kRows)]) continue;
        std::fill_n(ids.begin() + row * kTiny.experts_per_token, kTiny.experts_per_token, -1);
      }
      const DeviceArray<int32_t> masked(ids);
      auto a = problem->arguments(DType::kF32);
      a.expert_ids = masked.data();
      Experts::run_alone(a, nullptr);
      check(cudaDeviceSynchronize(), "one rank");
      wanted.push_back(problem->out.to_host());
    }
    for (int r = 0; r < num_ranks; ++r) {
      trial.rank(r).valid.copy_from(std::vector<int32_t>{valid[static_cast<size_t>(r)]});
      const auto& out = outs[static_cast<size_t>(r)];
      use_device(trial.rank(r).device);
      check(cudaMemset(out.data(), 0xFF, out.bytes()), "poisoning");
      trial.poison(trial.rank(r));
    }
    trial.on_all(random,
                 [&](int r) { graphs[static_cast<size_t>(r)].launch(trial.rank(r).stream()); });
    trial.wait();
    ASSERT_FALSE(trial.group().stopped());
    for (int r = 0; r < num_ranks; ++r) {
      const auto out = outs[static_cast<size_t>(r)].to_host();
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto part = part_of(wanted[static_cast<size_t>(layer % 2)], kTiny,
                                  trial.rank(r).first, kRows, 1, 0);
        ASSERT_TRUE(
            std::equal(part.begin(), part.end(), out.begin() + layer * kRows * kTiny.hidden))
            << "rank " << r << ", layer " << layer << ", replay " << replay;
      }
    }
  }
}

TEST(MoeOverRanksGraphs, RepeatInBf16) {
  expect_graphs_repeat<Bf16Experts>(2);
  expect_graphs_repeat<Bf16Experts>(8);
}

TEST(MoeOverRanksGraphs, RepeatInE4m3) { expect_graphs_repeat<E4m3Experts>(4); }

TEST(MoeOverRanksFaults, StopEndsAWait) {
  const MoeProblem problem(kTiny, 6, random_experts(kTiny, 6, 4), 8);
  RanksTrial<Bf16Experts> trial(problem, {3, 3}, 1, 6, false, kLimit);
  trial.enqueue(problem, 0, trial.step(0));
  EXPECT_EQ(cudaStreamQuery(trial.rank(0).stream()), cudaErrorNotReady);
  trial.group().stop();
  check(cudaStreamSynchronize(trial.rank(0).stream()), "a stopped exchange");
  EXPECT_FALSE(trial.group().late());
}

TEST(MoeOverRanksFaults, ALateRankIsNamed) {
  const MoeProblem problem(kTiny, 6, random_experts(kTiny, 6, 4), 8);
  RanksTrial<Bf16Experts> trial(problem, {2, 2, 2}, 1, 6, false, std::chrono::milliseconds(200));
  trial.enqueue(problem, 0, trial.step(0));
  trial.enqueue(problem, 2, trial.step(2));
  trial.wait();
  ASSERT_TRUE(trial.group().late());
  EXPECT_EQ(trial.group().late()->missing, 1);
}

}  // namespace
}  // namespace fathom::cuda
