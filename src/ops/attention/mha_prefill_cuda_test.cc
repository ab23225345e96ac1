// Multi-head prefill attention on the GPU against the CPU's in fp32.
#include "ops/attention/mha_prefill_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/attention/attention.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kNope = 128, kRope = 64, kQk = kNope + kRope, kV = 128, kKvColumns = kNope + kV;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)
constexpr uint16_t kNan = 0x7FC0;
constexpr int64_t kPadding = 70;  // rows behind the last sequence, which hold NaN

struct Lengths {
  int32_t queries, keys;
};

struct Problem {
  Problem(int num_heads, const std::vector<Lengths>& lengths, MhaMask its_mask)
      : heads(num_heads), mask(its_mask) {
    for (const Lengths& length : lengths) {
      query_starts.push_back(query_starts.back() + length.queries);
      key_starts.push_back(key_starts.back() + length.keys);
    }
    std::mt19937 random(static_cast<uint32_t>(heads * 1000 + rows() * 7 + keys()));
    // Scores have a deviation of about 3: running maxima move.
    q = random_bf16(rows() * heads * kQk, 3, random);
    kv = random_bf16(keys() * heads * kKvColumns, 1, random);
    k_rope = random_bf16(keys() * kRope, 1, random);
    q.resize(q.size() + static_cast<size_t>(kPadding * heads * kQk), kNan);
    kv.resize(kv.size() + static_cast<size_t>(kPadding * heads * kKvColumns), kNan);
    k_rope.resize(k_rope.size() + static_cast<size_t>(kPadding * kRope), kNan);
  }

  int64_t rows() const { return query_starts.back(); }
  int64_t keys() const { return key_starts.back(); }
  int64_t num_sequences() const { return std::ssize(query_starts) - 1; }

  int heads;
  MhaMask mask;
  std::vector<int32_t> query_starts = {0}, key_starts = {0};
  std::vector<uint16_t> q, kv, k_rope;
};

struct Result {
  std::vector<float> out, lse;
};

Result on_cpu(const Problem& problem) {
  ThreadPool pool(0);
  const Stream stream(pool);
  const int64_t heads = problem.heads;
  std::vector<float> kv = widen(problem.kv), k_rope = widen(problem.k_rope);
  Result result{std::vector<float>(static_cast<size_t>(problem.rows() * heads * kV)),
                std::vector<float>(static_cast<size_t>(problem.rows() * heads))};
  std::vector<std::byte> workspace(
      static_cast<size_t>(mha_attention_workspace_bytes(heads, kQk, kV, pool.num_threads())));
  for (size_t s = 0; s + 1 < problem.query_starts.size(); ++s) {
    const int64_t row = problem.query_starts[s], rows = problem.query_starts[s + 1] - row;
    const int64_t key = problem.key_starts[s], keys = problem.key_starts[s + 1] - key;
    std::vector<float> nope, rope;
    for (int64_t i = row * heads; i < (row + rows) * heads; ++i) {
      for (int64_t c = 0; c < kQk; ++c) {
        (c < kNope ? nope : rope).push_back(from_bf16(problem.q[static_cast<size_t>(i * kQk + c)]));
      }
    }
    mha_attention(stream, ConstTensorView(nope.data(), {rows, heads, kNope}),
                  ConstTensorView(rope.data(), {rows, heads, kRope}),
                  ConstTensorView(kv.data() + key * heads * kKvColumns, {keys, heads, kKvColumns}),
                  ConstTensorView(k_rope.data() + key * kRope, {keys, kRope}),
                  problem.mask == MhaMask::kCausal ? keys - rows : keys, kScale,
                  TensorView(result.out.data() + row * heads * kV, {rows, heads, kV}),
                  TensorView(result.lse.data() + row * heads, {rows, heads}), workspace);
  }
  return result;
}

// Of `launches`, which all give the same bits.
Result on_gpu(const Problem& problem, bool f32, int launches = 2) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "attribute");
  const auto plan = plan_mha_prefill(problem.query_starts, problem.key_starts, problem.mask,
                                     problem.heads, processors);
  const DeviceArray<uint16_t> q(problem.q), kv(problem.kv), k_rope(problem.k_rope);
  const DeviceArray<MhaPrefillTile> tiles(plan.tiles);
  const DeviceArray<int32_t> first_tile(plan.first_tile);
  const int64_t all_rows = problem.rows() + kPadding, heads = problem.heads;
  const DeviceArray<uint16_t> out(all_rows * heads * kV * (f32 ? 2 : 1));
  const DeviceArray<float> lse(all_rows * heads);
  std::vector<uint16_t> first;
  std::vector<float> first_lse;
  for (int i = 0; i < launches; ++i) {
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    check(cudaMemset(lse.data(), 0xFF, lse.bytes()), "poison");
    mha_prefill(processors,
                {.q = q.data(),
                 .q_row_stride = problem.heads * kQk,
                 .rows = all_rows,
                 .kv = kv.data(),
                 .k_rope = k_rope.data(),
                 .keys = problem.keys() + kPadding,
                 .out = out.data(),
                 .out_f32 = f32,
                 .lse = lse.data(),
                 .heads = problem.heads,
                 .softmax_scale = kScale,
                 .first_tile = first_tile.data(),
                 .tiles = tiles.data()},
                nullptr);
    check(cudaDeviceSynchronize(), "synchronize");
    const auto values = out.to_host();
    const auto sums = lse.to_host();
    if (i == 0) {
      first = values;
      first_lse = sums;
    }
    EXPECT_EQ(values, first) << "launch " << i;
    EXPECT_EQ(std::memcmp(sums.data(), first_lse.data(), lse.bytes()), 0) << "launch " << i;
  }
  // Rows of no sequence are left alone.
  const auto used = static_cast<size_t>(problem.rows() * heads);
  for (size_t i = used * kV * (f32 ? 2 : 1); i < first.size(); ++i) {
    EXPECT_EQ(first[i], 0xFFFF);
    if (first[i] != 0xFFFF) break;
  }
  Result result;
  if (f32) {
    result.out.resize(used * kV);
    std::memcpy(result.out.data(), first.data(), result.out.size() * sizeof(float));
  } else {
    first.resize(used * kV);
    result.out = widen(first);
  }
  result.lse.assign(first_lse.begin(), first_lse.begin() + static_cast<std::ptrdiff_t>(used));
  return result;
}

