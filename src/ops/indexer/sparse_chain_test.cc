// The operations of a layer one after the other, as a step runs them: index keys, plan, index
// queries, scores, choice, attention. Whatever the steps are cut into, and wherever the threshold
// is, every row gets the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "cache/index_key_row.h"
#include "cache/latent_row.h"
#include "ops/attention/attention_test_data.h"
#include "ops/attention/sparse_attention.h"
#include "ops/indexer/index_keys.h"
#include "ops/indexer/index_scores.h"
#include "ops/indexer/sparse_plan.h"
#include "ops/indexer/top_keys.h"

namespace fathom {
namespace {

constexpr int64_t kIndexHeads = 16, kDim = 32, kHeads = 4, kLatent = 64, kRope = 16;

// One sequence's inputs of a layer, and the caches that its steps fill.
class Layer {
 public:
  Layer(int32_t tokens, IndexKeyFormat format, const SparseLimits& limits)
      : tokens_(tokens),
        limits_(limits),
        index_layout_{format, kDim},
        k(tokens * kDim, DType::kF32, 1, 1),
        q(tokens * kIndexHeads * kDim, DType::kF32, 2, 1),
        head_weights(tokens * kIndexHeads, DType::kF32, 3, 1),
        latent(tokens * (kLatent + kRope), DType::kF32, 4, 1),
        q_latent_(tokens * kHeads * kLatent, DType::kF32, 5, 1),
        q_rope_(tokens * kHeads * kRope, DType::kF32, 6, 1) {
    const int32_t pages = (tokens + 63) / 64 + 1;
    for (int32_t page = 0; page < pages; ++page) table_.push_back((page * 3 + 1) % pages);
    if (pages % 3 == 0) std::iota(table_.begin(), table_.end(), 0);  // 3 must not divide them
    cache_ = *LatentCache::allocate({CacheFormat::kF32, kLatent, kRope}, 1, pages);
    std::memset(cache_.page(0), 0xFF, static_cast<size_t>(pages * cache_.page_bytes()));
    index_memory_.assign(static_cast<size_t>(pages * index_layout_.page_bytes()), std::byte{0xFF});
    out.assign(static_cast<size_t>(tokens * kHeads * kLatent), std::nanf(""));
    lists.assign(static_cast<size_t>(tokens), {});
  }

  // Tokens [begin, begin + count), as one step with `threads`.
  void step(int32_t begin, int32_t count, int threads) {
    ThreadPool pool(threads);
    const Stream stream(pool);
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = begin + i;
      positions.push_back(token);
      slots.push_back(int64_t{table_[token / 64]} * 64 + token % 64);
      encode_row(cache_.layout(), latent.wide.data() + token * (kLatent + kRope),
                 latent.wide.data() + token * (kLatent + kRope) + kLatent,
                 cache_.layer(0).row(table_[token / 64], token % 64));
    }
    const TestTensor weight(kDim, DType::kF32, 7, 1), bias(kDim, DType::kF32, 8, 0.2);
    write_index_keys(stream, k.view({tokens_, kDim}).rows(begin, count), positions, slots,
                     {weight.view({kDim}), bias.view({kDim})}, rotation(), index_pages());

    const std::vector<int32_t> query_start = {0, count}, contexts = {begin}, all = {0};
    const PagedBatch batch{query_start, contexts, table_, static_cast<int32_t>(table_.size())};
    const SparsePlan plan = plan_sparse_rows(batch, all, limits_);
    attend(stream, batch, plan.dense, all_keys(plan.dense), begin, count);

