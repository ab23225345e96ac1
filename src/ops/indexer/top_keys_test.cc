// The exact choice against a stable sort by (score, position).
#include "ops/indexer/top_keys.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "ops/indexer/indexer_cpu.h"

namespace fathom {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kPoison = 77777777;

// The definition: a NaN after everything, equal scores by position.
std::vector<int32_t> expected(const std::vector<float>& scores, int32_t first_key, int64_t k) {
  std::vector<int32_t> order(scores.size() - static_cast<size_t>(first_key));
  std::iota(order.begin(), order.end(), first_key);
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
    const bool a_nan = std::isnan(scores[a]), b_nan = std::isnan(scores[b]);
    if (a_nan || b_nan) return !a_nan && b_nan;
    return scores[a] > scores[b];
  });
  const auto count = std::min<int64_t>(k, std::ssize(order));
  order.resize(static_cast<size_t>(count));
  std::ranges::sort(order);
  order.resize(static_cast<size_t>(k), -1);
  return order;
}

std::vector<int32_t> chosen(CpuIsa isa, const std::vector<float>& scores, int32_t first_key,
                            int64_t k) {
  ThreadPool pool(1);
  // What no row sees is poisoned: before the first key and behind the last.
  std::vector<float> padded = scores;
  std::fill_n(padded.begin(), first_key, kInfinity);
  padded.insert(padded.end(), 20, kInfinity);
  const std::vector<SparseRow> rows = {{0, 0, static_cast<int32_t>(scores.size())}};
  std::vector<int32_t> keys(static_cast<size_t>(k + 1), kPoison);
  std::vector<std::byte> workspace(
      static_cast<size_t>(top_keys_workspace_bytes(std::ssize(scores), 1)), std::byte{0xFF});
  cpu::select_top_keys(pool, isa, ConstTensorView(padded.data(), {1, std::ssize(padded)}), rows,
                       first_key, TensorView(keys.data(), {1, k}), workspace);
  EXPECT_EQ(keys.back(), kPoison);
  keys.pop_back();
  return keys;
}

std::vector<float> random_scores(int64_t count, uint64_t seed, double scale = 1) {
  std::vector<float> scores(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = static_cast<float>(scale * (2 * random_uniform(seed, 0, i) - 1));
  }
  return scores;
}

class TopKeys : public testing::TestWithParam<CpuIsa> {
 protected:
  static void check(const std::vector<float>& scores, int32_t first_key, int64_t k) {
    ASSERT_EQ(chosen(GetParam(), scores, first_key, k), expected(scores, first_key, k))
        << scores.size() << " scores, k " << k << ", first key " << first_key;
  }
};

TEST_P(TopKeys, EveryLengthAndWidthAroundTheBlocks) {
  for (int64_t count = 1; count < 600; count += count < 70 ? 1 : 13) {
    const std::vector<float> scores = random_scores(count, 1);
    for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{16}, int64_t{64}, count - 1, count}) {
      if (k >= 1) check(scores, 0, k);
    }
  }
  for (int64_t count = 600; count < 5000; count += 61) {
    const std::vector<float> scores = random_scores(count, 9);
    for (const int64_t k : {64, 2048}) check(scores, static_cast<int32_t>(count % 3), k);
  }
  for (const int64_t count : {2047, 2048, 2049, 5000, 128 * 1024, 160 * 1024}) {
    check(random_scores(count, 2), 0, 2048);
    check(random_scores(count, 3), 1, 2048);
    check(random_scores(count, 4), 700, 64);
  }
}

TEST_P(TopKeys, OfEqualScoresTheLowerPositions) {
  std::vector<float> scores(5000, -1.0f);
  check(scores, 0, 64);                                      // one plateau
  for (int64_t i = 100; i < 5000; i += 3) scores[i] = 0.0f;  // the plateau of ReLU
  for (int64_t i = 0; i < 40; ++i) scores[(i * 577) % 5000] = 1.0f + static_cast<float>(i % 3);
  for (const int64_t k : {16, 39, 40, 41, 2048}) check(scores, 0, k);
  check(scores, 5, 64);
}

