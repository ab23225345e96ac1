// Index scores on the GPU against double precision over the same codes, and against themselves:
// alone, in other batches, and from a captured launch.
#include "ops/indexer/index_scores_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "tensor/dtype.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kDim = kIndexDim;
constexpr int kSms = 132;
constexpr uint8_t kNaN = 0x7F;

struct Sequence {
  int32_t context;  // tokens before its first row
  int32_t rows;
};

// Queries, and a cache in which each sequence's keys lie in pages of its own, the other slots NaN.
struct Problem {
  int32_t heads = 0;
  std::vector<int32_t> lengths, starts, tables;
  std::vector<uint8_t> queries;
  std::vector<float> weights;
  std::vector<std::byte> pages;
  int64_t page_stride = kIndexPageBytes + 1152, columns = 0;

  int64_t rows() const { return std::ssize(lengths); }
  const std::byte* page(int64_t row, int64_t position) const {
    return pages.data() + tables[starts[row] + position / kPageSize] * page_stride;
  }
  uint8_t code(int64_t row, int64_t position, int64_t i) const {
    return static_cast<uint8_t>(page(row, position)[position % kPageSize * kDim + i]);
  }
  float scale(int64_t row, int64_t position) const {
    float scale;
    std::memcpy(&scale, page(row, position) + kIndexValueBytes + position % kPageSize * 4, 4);
    return scale;
  }
};

uint8_t random_code(std::mt19937& random) {
  // About normal; codes of all magnitudes now and then.
  const float x = std::normal_distribution<float>(0, random() % 16 == 0 ? 100.0f : 2.0f)(random);
  return to_e4m3(x).bits;
}

Problem make_problem(const std::vector<Sequence>& sequences, int32_t heads, std::mt19937& random) {
  Problem problem;
  problem.heads = heads;
  int64_t num_pages = 1;  // page 0 is nobody's
  for (const Sequence& some : sequences) num_pages += ceil_div(some.context + some.rows, kPageSize);
  std::vector<int32_t> free(static_cast<size_t>(num_pages));
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin() + 1, free.end(), random);
  problem.pages.assign(static_cast<size_t>(num_pages * problem.page_stride), std::byte{kNaN});
  for (const Sequence& some : sequences) {
    const auto start = static_cast<int32_t>(problem.tables.size());
    const int32_t length = some.context + some.rows;
    for (int32_t key = 0; key < length; ++key) {
      if (key % kPageSize == 0) {
        problem.tables.push_back(free.back());
        free.pop_back();
      }
      std::byte* const page = problem.pages.data() + problem.tables.back() * problem.page_stride;
      for (int64_t i = 0; i < kDim; ++i) {
        page[key % kPageSize * kDim + i] = static_cast<std::byte>(random_code(random));
      }
      const float scale = std::ldexp(1.0f, static_cast<int>(random() % 5) - 8);
      std::memcpy(page + kIndexValueBytes + key % kPageSize * 4, &scale, 4);
    }
    problem.tables.push_back(-1);  // no page: must not be followed
    for (int32_t row = 0; row < some.rows; ++row) {
      problem.lengths.push_back(some.context + row + 1);
      problem.starts.push_back(start);
    }
    problem.columns = std::max(problem.columns, round_up(int64_t{length}, int64_t{16}));
  }
  for (int64_t i = 0; i < problem.rows() * heads * kDim; ++i) {
    problem.queries.push_back(random_code(random));
  }
  problem.weights = random_f32(problem.rows() * heads, 0.1f, random);
  return problem;
}

struct OnDevice {
  explicit OnDevice(const Problem& from)
      : queries(from.queries),
        weights(from.weights),
        lengths(from.lengths),
        starts(from.starts),
        tables(from.tables),
        pages(from.pages),
        scores(from.rows() * from.columns) {
    poison();
  }
  void poison() { check(cudaMemset(scores.data(), 0xEE, scores.bytes()), "poisoning"); }

  DeviceArray<uint8_t> queries;
  DeviceArray<float> weights;
  DeviceArray<int32_t> lengths, starts, tables;
  DeviceArray<std::byte> pages;
  DeviceArray<float> scores;
};

IndexScoresArguments arguments_of(const Problem& problem, const OnDevice& device,
                                  int32_t dense_keys) {
  return {.values = device.queries.data(),
          .weights = device.weights.data(),
          .lengths = device.lengths.data(),
          .table_starts = device.starts.data(),
          .block_tables = device.tables.data(),
          .pages = {device.pages.data(), problem.page_stride},
          .scores = device.scores.data(),
          .columns = problem.columns,
          .rows = static_cast<int32_t>(problem.rows()),
          .heads = problem.heads,
          .dense_keys = dense_keys};
}