    if (plan.is_short()) return;
    std::vector<std::byte> values(static_cast<size_t>(count * kIndexHeads * kDim * 4));
    std::vector<float> weights(static_cast<size_t>(count * kIndexHeads));
    const TensorView query(values.data(), index_query_type(index_layout_.format),
                           {count, kIndexHeads, kDim});
    make_index_queries(stream, q.view({tokens_, kIndexHeads, kDim}).rows(begin, count),
                       head_weights.view({tokens_, kIndexHeads}).rows(begin, count), positions,
                       rotation(), query, TensorView(weights.data(), {count, kIndexHeads}));
    std::vector<float> scores(
        static_cast<size_t>(score_buffer_floats(limits_, count, begin + count)));
    for (const ScorePass& pass : plan.passes) {
      const std::vector<SparseRow> rows(plan.scored.begin() + pass.first,
                                        plan.scored.begin() + pass.first + pass.count);
      ASSERT_LE(pass.count * pass.columns, std::ssize(scores));
      const TensorView part(scores.data(), {pass.count, pass.columns});
      std::vector<std::byte> workspace(static_cast<size_t>(
          std::max(index_scores_workspace_bytes(pass.count, kIndexHeads, kDim, threads),
                   top_keys_workspace_bytes(pass.columns, threads))));
      index_scores(stream, query, ConstTensorView(weights.data(), {count, kIndexHeads}), batch,
                   rows, index_pages(), part, workspace);
      std::vector<int32_t> keys(static_cast<size_t>(pass.count * limits_.top_keys));
      select_top_keys(stream, part, rows, 0,
                      TensorView(keys.data(), {pass.count, limits_.top_keys}), workspace);
      attend(stream, batch, rows, keys, begin, count);
    }
  }

  // All tokens, `chunk` a step.
  void run(int32_t chunk, int threads) {
    for (int32_t begin = 0; begin < tokens_; begin += chunk) {
      step(begin, std::min(chunk, tokens_ - begin), threads);
    }
  }

 private:
  IndexRotation rotation() const { return {&table, false, true}; }
  IndexKeyPages index_pages() {
    return {index_layout_, index_memory_.data(), std::ssize(table_), index_layout_.page_bytes()};
  }

  std::vector<int32_t> all_keys(const std::vector<SparseRow>& rows) const {
    std::vector<int32_t> keys(rows.size() * static_cast<size_t>(limits_.top_keys));
    select_all_keys(rows, 0, TensorView(keys.data(), {std::ssize(rows), limits_.top_keys}));
    return keys;
  }

  void attend(const Stream& stream, const PagedBatch& batch, const std::vector<SparseRow>& rows,
              const std::vector<int32_t>& keys, int32_t begin, int32_t count) {
    const int64_t top = limits_.top_keys;
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto first = keys.begin() + static_cast<int64_t>(i) * top;
      lists[begin + rows[i].row] = {first, first + count_keys(rows[i], 0, top)};
    }
    std::vector<std::byte> workspace(static_cast<size_t>(sparse_attention_workspace_bytes(
        count, kHeads, kLatent, stream.pool().num_threads(), kRope)));
    sparse_attention(stream, q_latent_.view({tokens_, kHeads, kLatent}).rows(begin, count),
                     q_rope_.view({tokens_, kHeads, kRope}).rows(begin, count), batch, rows,
                     ConstTensorView(keys.data(), {std::ssize(rows), top}), cache_.layer(0), 0.2f,
                     TensorView(out.data(), {tokens_, kHeads, kLatent}).rows(begin, count), {},
                     workspace);
  }

  int32_t tokens_;
  SparseLimits limits_;
  IndexKeyLayout index_layout_;
  std::vector<int32_t> table_;
  LatentCache cache_;
  std::vector<std::byte> index_memory_;

 public:
  const RopeTable table = make_rope_table(kRope, 10000, {});
  TestTensor k, q, head_weights, latent;
  std::vector<float> out;                   // [tokens, H, latent]
  std::vector<std::vector<int32_t>> lists;  // of each token's row

 private:
  TestTensor q_latent_, q_rope_;
};

SparseLimits limits_of(int64_t top_keys, int64_t dense_keys, int64_t score_bytes = 1 << 20) {
  return {top_keys, dense_keys, score_bytes};
}

