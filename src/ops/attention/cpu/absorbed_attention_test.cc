#include <gtest/gtest.h>

#include <cstring>

#include "ops/attention/absorbed_plan.h"
#include "ops/attention/cpu/attention_cpu.h"
#include "ops/attention/cpu/latent_problem_test_data.h"

namespace fathom {
namespace {

using Shape = LatentShape;

struct Problem : LatentProblem {
  using LatentProblem::LatentProblem;

  std::vector<float> run(CpuIsa isa, int threads, const std::vector<int32_t>& sequences) const {
    return run(isa, threads, sequences, batch());
  }
  std::vector<float> run(CpuIsa isa, int threads, const std::vector<int32_t>& sequences,
                         const PagedBatch& batch) const {
    ThreadPool pool(threads);
    const int64_t count = rows * shape.heads * shape.latent;
    std::vector<float> wide(static_cast<size_t>(count + 1), std::nanf(""));
    std::vector<bf16> narrow(static_cast<size_t>(count + 1), bf16{0xFFFF});
    const TensorView out = shape.out_dtype == DType::kF32
                               ? TensorView(wide.data(), {rows, shape.heads, shape.latent})
                               : TensorView(narrow.data(), {rows, shape.heads, shape.latent});
    std::vector<std::byte> workspace(cpu::absorbed_attention_workspace_bytes(
                                         rows, shape.heads, shape.latent, threads, shape.rope) +
                                         5,
                                     std::byte{0xFF});
    cpu::absorbed_attention(pool, isa, q_latent.view({rows, shape.heads, shape.latent}),
                            q_rope.view({rows, shape.heads, shape.rope}), batch, sequences,
                            cache.layer(0), scale(), out, std::span(workspace).subspan(5));
    if (shape.out_dtype == DType::kBF16) {
      for (size_t i = 0; i < wide.size(); ++i) wide[i] = to_float(narrow[i]);
    }
    EXPECT_TRUE(std::isnan(wide.back()));
    wide.pop_back();
    return wide;
  }

  // The definition, in double precision, over the decoded rows.
  std::vector<double> expected(int64_t sequence, int64_t query, int64_t head) const {
    const LatentPages pages = cache.layer(0);
    const int64_t row = query_start[sequence] + query;
    const int64_t seen = shape.contexts[sequence] + query + 1;
    std::vector<std::vector<float>> keys;
    std::vector<double> weights;
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t token = first_key; token < seen; ++token) {
      std::vector<float> key(static_cast<size_t>(shape.latent + shape.rope));
      decode_row(pages.layout,
                 pages.row(block_tables[sequence * max_pages + token / 64], token % 64), key.data(),
                 key.data() + shape.latent);
      double score = 0;
      const int64_t at = row * shape.heads + head;
      for (int64_t i = 0; i < shape.latent; ++i) {
        score += static_cast<double>(q_latent.wide[at * shape.latent + i]) * key[i];
      }
      for (int64_t i = 0; i < shape.rope; ++i) {
        score += static_cast<double>(q_rope.wide[at * shape.rope + i]) * key[shape.latent + i];
      }
      weights.push_back(score * scale());
      max = std::max(max, weights.back());
      keys.push_back(std::move(key));
    }
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - max);
    std::vector<double> out(static_cast<size_t>(shape.latent), 0);
    for (size_t token = 0; token < keys.size(); ++token) {
      for (int64_t i = 0; i < shape.latent; ++i) out[i] += weights[token] / sum * keys[token][i];
    }
    return out;
  }
};