std::vector<float> run(const Problem& problem, int32_t dense_keys, int sms = kSms) {
  const OnDevice device(problem);
  index_scores(arguments_of(problem, device, dense_keys), sms, nullptr);
  check(cudaDeviceSynchronize(), "index_scores");
  return device.scores.to_host();
}

bool is_poison(float score) {
  const uint32_t poison = 0xEEEEEEEE;
  return std::memcmp(&score, &poison, 4) == 0;
}

// The score in double precision, and the sum of the magnitudes that it is made of.
struct Exact {
  double score = 0, magnitude = 0;
};
Exact exact_score(const Problem& problem, int64_t row, int64_t key) {
  float k[kDim];
  for (int64_t i = 0; i < kDim; ++i) k[i] = to_float(e4m3{problem.code(row, key, i)});
  Exact exact;
  for (int64_t h = 0; h < problem.heads; ++h) {
    double dot = 0, magnitude = 0;
    const uint8_t* const q = problem.queries.data() + (row * problem.heads + h) * kDim;
    for (int64_t i = 0; i < kDim; ++i) {
      const double product = double{to_float(e4m3{q[i]})} * k[i];
      dot += product;
      magnitude += std::abs(product);
    }
    const double weight = problem.weights[row * problem.heads + h];
    exact.score += weight * std::max(dot, 0.0);
    exact.magnitude += std::abs(weight) * magnitude;
  }
  const double scale = problem.scale(row, key);
  return {exact.score * scale, exact.magnitude * scale};
}

// Tensor cores align the 32 products of a step, and the sum before it, to the largest of them and
// drop what is below 13 bits behind its leading one: up to 33 * 2^-13 of it a step, if all were cut
// alike. Measured: at most 2^-9.99 of the magnitudes' sum. A score of another key is off by 2^-5.
constexpr double kTolerance = 0x1p-9;

void compare(const std::vector<Sequence>& sequences, int32_t heads, int32_t dense_keys,
             uint32_t seed) {
  std::mt19937 random(seed);
  const Problem problem = make_problem(sequences, heads, random);
  const auto scores = run(problem, dense_keys);
  const auto of_one_cta = run(problem, dense_keys, 1);
  ASSERT_EQ(std::memcmp(scores.data(), of_one_cta.data(), scores.size() * 4), 0);
  double worst = 0;
  for (int64_t row = 0; row < problem.rows(); ++row) {
    const bool is_dense = problem.lengths[row] <= dense_keys;
    for (int64_t key = 0; key < problem.columns; ++key) {
      const float score = scores[row * problem.columns + key];
      if (is_dense || key >= problem.lengths[row]) {
        ASSERT_TRUE(is_poison(score)) << "row " << row << ", key " << key << ": " << score;
        continue;
      }
      const Exact exact = exact_score(problem, row, key);
      const double error = std::abs(score - exact.score);
      ASSERT_LE(error, kTolerance * exact.magnitude + 1e-30)
          << "row " << row << ", key " << key << ": " << score << ", " << exact.score;
      worst = std::max(worst, error / (exact.magnitude + 1e-30));
    }
  }
  testing::Test::RecordProperty("worst", std::to_string(worst));
  std::printf("%d heads: worst error 2^%.1f of the magnitudes' sum\n", heads, std::log2(worst));
}

TEST(IndexScoresCuda, AreNearDoublePrecision) {
  uint32_t seed = 1;
  for (const int32_t heads : {16, 32, 64}) {
    compare({{0, 1}}, heads, 0, seed++);
    compare({{700, 1}, {64, 1}, {63, 1}, {1200, 1}, {255, 1}, {256, 1}}, heads, 0, seed++);
    compare({{0, 40}, {500, 1}, {130, 33}, {90, 4}, {1000, 3}}, heads, 0, seed++);
    compare({{30, 50}, {63, 1}, {64, 1}, {10, 1}, {1000, 2}, {62, 4}}, heads, 64, seed++);
  }
}

// The copying warp reads 256 rows at a time: more than those, some of which have no scores.
TEST(IndexScoresCuda, OfManyRowsAndSequences) {
  std::vector<Sequence> sequences(300, {.context = 20, .rows = 1});  // no scores
  for (int32_t i = 0; i < 150; ++i) {
    sequences.push_back({.context = i * 37 % 230, .rows = i % 7 == 6 ? 30 : 1 + i % 3});
  }
  compare(sequences, 16, 64, 60);
}

