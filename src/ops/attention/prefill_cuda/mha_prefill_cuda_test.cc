// Multi-head prefill attention on the GPU against the CPU's in fp32.
#include "ops/attention/prefill_cuda/mha_prefill_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/attention/attention.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kNope = 128, kRope = 64, kQk = kNope + kRope, kV = 128, kKvColumns = kNope + kV;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)
constexpr uint16_t kNan = 0x7FC0;
constexpr int64_t kPadding = 70;  // rows after the last sequence, which hold NaN

struct Lengths {
  int32_t queries, keys;
};

struct Problem {
  Problem(int num_heads, const std::vector<Lengths>& lengths) : heads(num_heads) {
    for (const Lengths& length : lengths) {
      query_starts.push_back(query_starts.back() + length.queries);
      key_starts.push_back(key_starts.back() + length.keys);
    }
    std::mt19937 random(static_cast<uint32_t>(heads * 1000 + rows() * 7 + keys()));
    // Scores have a standard deviation of about 3: running maxima move.
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
                  ConstTensorView(k_rope.data() + key * kRope, {keys, kRope}), keys - rows, kScale,
                  TensorView(result.out.data() + row * heads * kV, {rows, heads, kV}),
                  TensorView(result.lse.data() + row * heads, {rows, heads}), workspace);
  }
  return result;
}

// Keys [first, first + count) of each sequence, with the queries [begin, end) that see some of
// them.
std::vector<MhaPrefillPart> parts_of(const Problem& problem, int32_t first, int32_t most,
                                     int32_t begin, int32_t end) {
  std::vector<MhaPrefillPart> parts;
  for (size_t s = 0; s + 1 < problem.query_starts.size(); ++s) {
    const int32_t row = problem.query_starts[s], rows = problem.query_starts[s + 1] - row;
    const int32_t last = std::min(end, rows),
                  context = problem.key_starts[s + 1] - problem.key_starts[s] - rows;
    const int32_t count = std::min(most, context + last - first);
    if (count <= 0 && first > 0) continue;
    const int32_t from = std::max(begin, first - context);  // the first that sees any
    parts.push_back({.first_row = row + from,
                     .rows = std::max(0, last - from),
                     .first_key = problem.key_starts[s] + first,
                     .num_keys = count,
                     .visible = context + from - first + 1,
                     .joined = first > 0});
  }
  return parts;
}

// One way to compute a problem: keys per launch, a multiple of 128, and the queries [begin, end) of
// each sequence. The other rows are poisoned.
struct Way {
  int32_t most_keys = 1 << 20;
  int32_t begin = 0, end = 1 << 20;
  QuantizedRows quantized = {};
  bool only_quantized = false;
};

class OnGpu {
 public:
  explicit OnGpu(const Problem& problem)
      : problem_(problem),
        all_rows_(problem.rows() + kPadding),
        q_(problem.q),
        kv_(problem.kv),
        k_rope_(problem.k_rope),
        out_(all_rows_ * problem.heads * kV),
        partial_(all_rows_ * problem.heads * kV),
        lse_(all_rows_ * problem.heads) {
    check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, 0), "attribute");
    for (size_t s = 0; s + 1 < problem.key_starts.size(); ++s) {
      longest_ = std::max(longest_, problem.key_starts[s + 1] - problem.key_starts[s]);
    }
  }

  void run(const Way& way) {
    check(cudaMemset(out_.data(), 0xFF, out_.bytes()), "poison");
    check(cudaMemset(partial_.data(), 0xFF, partial_.bytes()), "poison");
    check(cudaMemset(lse_.data(), 0xFF, lse_.bytes()), "poison");
    for (int32_t first = 0; first < longest_; first += way.most_keys) {
      const auto parts = parts_of(problem_, first, way.most_keys, way.begin, way.end);
      const auto plan = plan_mha_prefill(parts, problem_.heads, processors_);
      const DeviceArray<MhaPrefillTile> tiles(plan.tiles);
      const DeviceArray<int32_t> first_tile(plan.first_tile);
      mha_prefill(processors_,
                  {.q = q_.data(),
                   .q_row_stride = problem_.heads * kQk,
                   .rows = all_rows_,
                   .kv = kv_.data(),
                   .k_rope = k_rope_.data(),
                   .keys = problem_.keys() + kPadding,
                   .out = way.only_quantized ? nullptr : out_.data(),
                   .quantized = way.quantized,
                   .partial = partial_.data(),
                   .lse = lse_.data(),
                   .heads = problem_.heads,
                   .softmax_scale = kScale,
                   .first_tile = first_tile.data(),
                   .tiles = tiles.data()},
                  nullptr);
      check(cudaDeviceSynchronize(), "synchronize");
    }
  }

  std::vector<uint16_t> out() const { return out_.to_host(); }
  std::vector<uint32_t> lse_bits() const {
    const auto values = lse_.to_host();
    std::vector<uint32_t> bits(values.size());
    std::memcpy(bits.data(), values.data(), lse_.bytes());
    return bits;
  }

  // Rows of no sequence must be left alone.
  Result result() const {
    const auto used = static_cast<size_t>(problem_.rows() * problem_.heads);
    auto values = out();
    for (size_t i = used * kV; i < values.size(); ++i) {
      EXPECT_EQ(values[i], 0xFFFF);
      if (values[i] != 0xFFFF) break;
    }
    values.resize(used * kV);
    auto lse = lse_.to_host();
    lse.resize(used);
    return {widen(values), lse};
  }

 private:
  const Problem& problem_;
  const int64_t all_rows_;
  const DeviceArray<uint16_t> q_, kv_, k_rope_, out_;
  const DeviceArray<float> partial_, lse_;
  int processors_ = 0;
  int32_t longest_ = 0;
};

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

