// The choice on the GPU against the CPU's: the same lists of the same scores.
#include "ops/indexer/top_keys_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "ops/indexer/indexer_cpu.h"
#include "ops/indexer/top_keys_limit.h"

namespace fathom::cuda {
namespace {

constexpr int32_t kPoison = -1234567;

// The CPU's lists.
std::vector<int32_t> expected_lists(const std::vector<float>& scores, int64_t columns,
                                    const std::vector<int32_t>& lengths, int32_t k,
                                    int32_t first_key = 0) {
  const auto rows = std::ssize(lengths);
  std::vector<SparseRow> sparse;
  for (int32_t row = 0; row < rows; ++row) sparse.push_back({row, 0, lengths[row]});
  std::vector<int32_t> keys(static_cast<size_t>(rows * k));
  ThreadPool pool(1);
  std::vector<std::byte> workspace(static_cast<size_t>(cpu::top_keys_workspace_bytes(columns, 1)));
  cpu::select_top_keys(pool, CpuIsa::kScalar, ConstTensorView(scores.data(), {rows, columns}),
                       sparse, first_key, TensorView(keys.data(), {rows, int64_t{k}}), workspace);
  return keys;
}

void compare(const std::vector<float>& scores, int64_t columns, const std::vector<int32_t>& lengths,
             int32_t k, int32_t first_key = 0) {
  const auto expected = expected_lists(scores, columns, lengths, k, first_key);
  const DeviceArray<float> device_scores(scores);
  const DeviceArray<int32_t> device_lengths(lengths);
  DeviceArray<int32_t> keys(std::ssize(expected));
  for (int run = 0; run < 3; ++run) {
    keys.copy_from(std::vector<int32_t>(expected.size(), kPoison));
    select_top_keys({.scores = device_scores.data(),
                     .columns = columns,
                     .lengths = device_lengths.data(),
                     .keys = keys.data(),
                     .rows = static_cast<int32_t>(lengths.size()),
                     .k = k,
                     .first_key = first_key},
                    nullptr);
    check(cudaDeviceSynchronize(), "select_top_keys");
    const auto actual = keys.to_host();
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(actual[i], expected[i]) << "row " << i / k << " of " << lengths[i / k] << " keys, "
                                        << k << " chosen, place " << i % k;
    }
  }
}

// Scores beyond a row's length are poison that would be chosen.
std::vector<float> with_poison(std::vector<float> scores, int64_t columns,
                               const std::vector<int32_t>& lengths) {
  for (size_t row = 0; row < lengths.size(); ++row) {
    std::fill(scores.begin() + row * columns + lengths[row], scores.begin() + (row + 1) * columns,
              std::numeric_limits<float>::infinity());
  }
  return scores;
}

TEST(TopKeysCuda, EqualsTheCpu) {
  std::mt19937 random(5);
  for (const int32_t k : {1, 16, 64, 100, 2048}) {
    for (const int64_t columns : {64, 2048, 2064, 4096, 9000, 16400, 40000}) {
      std::vector<int32_t> lengths = {1, static_cast<int32_t>(columns)};
      for (const int64_t some : {int64_t{k} - 1, int64_t{k}, int64_t{k} + 1, columns - 1}) {
        if (some > 0 && some <= columns) lengths.push_back(static_cast<int32_t>(some));
      }
      for (int i = 0; i < 5; ++i) lengths.push_back(static_cast<int32_t>(1 + random() % columns));
      const auto scores = random_f32(std::ssize(lengths) * columns, 1, random);
      compare(with_poison(scores, columns, lengths), columns, lengths, k);
    }
  }
}

// Sequences without a key 0, whose score is the highest, not a number, or the lowest of all.
TEST(TopKeysCuda, LeavesOutAHiddenKey) {
  std::mt19937 random(10);
  constexpr int32_t kKeys = 256;
  const float inf = std::numeric_limits<float>::infinity();
  for (const float hidden : {inf, std::numeric_limits<float>::quiet_NaN(), -inf}) {
    for (const int64_t columns : {int64_t{512}, int64_t{40000}}) {
      const std::vector<int32_t> lengths = {
          2, 3, kKeys - 1, kKeys, kKeys + 1, kKeys + 2, 500, 512, static_cast<int32_t>(columns)};
      auto scores = random_f32(std::ssize(lengths) * columns, 1, random);
      for (size_t row = 0; row < lengths.size(); ++row) {
        scores[row * static_cast<size_t>(columns)] = hidden;
      }
      // No number at all: the hidden one would be the first of equals.
      std::fill(scores.end() - columns, scores.end(), std::numeric_limits<float>::quiet_NaN());
      compare(scores, columns, lengths, kKeys, 1);
    }
  }
}

// Scores that only the lowest bits tell apart, in several digits; and a few distinct ones.
TEST(TopKeysCuda, TellsNeighbouringScoresApart) {
  std::mt19937 random(6);
  constexpr int64_t kColumns = 20000;
  for (const uint32_t mask : {0xFu, 0xFFFu, 0xFFFFFu, 0xFF00u, 0x3u << 20}) {
    std::vector<float> scores(2 * kColumns);
    for (float& score : scores) {
      score = std::bit_cast<float>(0x3F800000 | (static_cast<uint32_t>(random()) & mask));
    }
    for (int64_t i = kColumns; i < 2 * kColumns; ++i) scores[i] = -scores[i];
    compare(scores, kColumns, {kColumns, 19001}, 2048);
    compare(scores, kColumns, {5000, 5000}, 64);
  }
}

TEST(TopKeysCuda, OrdersSpecialScores) {
  std::mt19937 random(7);
  constexpr int64_t kColumns = 6000;
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float kinds[] = {0.0f, -0.0f, nan, -nan, inf, -inf, 1e-40f, -1e-40f, 1e-45f, -1e-45f, 1.0f};
  std::vector<float> scores(3 * kColumns);
  for (float& score : scores) score = kinds[random() % std::size(kinds)];
  std::fill(scores.begin() + kColumns, scores.begin() + 2 * kColumns, nan);  // nothing else
  for (int64_t i = 2 * kColumns; i < 3 * kColumns; ++i) {                    // zeros of both signs
    scores[i] = random() % 2 == 0 ? 0.0f : -0.0f;
  }
  for (const int32_t k : {16, 500, 2048, 5999}) {
    compare(scores, kColumns, {kColumns, kColumns, kColumns}, k);
  }
}

TEST(TopKeysCuda, TakesLongRows) {
  std::mt19937 random(8);
  for (const int64_t columns : {int64_t{128} << 10, int64_t{160} << 10, kMostScoreColumns}) {
    const std::vector<int32_t> lengths = {static_cast<int32_t>(columns), 2049, 70001,
                                          static_cast<int32_t>(columns - 3)};
    auto scores = random_f32(std::ssize(lengths) * columns, 1, random);
    for (int64_t i = 0; i < columns; ++i) scores[i] = static_cast<float>(i % 7);  // ties everywhere
    compare(with_poison(std::move(scores), columns, lengths), columns, lengths, 2048);
  }
}

// A captured launch follows the lengths of the moment.
TEST(TopKeysCuda, ReplaysWithOtherLengths) {
  std::mt19937 random(9);
  constexpr int64_t kColumns = 8192, kRows = 6;
  constexpr int32_t kKeys = 256;
  const auto scores = random_f32(kRows * kColumns, 1, random);
  const DeviceArray<float> device_scores(scores);
  DeviceArray<int32_t> device_lengths(kRows), keys(kRows * kKeys);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "creating a stream");
  {
    const Graph graph(stream, [&] {
      select_top_keys({.scores = device_scores.data(),
                       .columns = kColumns,
                       .lengths = device_lengths.data(),
                       .keys = keys.data(),
                       .rows = kRows,
                       .k = kKeys},
                      stream);
    });
    for (int run = 0; run < 4; ++run) {
      std::vector<int32_t> lengths;
      for (int64_t row = 0; row < kRows; ++row) {
        lengths.push_back(static_cast<int32_t>(1 + random() % (row % 2 == 0 ? kColumns : 300)));
      }
      device_lengths.copy_from(lengths);
      keys.copy_from(std::vector<int32_t>(kRows * kKeys, kPoison));
      graph.launch(stream);
      check(cudaStreamSynchronize(stream), "a replay");
      ASSERT_EQ(keys.to_host(), expected_lists(scores, kColumns, lengths, kKeys));
    }
  }
  check(cudaStreamDestroy(stream), "destroying a stream");
}

TEST(TopKeysCuda, ListsAllKeys) {
  constexpr int32_t kKeys = 2048;
  for (const int32_t first_key : {0, 1}) {
    std::vector<int32_t> lengths = {0, 1, 2, 64, 1000, 2047, 2048};
    if (first_key == 1) lengths.push_back(2049);
    const DeviceArray<int32_t> device_lengths(lengths);
    DeviceArray<int32_t> keys(std::ssize(lengths) * kKeys);
    keys.copy_from(std::vector<int32_t>(static_cast<size_t>(keys.size()), kPoison));
    select_all_keys({.lengths = device_lengths.data(),
                     .keys = keys.data(),
                     .rows = static_cast<int32_t>(lengths.size()),
                     .k = kKeys,
                     .first_key = first_key},
                    nullptr);
    const auto actual = keys.to_host();
    for (int64_t i = 0; i < keys.size(); ++i) {
      const auto key = first_key + static_cast<int32_t>(i % kKeys);
      ASSERT_EQ(actual[i], key < lengths[i / kKeys] ? key : -1) << i << ", from " << first_key;
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
