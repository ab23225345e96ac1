// Sparse attention of whole models (DeepSeek-V3.2): the golden checkpoints with every threshold,
// cut and neighbour. goldens_test.cc compares their logits with transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "base/json.h"
#include "base/random.h"
#include "checkpoint/test_files.h"
#include "e2e/golden.h"
#include "model/rank_team.h"

namespace fathom {
namespace {

// A golden checkpoint, its prompt, and how many keys a row may attend to.
struct Sparse {
  std::string directory;
  std::vector<int32_t> ids;
  int64_t topk = 0;

  explicit Sparse(const std::string& name) : directory(goldens_directory() + name) {
    const auto golden = read_text_file(directory + "/golden.json", 1 << 24);
    const auto config = read_text_file(directory + "/config.json", 1 << 24);
    FATHOM_CHECK(golden && config, "{}", name);
    ids =
        json::value_to<std::vector<int32_t>>(parse_json(*golden, "golden.json")->at("prompt_ids"));
    topk = parse_json(*config, "config.json")->at("index_topk").to_number<int64_t>();
  }

  std::vector<int32_t> first(int64_t count) const { return {ids.begin(), ids.begin() + count}; }
};

ModelOptions float32(std::optional<int64_t> dense_keys, AttentionForm form = AttentionForm::kAuto) {
  ModelOptions options;
  options.compute = DType::kF32;
  options.attention.form = form;
  options.attention.dense_keys = dense_keys;
  return options;
}

double worst_difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    worst = difference <= worst ? worst : difference;  // NaN counts as worst
  }
  return worst;
}

class SparseModel : public testing::TestWithParam<std::string> {
 protected:
  const Sparse sparse_{GetParam()};
};

// Rows that see all keys anyway: the sparse path forced, the two dense forms, and thresholds
// between. Above index_topk they are one path, so the whole prompt agrees.
TEST_P(SparseModel, EveryThresholdGivesTheSameLogits) {
  ModelHarness usual(sparse_.directory, float32({}), CacheFormat::kF32);
  for (const int64_t length : {sparse_.topk - 1, sparse_.topk, sparse_.topk + 1,
                               static_cast<int64_t>(sparse_.ids.size())}) {
    const std::vector<TestSequence> prompt = {{sparse_.first(length), {length}}};
    const auto expected = usual.run(prompt);
    for (const int64_t dense : {int64_t{0}, int64_t{1}, sparse_.topk / 2, sparse_.topk - 1}) {
      ModelHarness forced(sparse_.directory, float32(dense), CacheFormat::kF32);
      EXPECT_LE(worst_difference(forced.run(prompt)[0], expected[0]), 2e-5)
          << length << " tokens, threshold " << dense;
    }
    for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kMha}) {
      ModelHarness other(sparse_.directory, float32({}, form), CacheFormat::kF32);
      EXPECT_LE(worst_difference(other.run(prompt)[0], expected[0]), 2e-5) << length;
    }
  }
}

// In the absorbed form the threshold changes no bit: a list of all keys is summed as no list is.
TEST_P(SparseModel, ThresholdsChangeNoBitOfTheAbsorbedForm) {
  for (const CacheFormat format : {CacheFormat::kF32, CacheFormat::kBF16}) {
    ModelOptions options = float32({}, AttentionForm::kAbsorbed);
    if (format == CacheFormat::kBF16) options.compute = DType::kBF16;
    ModelHarness usual(sparse_.directory, options, format);
    const std::vector<TestSequence> prompt = {{sparse_.ids, {13}}};
    const auto expected = usual.run(prompt);
    for (const int64_t dense : {int64_t{0}, sparse_.topk / 2}) {
      options.attention.dense_keys = dense;
      EXPECT_EQ(ModelHarness(sparse_.directory, options, format).run(prompt), expected) << dense;
    }
  }
}