void compare(int heads, const std::vector<Lengths>& lengths) {
  SCOPED_TRACE(testing::Message() << heads << " heads, " << lengths.size() << " sequences, first "
                                  << lengths[0].queries << " x " << lengths[0].keys);
  const Problem problem(heads, lengths);
  const Result expected = on_cpu(problem);
  OnGpu gpu(problem);
  for (const int32_t most_keys : {1 << 20, 128, 384}) {
    SCOPED_TRACE(testing::Message() << most_keys << " keys at a time");
    gpu.run({.most_keys = most_keys});
    expect_near(problem, gpu.result(), expected);
  }
}

TEST(MhaPrefill, OneSequenceOfAnyLength) {
  for (const int32_t length : {1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 500, 1000}) {
    compare(3, {{length, length}});
  }
}

// A short case: it takes racecheck a minute.
TEST(MhaPrefill, OneTileAfterACachedPrefix) { compare(1, {{70, 140}}); }

TEST(MhaPrefill, NewTokensAfterACachedPrefix) {
  for (const int32_t queries : {1, 60, 128, 200}) {
    for (const int32_t before : {1, 63, 64, 65, 128, 700})
      compare(2, {{queries, queries + before}});
  }
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

// Logits of some 2^10, where some references are large and others are not, to 2^37. Nearly all of a
// row's weight is then one key's.
TEST(MhaPrefill, LogitsOfAnySize) {
  for (const float size : {8.0f, 1e3f, 1e5f}) {
    Problem problem(3, {{60, 500}, {130, 130}, {1, 1}});
    for (auto* values : {&problem.q, &problem.kv, &problem.k_rope}) {
      for (uint16_t& value : *values) value = bf16_bits(from_bf16(value) * size);
    }
    const Result expected = on_cpu(problem);
    OnGpu gpu(problem);
    for (const int32_t most_keys : {1 << 20, 128}) {
      gpu.run({.most_keys = most_keys});
      const Result actual = gpu.result();
      for (size_t row = 0; row < expected.lse.size(); ++row) {
        double error = 0, norm = 0;
        for (size_t i = row * kV; i < (row + 1) * kV; ++i) {
          const double off = double{actual.out[i]} - expected.out[i];
          error += off * off;
          norm += double{expected.out[i]} * expected.out[i];
        }
        ASSERT_LE(error, 1e-4 * norm) << "row " << row << ", times " << size;
        ASSERT_NEAR(actual.lse[row], expected.lse[row], 1e-5 * std::abs(expected.lse[row]))
            << "row " << row << ", times " << size;
      }
    }
  }
}

TEST(MhaPrefill, NanOfOneSequenceStaysThere) {
  Problem problem(4, {{100, 100}, {200, 200}, {300, 333}});
  const Result expected = on_cpu(problem);
  std::fill(problem.kv.begin() + problem.key_starts[1] * problem.heads * kKvColumns,
            problem.kv.begin() + problem.key_starts[2] * problem.heads * kKvColumns, kNan);
  OnGpu gpu(problem);
  for (const int32_t most_keys : {1 << 20, 128}) {
    gpu.run({.most_keys = most_keys});
    expect_near(problem, gpu.result(), expected, 1);
  }
}

// In any tile, at any place in it, beside any other rows.
TEST(MhaPrefill, ARowsBitsDependOnItsKeysAndTheirCuts) {
  const Problem problem(16, {{1500, 1500}, {900, 1100}, {33, 33}});
  const auto heads = static_cast<size_t>(problem.heads);
  OnGpu gpu(problem);
  for (const int32_t most_keys : {1 << 20, 128, 512}) {
    gpu.run({.most_keys = most_keys});
    const auto whole = gpu.out();
    const auto whole_lse = gpu.lse_bits();
    int64_t compared = 0;
    for (const auto& [begin, end] : {std::pair{0, 1}, {0, 77}, {1, 130}, {500, 513}, {690, 1500}}) {
      gpu.run({.most_keys = most_keys, .begin = begin, .end = end});
      const auto some = gpu.out();
      const auto some_lse = gpu.lse_bits();
      for (size_t s = 0; s + 1 < problem.query_starts.size(); ++s) {
        const int32_t first = problem.query_starts[s], last = problem.query_starts[s + 1];
        for (int32_t row = first + begin; row < std::min(first + end, last); ++row) {
          const auto at = static_cast<size_t>(row) * heads;
          ASSERT_TRUE(std::equal(some.begin() + at * kV, some.begin() + (at + heads) * kV,
                                 whole.begin() + at * kV))
              << "sequence " << s << " query " << row - first << ", " << most_keys << " keys";
          ASSERT_TRUE(std::equal(some_lse.begin() + at, some_lse.begin() + at + heads,
                                 whole_lse.begin() + at));
          ++compared;
        }
      }
    }
    EXPECT_GT(compared, 1000);
  }
}

// Input of the output projection: the quantized bf16 result, with or without the bf16 output.
TEST(MhaPrefill, ResultsInE4m3) {
  int turn = 0;
  for (const int heads : {3, 16}) {
    const Problem problem(heads, {{300, 450}, {0, 20}, {129, 129}, {1, 700}});
    OnGpu gpu(problem);
    const int64_t rows = problem.rows() + kPadding;
    const int64_t values_stride = heads * kV + 16, scales_stride = round_up(rows + 1, 4);
    const DeviceArray<uint8_t> values(rows * values_stride);
    const DeviceArray<float> scales(heads * scales_stride);
    for (const int32_t most_keys : {1 << 20, 128}) {
      gpu.run({.most_keys = most_keys});
      const auto wide = gpu.out();
      for (const bool alone : {false, true}) {
        const ScaleForm form = ++turn % 2 == 0 ? ScaleForm::kPowerOfTwo : ScaleForm::kF32;
        check(cudaMemset(values.data(), 0xFF, values.bytes()), "poison");
        check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poison");
        gpu.run({.most_keys = most_keys,
                 .quantized = {.values = values.data(),
                               .values_row_stride = values_stride,
                               .scales = scales.data(),
                               .scales_block_stride = scales_stride,
                               .form = form},
                 .only_quantized = alone});
        ASSERT_EQ(gpu.out(), alone ? std::vector<uint16_t>(wide.size(), 0xFFFF) : wide);
        std::vector<uint8_t> expected(static_cast<size_t>(values.size()), 0xFF);
        const auto got_scales = scales.to_host();
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t head = 0; head < heads; ++head) {
            const float scale = got_scales[static_cast<size_t>(head * scales_stride + row)];
            if (row >= problem.rows()) {
              ASSERT_TRUE(std::isnan(scale));
              continue;
            }
            bf16 x[kV];
            e4m3 y[kV];
            for (int64_t i = 0; i < kV; ++i) {
              x[i] = {wide[static_cast<size_t>((row * heads + head) * kV + i)]};
            }
            ASSERT_EQ(scale, quantize_block(x, form, y)) << "row " << row << " head " << head;
            for (int64_t i = 0; i < kV; ++i) {
              expected[static_cast<size_t>(row * values_stride + head * kV + i)] = y[i].bits;
            }
          }
        }
        ASSERT_EQ(values.to_host(), expected);
      }
    }
  }
}

TEST(MhaPrefill, FiftyLaunchesGiveTheSameBits) {
  const Problem problem(16, {{700, 1500}, {900, 900}, {33, 33}});
  OnGpu gpu(problem);
  for (const int32_t most_keys : {1 << 20, 512}) {
    gpu.run({.most_keys = most_keys});
    const auto first = gpu.out();
    const auto first_lse = gpu.lse_bits();
    for (int i = 1; i < 50; ++i) {
      gpu.run({.most_keys = most_keys});
      ASSERT_EQ(gpu.out(), first) << "run " << i;
      ASSERT_EQ(gpu.lse_bits(), first_lse) << "run " << i;
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