const std::vector<Shape>& shapes() {
  constexpr auto kBF16 = DType::kBF16;
  constexpr auto kF32 = DType::kF32;
  static const std::vector<Shape> all = {
      // The bundled model: one sequence, then several of mixed lengths.
      {4, 512, 64, CacheFormat::kBF16, kBF16, kBF16, {1}, {300}},
      {4, 512, 64, CacheFormat::kBF16, kBF16, kF32, {1, 1, 3, 1}, {0, 63, 129, 1100}},
      {4, 512, 64, CacheFormat::kF32, kF32, kF32, {1, 2, 1}, {640, 65, 0}},
      {4, 512, 64, CacheFormat::kFp8Scaled, kBF16, kF32, {1, 2}, {500, 7}},
      {4, 512, 64, CacheFormat::kE4M3, kBF16, kF32, {1}, {77}},
      {4, 512, 64, CacheFormat::kE5M2, kBF16, kF32, {1}, {77}},
      // V2-Lite's 16 heads, several groups of rows, a prefill chunk.
      {16, 512, 64, CacheFormat::kBF16, kBF16, kF32, {9}, {200}},
      // Odd sizes, with a ragged scale block.
      {3, 96, 16, CacheFormat::kBF16, kBF16, kF32, {1, 5}, {130, 62}},
      {3, 96, 16, CacheFormat::kF32, kF32, kF32, {1, 5}, {130, 62}},
      {3, 200, 6, CacheFormat::kFp8Scaled, kBF16, kF32, {2}, {70}},
      {5, 33, 2, CacheFormat::kBF16, kBF16, kF32, {3}, {90}},
      // fp32 queries over a bf16 cache: bf16 arithmetic.
      {2, 128, 32, CacheFormat::kBF16, kF32, kF32, {1}, {100}},
  };
  return all;
}

class AbsorbedAttention : public testing::TestWithParam<CpuIsa> {};

TEST_P(AbsorbedAttention, MatchesDoublePrecision) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(testing::Message()
                 << shape.heads << " heads, latent " << shape.latent << ", cache "
                 << name_of(shape.format) << ", " << shape.queries.size() << " sequences");
    const Problem problem(shape);
    const std::vector<float> out = problem.run(GetParam(), 2, problem.all_sequences());
    const bool exact = shape.format == CacheFormat::kF32;
    // bf16: rounded probabilities, and rounded products with the scales in FP8; values below 1.5.
    const double tolerance = exact ? 4e-6 : 8e-3;
    for (size_t s = 0; s < shape.queries.size(); ++s) {
      for (int64_t i = 0; i < shape.queries[s]; ++i) {
        for (int64_t h = 0; h < shape.heads; ++h) {
          const std::vector<double> expected = problem.expected(static_cast<int64_t>(s), i, h);
          const int64_t row = (problem.query_start[s] + i) * shape.heads + h;
          for (int64_t d = 0; d < shape.latent; ++d) {
            ASSERT_NEAR(out[row * shape.latent + d], expected[d], tolerance)
                << "sequence " << s << " query " << i << " head " << h << " element " << d;
          }
        }
      }
    }
  }
}

TEST_P(AbsorbedAttention, BatchAndThreadsChangeNoBit) {
  for (const Shape& shape : shapes()) {
    const Problem problem(shape);
    const std::vector<float> whole = problem.run(GetParam(), 2, problem.all_sequences());
    for (const int threads : {4, 16}) {  // with threads to spare, groups of fewer rows
      const std::vector<float> again = problem.run(GetParam(), threads, problem.all_sequences());
      EXPECT_EQ(std::memcmp(whole.data(), again.data(), whole.size() * sizeof(float)), 0);
    }
    for (size_t s = 0; s < shape.queries.size(); ++s) {
      const std::vector<float> alone = problem.run(GetParam(), 1, {static_cast<int32_t>(s)});
      const int64_t stride = shape.heads * shape.latent;
      for (int64_t i = 0; i < problem.rows * stride; ++i) {
        const int64_t row = i / stride;
        if (row >= problem.query_start[s] && row < problem.query_start[s + 1]) {
          ASSERT_EQ(alone[i], whole[i]) << "sequence " << s << " element " << i;
        } else {
          ASSERT_TRUE(std::isnan(alone[i])) << "row " << row << " of another sequence was written";
        }
      }
    }
  }
}