// bf16 probabilities and a bf16 result: each rounds by 2^-9 at most.
void expect_near(const Problem& problem, const Result& actual, const Result& expected,
                 std::optional<size_t> but_sequence = {}) {
  double error = 0, norm = 0;
  for (size_t s = 0; s + 1 < problem.query_starts.size(); ++s) {
    if (s == but_sequence) continue;
    const auto begin = static_cast<size_t>(problem.query_starts[s] * problem.heads);
    const auto end = static_cast<size_t>(problem.query_starts[s + 1] * problem.heads);
    for (size_t row = begin; row < end; ++row) {
      double row_error = 0, row_norm = 0;
      for (size_t i = row * kV; i < (row + 1) * kV; ++i) {
        ASSERT_TRUE(std::isfinite(actual.out[i])) << "sequence " << s << " row " << row;
        row_error += (actual.out[i] - expected.out[i]) * (actual.out[i] - expected.out[i]);
        row_norm += expected.out[i] * expected.out[i];
      }
      ASSERT_LE(row_error, 1e-4 * row_norm) << "sequence " << s << " row " << row;
      if (std::isinf(expected.lse[row])) {
        ASSERT_EQ(actual.lse[row], expected.lse[row]);
      } else {
        ASSERT_NEAR(actual.lse[row], expected.lse[row], 1e-4) << "sequence " << s << " row " << row;
      }
      error += row_error;
      norm += row_norm;
    }
  }
  EXPECT_LE(std::sqrt(error / norm), 4e-3);
}

void compare(int heads, const std::vector<Lengths>& lengths, MhaMask mask = MhaMask::kCausal) {
  SCOPED_TRACE(testing::Message() << heads << " heads, " << lengths.size() << " sequences, first "
                                  << lengths[0].queries << " x " << lengths[0].keys);
  const Problem problem(heads, lengths, mask);
  const Result expected = on_cpu(problem);
  expect_near(problem, on_gpu(problem, false), expected);
  expect_near(problem, on_gpu(problem, true), expected);
}

TEST(MhaPrefill, OneSequenceOfAnyLength) {
  for (const int32_t length : {1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 500, 1000}) {
    compare(3, {{length, length}});
  }
}

TEST(MhaPrefill, NewTokensAfterACachedPrefix) {
  for (const int32_t queries : {1, 60, 128, 200}) {
    for (const int32_t before : {1, 63, 64, 65, 128, 700})
      compare(2, {{queries, queries + before}});
  }
}

TEST(MhaPrefill, AllKeysOfAPrefix) {
  for (const int32_t keys : {1, 64, 127, 128, 129, 1000}) {
    compare(2, {{200, keys}}, MhaMask::kNone);
  }
  compare(4, {{200, 300}, {1, 0}, {130, 0}, {64, 1024}, {300, 17}}, MhaMask::kNone);
}

TEST(MhaPrefill, SequencesOfDifferentLengths) {
  std::mt19937 random(7);
  std::vector<Lengths> lengths;
  for (int i = 0; i < 40; ++i) {
    const auto queries = static_cast<int32_t>(1 + random() % 300);
    lengths.push_back({queries, queries + static_cast<int32_t>(i % 3 == 0 ? random() % 700 : 0)});
  }
  compare(4, lengths);
  compare(16, {{1000, 1000}, {0, 30}, {1, 1}, {513, 1100}});
}

TEST(MhaPrefill, RealShapes) {
  compare(16, {{2048, 2048}});
  compare(128, {{600, 600}});
  compare(16, std::vector<Lengths>(8, {1024, 1024}));
}

TEST(MhaPrefill, NanOfOneSequenceStaysThere) {
  Problem problem(4, {{100, 100}, {200, 200}, {300, 333}}, MhaMask::kCausal);
  const Result expected = on_cpu(problem);
  std::fill(problem.kv.begin() + problem.key_starts[1] * problem.heads * kKvColumns,
            problem.kv.begin() + problem.key_starts[2] * problem.heads * kKvColumns, kNan);
  expect_near(problem, on_gpu(problem, false), expected, 1);
}

TEST(MhaPrefill, FiftyLaunchesGiveTheSameBits) {
  const Problem problem(16, {{700, 1500}, {900, 900}, {33, 33}}, MhaMask::kCausal);
  on_gpu(problem, false, 50);
}

}  // namespace
}  // namespace fathom::cuda