// 5,000 different scores that share the leading 16 bits: a choice by rounded scores would be wrong.
TEST_P(TopKeys, ScoresThatShareTheirLeadingBits) {
  std::vector<float> scores = random_scores(9000, 5, 0.5);
  for (int64_t i = 0; i < 5000; ++i) {
    const auto low = static_cast<uint32_t>((i * 7919) % 5003);
    scores[(i * 9) % 9000 + i / 1000 % 9] = std::bit_cast<float>(0x3F800000u + low);
  }
  for (const int64_t k : {1, 100, 2048, 4999, 5000, 5001}) check(scores, 0, k);
  for (float& score : scores) score = -score;
  for (const int64_t k : {1, 2048, 5000}) check(scores, 0, k);
}

TEST_P(TopKeys, SpecialValues) {
  std::vector<float> scores = random_scores(3000, 6, 1e-39);  // denormals of both signs
  check(scores, 0, 64);
  for (int64_t i = 0; i < 3000; i += 7) scores[i] = i % 2 == 0 ? 0.0f : -0.0f;
  check(scores, 0, 1500);
  check(std::vector<float>{-0.0f, 0.0f, -0.0f, 0.0f}, 0, 2);  // equal: positions 0 and 1
  for (int64_t i = 3; i < 3000; i += 11) scores[i] = kInfinity;
  for (int64_t i = 4; i < 3000; i += 11) scores[i] = -kInfinity;
  for (int64_t i = 5; i < 3000; i += 11) scores[i] = i % 2 == 0 ? kNan : -kNan;
  for (const int64_t k : {1, 200, 272, 273, 1000, 2727, 2728, 2999}) check(scores, 0, k);
  const std::vector<float> all_nan(100, kNan);
  check(all_nan, 0, 10);
}

TEST_P(TopKeys, RowsWithAllTheirKeysAreNotRead) {
  const std::vector<float> scores(50, kNan);
  EXPECT_EQ(chosen(GetParam(), scores, 0, 50), expected(scores, 0, 50));
  EXPECT_EQ(chosen(GetParam(), scores, 3, 64), expected(scores, 3, 64));
}

// Rows of many lengths, strided, on several threads: what each row gets alone.
TEST_P(TopKeys, ThreadsAndOtherRowsChangeNothing) {
  constexpr int64_t kRows = 37, kColumns = 3011, kK = 100;
  std::vector<float> scores = random_scores(kRows * kColumns, 8);
  for (float& score : scores) score = std::round(score * 50);  // many ties
  std::vector<SparseRow> rows(kRows);
  for (int32_t i = 0; i < kRows; ++i) rows[i] = {i, 0, 2 + i * 81};
  for (const int threads : {1, 2, 4}) {
    for (int again = 0; again < 7; ++again) {
      ThreadPool pool(threads);
      std::vector<int32_t> keys(kRows * kK, kPoison);
      std::vector<std::byte> workspace(
          static_cast<size_t>(top_keys_workspace_bytes(kColumns, threads)));
      cpu::select_top_keys(pool, GetParam(), ConstTensorView(scores.data(), {kRows, kColumns}),
                           rows, 1, TensorView(keys.data(), {kRows, kK}), workspace);
      for (int64_t i = 0; i < kRows; ++i) {
        const float* row = scores.data() + i * kColumns;
        const std::vector<int32_t> list(keys.begin() + i * kK, keys.begin() + (i + 1) * kK);
        ASSERT_EQ(list, expected({row, row + rows[i].length}, 1, kK)) << "row " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, TopKeys, testing::ValuesIn(runnable_levels()),
                         [](const auto& level) { return std::string(name_of(level.param)); });

TEST(AllKeys, AreTheListOfARowThatSeesNoMoreThanK) {
  const std::vector<SparseRow> rows = {{0, 0, 3}, {1, 0, 6}};
  std::vector<int32_t> keys(2 * 5 + 1, kPoison);
  select_all_keys(rows, 1, TensorView(keys.data(), {2, 5}));
  EXPECT_EQ(keys, (std::vector<int32_t>{1, 2, -1, -1, -1, 1, 2, 3, 4, 5, kPoison}));
  EXPECT_EQ(count_keys(rows[0], 1, 5), 2);
  EXPECT_EQ(count_keys(rows[1], 1, 4), 4);
}

}  // namespace
}  // namespace fathom
