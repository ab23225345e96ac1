#include "model/lane_logits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "comm/collectives.h"
#include "comm/rank_threads.h"
#include "device/cpu/thread_pool.h"
#include "ops/sampling/sample.h"
#include "placement/split.h"

namespace fathom {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kVocab = 203;
constexpr int32_t kUntouched = -77;

struct Collected {
  std::vector<std::vector<float>> logits;
  std::vector<int32_t> tokens;
};

// What the first of `ranks` ranks gets of these rows of logits.
Collected collect(int ranks, const std::vector<std::vector<float>>& rows,
                  const std::vector<int32_t>& largest_only) {
  const auto count = std::ssize(rows);
  std::vector<float> out(static_cast<size_t>(count * kVocab), kNan);
  Collected collected;
  collected.tokens.assign(rows.size(), kUntouched);
  const auto ends = run_ranks(ranks, [&](Group& group) {
    ThreadPool pool(1);
    const Slice columns = split_vocabulary(kVocab, ranks, group.rank());
    std::vector<float> part;
    for (const auto& row : rows) {
      part.insert(part.end(), row.begin() + columns.first, row.begin() + columns.end());
    }
    const bool first = group.rank() == 0;
    collect_logits(group, ConstTensorView(part.data(), {count, columns.count}), largest_only,
                   kVocab, first ? TensorView(out.data(), {count, kVocab}) : TensorView(),
                   first ? std::span(collected.tokens) : std::span<int32_t>(), pool);
    barrier(group);
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.returned) << end.what;
  for (size_t row = 0; row < rows.size(); ++row) {
    const auto begin = out.begin() + static_cast<int64_t>(row) * kVocab;
    collected.logits.emplace_back(begin, begin + kVocab);
  }
  return collected;
}

std::vector<int32_t> all_of(const std::vector<std::vector<float>>& rows) {
  std::vector<int32_t> indices;
  for (size_t i = 0; i < rows.size(); ++i) indices.push_back(static_cast<int32_t>(i));
  return indices;
}

// The token that one rank samples greedily from the whole row.
int32_t sampled(const std::vector<float>& logits) {
  const SampleOptions greedy = {.temperature = 0};
  const SampleRow row = {.options = &greedy};
  EXPECT_TRUE(takes_largest(row));
  SampleScratch scratch;
  SampledToken token;
  sample(logits, row, scratch, token);
  return token.id;
}

// Rows with ties on both sides of every border between ranks, with NaN and infinities.
std::vector<std::vector<float>> hard_rows() {
  std::vector<std::vector<float>> rows;
  std::mt19937 random(3);
  const auto add = [&](float fill, const std::vector<std::pair<int64_t, float>>& values) {
    auto& row = rows.emplace_back(static_cast<size_t>(kVocab), fill);
    for (const auto& [id, value] : values) row[static_cast<size_t>(id)] = value;
  };
  for (const int ranks : {2, 3, 4}) {
    for (int rank = 1; rank < ranks; ++rank) {
      const int64_t border = split_vocabulary(kVocab, ranks, rank).first;
      add(0, {{border - 1, 5}, {border, 5}});
      add(0, {{border - 1, 5}, {border, 6}});
      add(0, {{border - 1, kNan}, {border, 5}});
      add(0, {{border, kNan}, {border + 1, 5}, {kVocab - 1, 5}});
      add(-1, {{border - 1, -0.0f}, {border, 0.0f}});
      add(-1, {{border - 1, 0.0f}, {border, -0.0f}});
      add(-kInfinity, {{border, -3}});
      add(0, {{border, kInfinity}, {1, 9}});
    }
  }
  add(kNan, {});
  add(-kInfinity, {});
  add(kNan, {{kVocab - 1, -1e30f}});
  add(kInfinity, {{0, 1}});
  for (int i = 0; i < 50; ++i) {
    auto& row = rows.emplace_back();
    for (int64_t id = 0; id < kVocab; ++id) row.push_back(static_cast<float>(random() % 9));
  }
  return rows;
}

TEST(CollectLogits, FindsTheTokenThatOneRankSamples) {
  const auto rows = hard_rows();
  for (const int ranks : {2, 3, 4, 8}) {
    const Collected collected = collect(ranks, rows, all_of(rows));
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(collected.tokens[i], sampled(rows[i])) << "row " << i << ", " << ranks << " ranks";
    }
  }
}

TEST(CollectLogits, GathersTheRowsThatNeedAllLogits) {
  std::vector<std::vector<float>> rows(5);
  for (size_t row = 0; row < rows.size(); ++row) {
    for (int64_t id = 0; id < kVocab; ++id) {
      rows[row].push_back(static_cast<float>(row * 1000) + static_cast<float>(id));
    }
  }
  for (const int ranks : {2, 3}) {
    for (const std::vector<int32_t>& found :
         {std::vector<int32_t>{}, std::vector<int32_t>{0, 3}, std::vector<int32_t>{4}}) {
      const Collected collected = collect(ranks, rows, found);
      for (size_t row = 0; row < rows.size(); ++row) {
        const bool is_found = std::count(found.begin(), found.end(), static_cast<int32_t>(row)) > 0;
        EXPECT_EQ(collected.tokens[row], is_found ? kVocab - 1 : kUntouched);
        if (is_found) continue;
        EXPECT_EQ(collected.logits[row], rows[row]) << row << " of " << ranks;
      }
    }
  }
}

}  // namespace
}  // namespace fathom