TEST(SparseChain, CuttingThresholdAndBudgetChangeNoBit) {
  constexpr int32_t kTokens = 230;
  for (const auto format : {IndexKeyFormat::kE4M3, IndexKeyFormat::kF32}) {
    Layer whole(kTokens, format, limits_of(64, 64));
    whole.run(kTokens, 2);
    for (const float value : whole.out) ASSERT_FALSE(std::isnan(value));
    ASSERT_EQ(std::ssize(whole.lists[63]), 64);
    ASSERT_EQ(std::ssize(whole.lists[64]), 64);
    const auto expect_equal = [&](const Layer& other) {
      EXPECT_EQ(other.lists, whole.lists);
      EXPECT_EQ(std::memcmp(other.out.data(), whole.out.data(), whole.out.size() * sizeof(float)),
                0);
    };
    for (const int32_t chunk : {1, 4, 13, 50}) {
      SCOPED_TRACE(chunk);
      Layer cut(kTokens, format, limits_of(64, 64));
      cut.run(chunk, chunk % 3 + 1);
      expect_equal(cut);
    }
    for (const int64_t dense : {0, 1, 40, 63}) {
      SCOPED_TRACE(dense);
      Layer other(kTokens, format, limits_of(64, dense));
      other.run(50, 2);
      expect_equal(other);
    }
    Layer frugal(kTokens, format, limits_of(64, 64, int64_t{4} * 240 * 3));  // three rows a pass
    frugal.run(kTokens, 2);
    expect_equal(frugal);
  }
}

// A token whose index key is what one row asks for: that row, and attention, find it among 4,096.
TEST(SparseChain, ANeedleIsFound) {
  constexpr int32_t kTokens = 4096, kNeedle = 1234;
  for (const auto format : {IndexKeyFormat::kE4M3, IndexKeyFormat::kF32}) {
    Layer layer(kTokens, format, limits_of(64, 64));
    // The last row's heads all ask for the key that the needle has behind its norm, where the
    // position does not matter: in the dimensions that are not rotated.
    for (int64_t i = 0; i < kDim; ++i) {
      const float direction = i < kRope ? 0.0f : i % 2 == 0 ? 1.0f : -1.0f;
      layer.k.wide[kNeedle * kDim + i] = direction;
      const TestTensor weight(kDim, DType::kF32, 7, 1);
      for (int64_t head = 0; head < kIndexHeads; ++head) {
        layer.q.wide[((kTokens - 1) * kIndexHeads + head) * kDim + i] =
            direction * (weight.wide[i] < 0 ? -1.0f : 1.0f);
        layer.head_weights.wide[(kTokens - 1) * kIndexHeads + head] = 1;
      }
    }
    layer.run(kTokens - 1, 2);
    layer.step(kTokens - 1, 1, 2);
    EXPECT_TRUE(std::ranges::binary_search(layer.lists[kTokens - 1], kNeedle));
    EXPECT_FALSE(std::ranges::binary_search(layer.lists[kTokens - 2], kNeedle) &&
                 std::ranges::binary_search(layer.lists[kTokens - 3], kNeedle));
  }
}

// What e4m3 costs: nearly all of the keys that fp32 chooses.
TEST(SparseChain, E4M3ChoosesTheKeysOfFp32) {
  constexpr int32_t kTokens = 1500;
  Layer exact(kTokens, IndexKeyFormat::kF32, limits_of(64, 64));
  Layer coarse(kTokens, IndexKeyFormat::kE4M3, limits_of(64, 64));
  exact.run(kTokens, 2);
  coarse.run(kTokens, 2);
  int64_t shared = 0, rows = 0;
  for (int32_t row = 64; row < kTokens; ++row, ++rows) {
    std::vector<int32_t> both;
    std::ranges::set_intersection(exact.lists[row], coarse.lists[row], std::back_inserter(both));
    shared += std::ssize(both);
  }
  EXPECT_GE(static_cast<double>(shared), 0.9 * 64 * static_cast<double>(rows));
  EXPECT_LT(shared, 64 * rows);  // they are different indexers
}

}  // namespace
}  // namespace fathom