// A row's bits do not depend on its neighbours, nor on the number of CTAs.
TEST(IndexScoresCuda, DoNotDependOnTheBatch) {
  std::mt19937 random(50);
  const Problem all = make_problem({{900, 1}, {100, 37}, {2000, 1}, {77, 2}}, 64, random);
  const auto together = run(all, 0);
  EXPECT_EQ(std::memcmp(together.data(), run(all, 0, 1).data(), together.size() * 4), 0);
  for (int64_t row = 0; row < all.rows(); ++row) {
    Problem alone = all;
    const int64_t query = all.heads * kDim;
    alone.lengths = {all.lengths[row]};
    alone.starts = {all.starts[row]};
    alone.queries.assign(all.queries.begin() + row * query,
                         all.queries.begin() + (row + 1) * query);
    alone.weights.assign(all.weights.begin() + row * all.heads,
                         all.weights.begin() + (row + 1) * all.heads);
    const auto scores = run(alone, 0);
    ASSERT_EQ(std::memcmp(scores.data(), together.data() + row * all.columns,
                          static_cast<size_t>(all.columns) * 4),
              0)
        << "row " << row;
  }
}

TEST(IndexScoresCuda, ReplayWithOtherLengths) {
  std::mt19937 random(51);
  constexpr int32_t kDense = 200;
  Problem problem =
      make_problem({{1500, 1}, {1500, 1}, {1500, 1}, {1500, 1}, {1500, 1}}, 64, random);
  OnDevice device(problem);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "creating a stream");
  {
    const Graph graph(stream,
                      [&] { index_scores(arguments_of(problem, device, kDense), kSms, stream); });
    for (int replay = 0; replay < 4; ++replay) {
      for (int32_t& length : problem.lengths) length = static_cast<int32_t>(random() % 1502);
      device.lengths.copy_from(problem.lengths);
      device.poison();
      check(cudaDeviceSynchronize(), "poisoning");
      graph.launch(stream);
      check(cudaStreamSynchronize(stream), "a replay");
      const auto expected = run(problem, kDense);
      ASSERT_EQ(std::memcmp(device.scores.to_host().data(), expected.data(), expected.size() * 4),
                0);
    }
  }
  check(cudaStreamDestroy(stream), "destroying a stream");
}

// Long rows of many sequences, whose keys come as fast as memory gives them, and in any order:
// launches one behind the other, against one CTA.
TEST(IndexScoresCuda, KeysComeInAnyOrder) {
  std::mt19937 random(53);
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < 96; ++i) {
    // Blocks of one, two and four pairs of rows.
    sequences.push_back({.context = 6000 + i * 17, .rows = i % 8 == 7 ? 6 : i % 4 == 3 ? 3 : 1});
  }
  const Problem problem = make_problem(sequences, 64, random);
  const auto expected = run(problem, 0, 1);
  OnDevice device(problem);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "creating a stream");
  {
    constexpr int kLaunches = 40;
    const Graph graph(stream, [&] {
      for (int i = 0; i < kLaunches; ++i) {
        index_scores(arguments_of(problem, device, 0), kSms, stream);
      }
    });
    for (int replay = 0; replay < 20; ++replay) {
      device.poison();
      check(cudaDeviceSynchronize(), "poisoning");
      graph.launch(stream);
      check(cudaStreamSynchronize(stream), "a replay");
    }
  }
  check(cudaStreamDestroy(stream), "destroying a stream");
  EXPECT_EQ(std::memcmp(device.scores.to_host().data(), expected.data(), expected.size() * 4), 0);
}

TEST(IndexScoresCuda, PassNaNOn) {
  std::mt19937 random(52);
  Problem problem = make_problem({{300, 2}}, 64, random);
  std::byte* const page = problem.pages.data() + problem.tables[1] * problem.page_stride;
  page[5 * kDim + 3] = std::byte{kNaN};               // key 69
  problem.queries[problem.heads * kDim + 17] = 0xFF;  // row 1
  const auto scores = run(problem, 0);
  for (int64_t key = 0; key <= 300; ++key) {
    EXPECT_EQ(std::isnan(scores[key]), key == 69) << key;
    EXPECT_TRUE(std::isnan(scores[problem.columns + key])) << key;
  }
}

}  // namespace
}  // namespace fathom::cuda