// Attention to all keys is another model: what the goldens would say of it.
TEST_P(SparseModel, ChoosingKeysMattersAboveTheThreshold) {
  ModelHarness model(sparse_.directory, float32({}), CacheFormat::kF32);
  ModelHarness dense(sparse_.directory, float32(1 << 20), CacheFormat::kF32);
  const auto chosen = model.run({{sparse_.ids, {2048}}})[0];
  const auto all = dense.run({{sparse_.ids, {2048}}})[0];
  EXPECT_TRUE(std::equal(all.begin(), all.begin() + sparse_.topk * model.vocab(), chosen.begin()));
  EXPECT_GT(worst_difference(all, chosen), 0.1);
}

// Prompts cut anywhere: index keys of dense rows are there when a later row needs them.
TEST_P(SparseModel, EveryCutAgrees) {
  ModelHarness model(sparse_.directory, float32({}), CacheFormat::kF32);
  const auto expected = model.run({{sparse_.ids, {2048}}});
  const std::vector<std::vector<int64_t>> cuts = {{1},
                                                  {13},
                                                  {50},
                                                  {sparse_.topk, 1},
                                                  {sparse_.topk - 1, 1},
                                                  {sparse_.topk + 1, 1},
                                                  {sparse_.topk - 1, 2, 1},
                                                  {sparse_.topk - 2, 4, 1}};
  for (const std::vector<int64_t>& chunks : cuts) {
    EXPECT_LE(worst_difference(model.run({{sparse_.ids, chunks}})[0], expected[0]), 2e-5)
        << testing::PrintToString(chunks);
  }
}

// Short and long sequences in one batch, among them chunks that cross the threshold: each has the
// bits that it has alone, in every form of index key.
TEST_P(SparseModel, NeighboursChangeNoBit) {
  const auto all = static_cast<int64_t>(sparse_.ids.size());
  std::vector<TestSequence> sequences;
  for (int64_t s = 0; s < 7; ++s) {
    const int64_t length = std::min(all, sparse_.topk / 2 + 7 * s + (s % 2) * sparse_.topk);
    sequences.push_back({sparse_.first(length), {9 + s, 1, 12, 1 + s, 1}});
  }
  for (const IndexKeyFormat keys :
       {IndexKeyFormat::kE4M3, IndexKeyFormat::kBF16, IndexKeyFormat::kF32}) {
    ModelHarness model(sparse_.directory, ModelOptions(), CacheFormat::kBF16, 64, false, keys);
    const auto together = model.run(sequences);
    EXPECT_EQ(model.run(sequences), together);
    for (size_t s = 0; s < sequences.size(); ++s) {
      EXPECT_EQ(model.run({sequences[s]})[0], together[s]) << s;
    }
  }
}

// Scores are made in passes that hold so many bytes; the choice does not know of them.
TEST_P(SparseModel, WorksWithEveryFormOfIndexKey) {
  ModelHarness exact(sparse_.directory, float32({}), CacheFormat::kF32);
  const auto expected = exact.run({{sparse_.ids, {2048}}});
  const int64_t vocab = exact.vocab();
  for (const IndexKeyFormat keys : {IndexKeyFormat::kE4M3, IndexKeyFormat::kBF16}) {
    ModelHarness model(sparse_.directory, float32({}), CacheFormat::kF32, 64, false, keys);
    const auto logits = model.run({{sparse_.ids, {2048}}});
    // Rows below the threshold choose nothing, so the form of the keys changes no bit of them.
    EXPECT_TRUE(std::equal(logits[0].begin(), logits[0].begin() + sparse_.topk * vocab,
                           expected[0].begin()));
    // Above it keys near the limit are taken otherwise; most of the choice is the same.
    double sum = 0;
    for (size_t i = 0; i < logits[0].size(); ++i) sum += std::abs(logits[0][i] - expected[0][i]);
    EXPECT_LE(sum / static_cast<double>(logits[0].size()), 0.2) << static_cast<int>(keys);
  }
}

