// One token, and two, through the MoE layers in one launch: four layers of one TP8 rank of
// DeepSeek-V3 (hidden 7168, 16 heads, 256 experts of 256 columns) in FP8 and of DeepSeek-V2-Lite in
// bf16 and in FP8, with random weights, against float64 and against the launches for each
// operation. Run from the repository's root.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cache/latent_layout.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/device_array.h"
#include "e2e/float64_model.h"
#include "e2e/test_configs.h"
#include "model/deepseek_cuda.h"
#include "model/model_bench_cuda.h"

namespace fathom {
namespace {

constexpr int64_t kPages = 64, kTokens = kPages * kPageSize;

struct Token {
  int32_t id = 0, position = 0;
  int32_t sequence = 0;  // of two, in order; neighbours of one follow one another
};

// A model with a cache of one sequence, or of two of half as many tokens.
class OnGpu {
 public:
  OnGpu(const Checkpoint& checkpoint, CacheFormat format, bool by_operations)
      : row_{format, checkpoint.config().kv_lora_rank, checkpoint.config().qk_rope_dim},
        // Unwritten rows hold another sequence's data.
        cache_(cuda::random_cache(row_, kPages * checkpoint.config().num_layers)) {
    auto model = cuda::DeepSeekModel::load(checkpoint,
                                           {.max_rows = 16,
                                            .max_logit_rows = 16,
                                            .most_keys = cuda::MhaPrefillTile::kKeys,
                                            .batch_invariant = by_operations},
                                           {.show_progress = false});
    FATHOM_CHECK(model.has_value(), "{}", model.error().message);
    model_ = std::move(*model);
  }

  // The place of a token's rows in a layer's cache: pages are in reverse order.
  static int64_t row_of(const Token& token) {
    return page_of(token.sequence, token.position / kPageSize) * kPageSize +
           token.position % kPageSize;
  }

  std::vector<float> logits(int32_t id, int32_t position) {
    return logits(std::vector<Token>{{.id = id, .position = position}});
  }
  // Logits of a step of these tokens, one after another. The step's launches are in launches().
  std::vector<float> logits(const std::vector<Token>& tokens) {
    const ModelConfig& config = model_->config();
    ForwardBatch batch;
    batch.query_start = {0};
    batch.max_pages = static_cast<int32_t>(kPages);
    for (const Token& token : tokens) {
      if (std::ssize(batch.context_lens) == token.sequence) {
        batch.context_lens.push_back(token.position);
        batch.query_start.push_back(batch.query_start.back());
        for (int64_t page = 0; page < kPages; ++page) {
          const bool is_there = token.sequence * kHalf + page < kPages;
          batch.block_tables.push_back(
              is_there ? static_cast<int32_t>(page_of(token.sequence, page)) : -1);
        }
      }
      ++batch.query_start.back();
      batch.logit_rows.push_back(static_cast<int32_t>(batch.token_ids.size()));
      batch.token_ids.push_back(token.id);
      batch.positions.push_back(token.position);
    }
    cuda::StepPlanner planner(
        {.heads = config.num_heads,
         .num_multiprocessors = model_->num_multiprocessors(),
         .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim},
         .policy = {.form = AttentionForm::kAbsorbed},
         .most_keys = cuda::MhaPrefillTile::kKeys});
    cuda::StepLayout layout;
    const auto rows = static_cast<int64_t>(tokens.size());
    planner.plan(batch, rows, layout);
    const cuda::DeviceArray<std::byte> arrays(layout.memory);
    const cuda::DeviceArray<int32_t> sampled(std::vector<int32_t>{0});
    std::vector<float> all(static_cast<size_t>(rows * model_->logits_stride()));
    cuda::check(cudaMemset(model_->logits(), 0xFF, all.size() * sizeof(float)), "poisoning");
    const cuda::CoResidentLog log;
    model_->forward(layout, arrays.data(), sampled.data(),
                    {row_.format, cache_.data(), kPages, kPages * row_.page_bytes()}, nullptr);
    launches_ = log.text();
    cuda::check(cudaMemcpy(all.data(), model_->logits(), all.size() * sizeof(float),
                           cudaMemcpyDeviceToHost),
                "copying logits");
    std::vector<float> logits;
    for (int64_t row = 0; row < rows; ++row) {
      const auto begin = all.begin() + row * model_->logits_stride();
      logits.insert(logits.end(), begin, begin + config.vocab_size);
    }
    return logits;
  }