// More groups than a wave holds: the second wave must find everything in place.
TEST_P(AbsorbedAttention, ManySequences) {
  Shape shape{2, 32, 8, CacheFormat::kBF16, DType::kBF16, DType::kF32, {}, {}};
  for (int32_t s = 0; s < 300; ++s) {
    shape.queries.push_back(1);
    shape.contexts.push_back(s % 90);
  }
  const Problem problem(shape);
  const std::vector<float> out = problem.run(GetParam(), 3, problem.all_sequences());
  for (int64_t s = 0; s < 300; s += 23) {
    for (int64_t h = 0; h < 2; ++h) {
      const std::vector<double> expected = problem.expected(s, 0, h);
      for (int64_t d = 0; d < 32; ++d) {
        ASSERT_NEAR(out[(s * 2 + h) * 32 + d], expected[d], 8e-3) << "sequence " << s;
      }
    }
  }
}

// A chunk's or a draft window's rows are split by what each of them sees: at every length of two
// pages, and where the number of splits changes.
TEST_P(AbsorbedAttention, ARowOfAWindowHasTheBitsOfTheRowAlone) {
  std::vector<int32_t> contexts = {1021, 1022, 2046};
  for (int32_t context = 20; context < 130; context += 3) contexts.push_back(context);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const CacheFormat format = dtype == DType::kF32 ? CacheFormat::kF32 : CacheFormat::kBF16;
    for (const int32_t context : contexts) {
      const Problem problem({3, 64, 16, format, dtype, DType::kF32, {4}, {context}});
      const std::vector<float> window = problem.run(GetParam(), 2, {0});
      for (int32_t i = 0; i < 4; ++i) {
        const std::vector<int32_t> query_start = {i, i + 1}, context_lens = {context + i};
        const std::vector<float> alone =
            problem.run(GetParam(), 2, {0},
                        {query_start, context_lens, problem.block_tables, problem.max_pages});
        constexpr int64_t kStride = int64_t{3} * 64;
        const int64_t at = i * kStride;
        ASSERT_TRUE(std::equal(window.data() + at, window.data() + at + kStride, alone.data() + at))
            << "context " << context << " row " << i;
      }
    }
  }
}

TEST_P(AbsorbedAttention, KeysBeforeTheFirstAreHidden) {
  for (const int32_t first : {1, 2, 70}) {
    Problem problem(
        {3, 64, 16, CacheFormat::kF32, DType::kF32, DType::kF32, {2, 1, 5}, {70, 300, 90}});
    problem.first_key = first;
    for (int64_t token = 0; token < first; ++token) {  // poison: NaN in float32
      const LatentPages pages = problem.cache.layer(0);
      for (int32_t s = 0; s < 3; ++s) {
        const int32_t page = problem.block_tables[int64_t{s} * problem.max_pages + token / 64];
        std::memset(pages.row(page, token % 64), 0xFF,
                    static_cast<size_t>(pages.layout.row_bytes()));
      }
    }
    const std::vector<float> out = problem.run(GetParam(), 2, problem.all_sequences());
    for (int64_t s = 0; s < 3; ++s) {
      for (int64_t i = 0; i < problem.shape.queries[s]; ++i) {
        const std::vector<double> expected = problem.expected(s, i, 1);
        const int64_t row = (problem.query_start[s] + i) * 3 + 1;
        for (int64_t d = 0; d < 64; ++d) ASSERT_NEAR(out[row * 64 + d], expected[d], 4e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, AbsorbedAttention, testing::ValuesIn(runnable_levels()),
                         [](const auto& level) { return std::string(name_of(level.param)); });

TEST(AbsorbedPlan, PartsCoverEveryLengthAndStayWithinTheLimit) {
  for (int64_t length = 1; length < 200'000; length += 1 + length / 7) {
    const cpu::KeySplit split = cpu::split_keys(length);
    EXPECT_GE(split.splits * split.keys, length);
    EXPECT_LT((split.splits - 1) * split.keys, length);
    EXPECT_LE(split.splits, cpu::kMaxSplits);
  }
}

}  // namespace
}  // namespace fathom