// One sequence on two ranks: its prompt, then a token. `damage` may change what rank 1 has before
// the second step. Returns what that step's end says; empty: it was well.
std::string decode_on_two_ranks(const std::function<void(const LatentCache& of_rank_1)>& damage) {
  const Sparse sparse("v32");
  const auto checkpoint = Checkpoint::open(sparse.directory);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  const auto team = RankTeam::load(*checkpoint, {.placement = {.tp = 2},
                                                 .model = {.compute = DType::kF32, .attention = {}},
                                                 .cache_format = CacheFormat::kF32,
                                                 .num_pages = 1,
                                                 .num_threads = 2,
                                                 .load = {.show_progress = false},
                                                 .group = {}});
  FATHOM_CHECK(team.has_value(), "{}", team.error().message);
  const auto length = static_cast<int32_t>(sparse.ids.size());
  std::vector<float> logits(static_cast<size_t>(checkpoint->config().vocab_size));
  const auto step = [&](int32_t begin, int32_t end) {
    ForwardBatch batch;
    batch.token_ids.assign(sparse.ids.begin() + begin, sparse.ids.begin() + end);
    batch.positions.resize(batch.token_ids.size());
    std::iota(batch.positions.begin(), batch.positions.end(), begin);
    batch.query_start = {0, end - begin};
    batch.context_lens = {begin};
    batch.prompt_lens = {length};
    batch.block_tables = {0};
    batch.max_pages = 1;
    batch.logit_rows = {end - begin - 1};
    return (*team)->forward({&batch, 1}, TensorView(logits.data(), {1, std::ssize(logits)}));
  };
  FATHOM_CHECK(step(0, length - 1).has_value(), "the prompt failed");
  damage((*team)->cache(1));
  const auto ran = step(length - 1, length);
  return ran ? "" : ran.error().message;
}

// Ranks that attended to different keys would add up garbage.
TEST(SparseRanks, ARankThatChoosesOtherKeysEndsTheStep) {
  EXPECT_EQ(decode_on_two_ranks([](const LatentCache&) {}), "");
  const std::string end = decode_on_two_ranks([](const LatentCache& of_rank_1) {
    const IndexKeyPages keys = of_rank_1.index_keys(0);
    for (int64_t slot = 0; slot < 40; ++slot) {  // other keys than those written, in other places
      std::memcpy(keys.row(0, slot), keys.row(0, 40 + slot % 6),
                  static_cast<size_t>(keys.layout.row_bytes()));
    }
  });
  EXPECT_NE(end.find(" with plan "), std::string::npos) << end;
}

// The published index_topk: decode with draft windows of 1 to 4 rows through 2,047, 2,048 and 2,049
// keys continues the whole pass, and so does a run in which every row chooses.
TEST(SparsePublishedTopk, WindowsGoThrough2048Keys) {
  constexpr int64_t kTokens = 2056;
  const TestFolder folder;
  const std::string golden = goldens_directory() + "v32/";
  auto config = parse_json(file_text(golden + "config.json"), "config.json")->as_object();
  config["index_topk"] = 2048;
  folder.write("config.json", json::serialize(config));
  folder.write("model.safetensors", file_text(golden + "model.safetensors"));
  std::vector<int32_t> ids;
  for (uint64_t i = 0; i < kTokens; ++i) {
    ids.push_back(static_cast<int32_t>(3 + random_bits(3, 1, i) % 150));
  }
  ModelOptions options = float32({});
  options.max_rows = kTokens;
  ModelHarness whole(folder.path(), options, CacheFormat::kF32);
  const auto expected = whole.run({{ids, {kTokens}}})[0];
  options.attention.dense_keys = 1 << 20;  // the choice of 2,048 of at most 2,056 keys matters
  ModelHarness dense(folder.path(), options, CacheFormat::kF32);
  EXPECT_GT(worst_difference(dense.run({{ids, {kTokens}}})[0], expected), 1e-3);
  options.attention.dense_keys = 0;
  ModelHarness chooses(folder.path(), options, CacheFormat::kF32);
  EXPECT_LE(worst_difference(chooses.run({{ids, {kTokens}}})[0], expected), 1e-4);
  for (int64_t window = 1; window <= 4; ++window) {
    for (const int64_t prompt : {int64_t{2046}, 2049 - window}) {
      const std::vector<TestSequence> cut = {{ids, {prompt, window}}};
      EXPECT_LE(worst_difference(whole.run(cut)[0], expected), 1e-4) << prompt << ", " << window;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, SparseModel,
                         testing::Values("v32", "v32_one", "v32_yarn", "v32_fp8", "glm_dsa",
                                         "glm_dsa_shared"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace fathom