  std::vector<std::byte> cache() const { return cache_.to_host(); }
  const LatentLayout& row() const { return row_; }
  // Maximum rows of a step that takes one launch.
  int64_t most_rows() const { return model_->most_rows_of_one_launch(); }
  int32_t most_keys(int64_t rows) const {
    return static_cast<int32_t>(model_->most_keys_of_one_launch(rows, row_.format));
  }
  bool took_one_launch() const { return launches_.find("decode_layers") != std::string::npos; }

 private:
  static constexpr int64_t kHalf = kPages / 2;
  static int64_t page_of(int64_t sequence, int64_t page) {
    return kPages - 1 - sequence * kHalf - page;
  }

  const LatentLayout row_;
  const cuda::DeviceArray<std::byte> cache_;
  std::unique_ptr<cuda::DeepSeekModel> model_;
  std::string launches_;
};

double cosine(const std::vector<float>& a, const double* b) {
  double both = 0, one = 0, other = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    both += a[i] * b[i];
    one += double{a[i]} * a[i];
    other += b[i] * b[i];
  }
  return both / std::sqrt(one * other);
}

struct Form {
  std::string model;
  CacheFormat format;
  // The least cosine of a token's logits to float64. V3's is low because rounding makes a router
  // with random weights select other experts for each token (docs/numerics.md), so a missing expert
  // does not show: ops/decode_layers/decode_layers_cuda_test.cc has tokens whose choice is sure.
  double least = 0;
};

class GpuDecodeLayers : public testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    auto opened = open_test_config(GetParam().model);
    ASSERT_TRUE(opened.has_value()) << opened.error().message;
    checkpoint_ = std::move(*opened);
  }
  static constexpr int32_t kTextTokens = 12;  // a multiple of each number of neighbours
  static int32_t id_of(int32_t i) { return (i * 7919 + 13) % 4000; }
  static Token token(int32_t position, int32_t sequence = 0) {
    return {id_of(position), position, sequence};
  }
  static std::vector<Token> neighbours(int32_t first, int32_t count) {
    std::vector<Token> tokens;
    for (int32_t i = 0; i < count; ++i) tokens.push_back(token(first + i));
    return tokens;
  }
  // Row `row` of logits [rows, vocab].
  std::vector<float> row_of(const std::vector<float>& logits, int64_t row) const {
    const auto begin = logits.begin() + row * checkpoint_.config().vocab_size;
    return {begin, begin + checkpoint_.config().vocab_size};
  }
  // How near logits [vocab] of the text's i-th token are.
  double cosine_to_float64(const std::vector<float>& logits, int32_t i) {
    if (text_.empty()) {
      std::vector<int32_t> ids;
      for (int32_t t = 0; t < kTextTokens; ++t) ids.push_back(id_of(t));
      text_ = Float64Model(checkpoint_).logits(ids);
    }
    return cosine(logits, text_.data() + i * checkpoint_.config().vocab_size);
  }
  static double middle_of(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
  }
  static void expect_each_near(const std::string& which, const std::vector<double>& cosines) {
    for (size_t i = 0; i < cosines.size(); ++i) {
      EXPECT_GE(cosines[i], GetParam().least) << which << ", token " << i;  // false for a NaN
    }
    std::printf("%s: cosine to float64 %.6f in the middle, %.6f at least\n", which.c_str(),
                middle_of(cosines), *std::ranges::min_element(cosines));
  }
  // Expects that the step of these tokens writes their rows in each layer, and no other byte.
  void expect_rows_of(OnGpu& model, const std::vector<Token>& tokens) const;

  Checkpoint checkpoint_;

 private:
  std::vector<double> text_;  // float64 logits [kTextTokens, vocab]
};

// The single launch does not quantize GEMV inputs, so it is nearer to float64 than the launches for
// each operation.
TEST_P(GpuDecodeLayers, AreNearFloat64) {
  OnGpu model(checkpoint_, GetParam().format, false),
      by_operations(checkpoint_, GetParam().format, true);
  std::vector<double> found, others;
  for (int32_t i = 0; i < kTextTokens; ++i) {
    found.push_back(cosine_to_float64(model.logits(id_of(i), i), i));
    others.push_back(cosine_to_float64(by_operations.logits(id_of(i), i), i));
  }
  expect_each_near("one token", found);
  EXPECT_GE(middle_of(found), middle_of(others) - 0.02);
}

void GpuDecodeLayers::expect_rows_of(OnGpu& model, const std::vector<Token>& tokens) const {
  const std::vector<std::byte> before = model.cache();
  for (const float logit : model.logits(tokens)) ASSERT_TRUE(std::isfinite(logit));
  EXPECT_TRUE(model.took_one_launch());
  const std::vector<std::byte> after = model.cache();
  std::vector<int64_t> expected, found;
  for (int64_t layer = 0; layer < checkpoint_.config().num_layers; ++layer) {
    for (const Token& token : tokens) expected.push_back(layer * kTokens + OnGpu::row_of(token));
  }
  const int64_t row_bytes = model.row().row_bytes();
  for (int64_t at = 0; at < std::ssize(after); at += row_bytes) {
    const auto first = after.begin() + at;
    if (!std::equal(first, first + row_bytes, before.begin() + at)) {
      found.push_back(at / row_bytes);
    }
  }
  std::ranges::sort(expected);
  EXPECT_EQ(found, expected) << tokens[0].position;
}

// A step writes the tokens' rows in each layer, at their positions' places in the block tables, and
// no other byte. The rows and the logits at any length are tested with the operation itself
// (ops/decode_layers/decode_layers_cuda_test.cc): here a rounding difference makes random weights
// choose other experts, and no bound per token would hold.
TEST_P(GpuDecodeLayers, WriteTheTokensRowsAlone) {
  OnGpu model(checkpoint_, GetParam().format, false);
  for (const int32_t position : {0, 1, 63, 64, 1023, 1024, 3001, 4095}) {
    expect_rows_of(model, {token(position)});
  }
}

TEST_P(GpuDecodeLayers, WriteSeveralTokensRowsAlone) {
  for (int32_t rows = 2, most_rows = 2; rows <= most_rows; ++rows) {
    OnGpu model(checkpoint_, GetParam().format, false);
    most_rows = static_cast<int32_t>(model.most_rows());
    const int32_t most =
        std::min(model.most_keys(rows), static_cast<int32_t>(kTokens / 2));  // has room for two
    // No row twice: it would get the same bytes again.
    for (const int32_t position : {0, 63, 130, 1023, most - rows}) {
      expect_rows_of(model, neighbours(position, rows));
    }
    for (const auto& [first, second] : {std::pair{10, most - 8}, {most - 20, 3}, {70, 1030}}) {
      std::vector<Token> tokens = neighbours(first, rows - 1);
      tokens.push_back(token(second, 1));
      expect_rows_of(model, tokens);
    }
  }
}

// Neighbours of one sequence, and tokens of two sequences with the same text: as near to float64 as
// one by one, and of equal tokens both have the same bits.
TEST_P(GpuDecodeLayers, SeveralTokensAreNearFloat64) {
  OnGpu neighbouring(checkpoint_, GetParam().format, false),
      sequences(checkpoint_, GetParam().format, false);
  std::vector<double> beside_other;
  for (int32_t i = 0; i < kTextTokens; ++i) {
    const std::vector<float> two = sequences.logits({token(i, 0), token(i, 1)});
    const std::vector<float> of_first = row_of(two, 0), of_second = row_of(two, 1);
    beside_other.push_back(cosine_to_float64(of_first, i));
    EXPECT_EQ(of_second, of_first) << i;
  }
  expect_each_near("beside another sequence", beside_other);
  for (int32_t rows = 2; rows <= neighbouring.most_rows(); ++rows) {
    std::vector<double> beside;
    for (int32_t i = 0; i < kTextTokens; i += rows) {
      const std::vector<float> all = neighbouring.logits(neighbours(i, rows));
      for (int32_t j = 0; j < rows; ++j) {
        beside.push_back(cosine_to_float64(row_of(all, j), i + j));
      }
    }
    expect_each_near(fmt::format("{} neighbours", rows), beside);
  }
}

TEST_P(GpuDecodeLayers, GiveTheSameBitsAgain) {
  OnGpu model(checkpoint_, GetParam().format, false);
  const std::vector<float> first = model.logits(17, 1500);
  for (int i = 0; i < 20; ++i) {
    model.logits(id_of(i), 1501 + 100 * i);
    model.logits(id_of(i), 1500);
    EXPECT_EQ(model.logits(17, 1500), first) << i;
  }
  const std::vector<Token> two = {{17, 1500}, {18, 1501}};
  const std::vector<float> of_two = model.logits(two);
  for (int i = 0; i < 20; ++i) {
    model.logits({{id_of(i), 1500, 0}, {id_of(i), 100 * i, 1}});
    model.logits(id_of(i), 1501);
    EXPECT_EQ(model.logits(two), of_two) << i;
  }
}

// Short cases for sanitizers, which are slow.
class GpuDecodeLayersShort : public testing::TestWithParam<Form> {};

TEST_P(GpuDecodeLayersShort, OneToken) {
  auto checkpoint = open_test_config(GetParam().model);
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  OnGpu model(*checkpoint, GetParam().format, false);
  for (const float logit : model.logits(17, 200)) EXPECT_TRUE(std::isfinite(logit));
}

TEST_P(GpuDecodeLayersShort, SeveralTokens) {
  auto checkpoint = open_test_config(GetParam().model);
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  OnGpu model(*checkpoint, GetParam().format, false);
  std::vector<Token> tokens = {{17, 200}};
  while (std::ssize(tokens) < model.most_rows()) {
    tokens.push_back({tokens.back().id + 1, tokens.back().position + 1});
    for (const float logit : model.logits(tokens)) EXPECT_TRUE(std::isfinite(logit));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GpuDecodeLayersShort,
                         testing::Values(Form{"v3_eighth_layers", CacheFormat::kFp8Scaled},
                                         Form{"v2_lite_layers", CacheFormat::kBF16},
                                         Form{"v2_lite_fp8_layers", CacheFormat::kBF16}));

INSTANTIATE_TEST_SUITE_P(Formats, GpuDecodeLayers,
                         testing::Values(Form{"v3_eighth_layers", CacheFormat::kFp8Scaled, 0.86},
                                         Form{"v3_eighth_layers", CacheFormat::kBF16, 0.86},
                                         Form{"v3_eighth_layers", CacheFormat::kE4M3, 0.84},
                                         Form{"v3_eighth_layers", CacheFormat::kE5M2, 0.82},
                                         Form{"v2_lite_layers", CacheFormat::kBF16, 0.9996},
                                         Form{"v2_lite_layers", CacheFormat::kFp8Scaled, 0.996},
                                         Form{"v2_lite_fp8_layers", CacheFormat::kBF16, 0.992},
                                         Form{"v2_lite_fp8_layers", CacheFormat::kE5M2, 0.978}));

}  // namespace
}  // namespace fathom
