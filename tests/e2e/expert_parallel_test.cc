// Expert-parallel ranks as threads against one rank: every golden checkpoint and the bundled model,
// over lanes of one rank and of several, with lanes that have nothing to do, redundant copies, and
// placements of any kind. With tp 1 logits and caches have the bits of one rank; with more, bits do
// not depend on the experts' placement, and logits are within 2^-7 of one rank's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "comm/rank_threads.h"
#include "e2e/golden.h"
#include "model/deepseek.h"

namespace fathom {
namespace {

constexpr int64_t kPages = 24;
constexpr int32_t kMostPages = 3;  // of a sequence
constexpr int32_t kLengths[] = {150, 70, 9, 33};
constexpr size_t kSequences = std::size(kLengths);

int32_t page_of(size_t sequence, int32_t i) { return static_cast<int32_t>(sequence) + 7 * i; }

struct Form {
  DType compute = DType::kF32;
  CacheFormat cache = CacheFormat::kF32;
};

// What a run leaves behind, by sequence.
struct Outcome {
  std::vector<std::vector<float>> logits;          // [sequences] of every position
  std::vector<std::vector<std::byte>> cache_rows;  // [sequences] its pages
  bool operator==(const Outcome&) const = default;
};

// All ranks of a placement, with their caches. The first lanes have the sequences, in turns.
class Ranks {
 public:
  Ranks(const Checkpoint& checkpoint, const Placement& placement, const Form& form,
        std::shared_ptr<const ExpertTable> table)
      : placement_(placement), vocab_(checkpoint.config().vocab_size) {
    const ModelConfig& config = checkpoint.config();
    std::vector<ModelSpec> specs;
    for (int rank = 0; rank < placement.world(); ++rank) {
      specs.push_back(make_spec(config, placement, rank, table));
    }
    auto weights = load_weights(checkpoint, specs, form.compute, {.show_progress = false});
    FATHOM_CHECK(weights.has_value(), "{}", weights.error().message);
    world_ = make_local_groups(placement.world(), abort_word_, {});
    for (int lane = 0; lane < placement.dp; ++lane) {
      GroupOptions options;
      options.name = fmt::format("tp {}", lane);
      for (int i = 0; i < placement.tp; ++i) options.world_ranks.push_back(lane * placement.tp + i);
      for (auto& group : make_local_groups(placement.tp, abort_word_, options)) {
        lanes_.push_back(std::move(group));
      }
    }
    for (size_t rank = 0; rank < specs.size(); ++rank) {
      pools_.push_back(std::make_unique<ThreadPool>(1));
      auto model = DeepSeekModel::create(
          specs[rank], std::move((*weights)[rank]),
          {.compute = form.compute, .max_rows = 256, .attention = {}}, Stream(*pools_.back()),
          {.lane = lanes_[rank].get(), .world = world_[rank].get()});
      models_.push_back(std::move(*model));
      caches_.push_back(*LatentCache::allocate(
          {form.cache, config.kv_lora_rank, config.qk_rope_dim}, config.num_layers, kPages));
    }
  }

  // `table`'s experts from now on; weights are shared with the ranks that have them.
  void place(std::shared_ptr<const ExpertTable> before, std::shared_ptr<const ExpertTable> table) {
    std::vector<std::vector<std::vector<MlpWeights>>> slots(models_.size());
    for (int64_t layer = 0; layer < table->num_layers(); ++layer) {
      for (size_t rank = 0; rank < models_.size(); ++rank) {
        auto& of_layer = slots[rank].emplace_back();
        for (const int32_t expert : table->experts_of(layer, static_cast<int>(rank))) {
          const ExpertCopy held = before->copies_of(layer, expert).back();
          const MlpWeights& weights = models_[static_cast<size_t>(held.rank)]->expert_slots(
              layer)[static_cast<size_t>(held.slot)];
          of_layer.push_back({weights.gate_up.share(), weights.down.share()});
        }
      }
    }
    for (size_t rank = 0; rank < models_.size(); ++rank) {
      models_[rank]->place_experts(table, std::move(slots[rank]));
    }
  }

  // Runs the sequences in chunks of different lengths, with the logits of every position.
  Outcome run() {
    for (const LatentCache& cache : caches_) {
      for (int32_t page = 0; page < kPages; ++page) {
        std::memset(cache.page(page), 0xFF, page_bytes());
      }
    }
    std::mt19937 random(5);
    std::vector<std::vector<int32_t>> ids(kSequences);
    for (size_t s = 0; s < kSequences; ++s) {
      for (int32_t i = 0; i < kLengths[s]; ++i) {
        ids[s].push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_)));
      }
    }
    std::vector<int32_t> done(kSequences, 0);
    Outcome outcome;
    outcome.logits.resize(kSequences);
    while (!std::equal(done.begin(), done.end(), kLengths)) {
      std::vector<int32_t> take(kSequences);
      for (size_t s = 0; s < kSequences; ++s) {
        take[s] = std::min(kLengths[s] - done[s], 1 + static_cast<int32_t>(random() % 60));
      }
      step(ids, done, take, outcome);
      for (size_t s = 0; s < kSequences; ++s) done[s] += take[s];
    }
    for (size_t s = 0; s < kSequences; ++s) {
      auto& rows = outcome.cache_rows.emplace_back();
      for (int32_t page = 0; page < kMostPages; ++page) {
        const std::byte* from = caches_[first_rank_of(s)].page(page_of(s, page));
        rows.insert(rows.end(), from, from + page_bytes());
      }
    }
    return outcome;
  }

  // Tokens that the ranks routed in the last step.
  int64_t routed() const {
    int64_t sum = 0;
    for (const auto& model : models_) {
      for (const int32_t count : model->expert_counts()) sum += count;
    }
    return sum;
  }
  int64_t last_rows() const { return last_rows_; }

 private:
  size_t lane_of(size_t sequence) const { return sequence % static_cast<size_t>(placement_.dp); }
  size_t first_rank_of(size_t sequence) const {
    return lane_of(sequence) * static_cast<size_t>(placement_.tp);
  }
  size_t page_bytes() const {
    return static_cast<size_t>(caches_[0].num_layers() * caches_[0].layout().page_bytes());
  }

  void step(const std::vector<std::vector<int32_t>>& ids, const std::vector<int32_t>& done,
            const std::vector<int32_t>& take, Outcome& outcome) {
    std::vector<ForwardBatch> batches(static_cast<size_t>(placement_.dp));
    std::vector<std::vector<size_t>> members(batches.size());
    for (ForwardBatch& batch : batches) {
      batch.max_pages = kMostPages;
      batch.query_start = {0};
    }
    last_rows_ = 0;
    for (size_t s = 0; s < kSequences; ++s) {
      if (take[s] == 0) continue;
      ForwardBatch& batch = batches[lane_of(s)];
      members[lane_of(s)].push_back(s);
      for (int32_t i = 0; i < take[s]; ++i) {
        batch.token_ids.push_back(ids[s][static_cast<size_t>(done[s] + i)]);
        batch.positions.push_back(done[s] + i);
      }
      batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
      batch.context_lens.push_back(done[s]);
      batch.prompt_lens.push_back(kLengths[s]);
      for (int32_t page = 0; page < kMostPages; ++page) {
        batch.block_tables.push_back(page_of(s, page));
      }
      last_rows_ += take[s];
    }
    std::vector<std::vector<float>> logits(batches.size());
    for (size_t lane = 0; lane < batches.size(); ++lane) {
      batches[lane].logit_rows.resize(batches[lane].token_ids.size());
      std::iota(batches[lane].logit_rows.begin(), batches[lane].logit_rows.end(), 0);
      logits[lane].resize(batches[lane].token_ids.size() * static_cast<size_t>(vocab_), NAN);
    }
    const auto ends = run_ranks(world_, abort_word_, [&](Group& group) {
      const auto rank = static_cast<size_t>(group.rank());
      const auto lane = static_cast<size_t>(placement_.lane_of(group.rank()));
      const ForwardBatch& batch = batches[lane];
      const bool first = placement_.tp_rank_of(group.rank()) == 0;
      models_[rank]->forward(
          batch, caches_[rank],
          first ? TensorView(logits[lane].data(), {batch.num_rows(), vocab_}) : TensorView());
    });
    for (const RankEnd& end : ends) FATHOM_CHECK(end.returned, "{}", end.what);
    for (size_t lane = 0; lane < batches.size(); ++lane) {
      for (size_t m = 0; m < members[lane].size(); ++m) {
        auto& all = outcome.logits[members[lane][m]];
        const auto* const rows = logits[lane].data();
        all.insert(all.end(), rows + batches[lane].query_start[m] * vocab_,
                   rows + batches[lane].query_start[m + 1] * vocab_);
      }
    }
  }

  const Placement placement_;
  const int64_t vocab_;
  int64_t last_rows_ = 0;
  AbortWord abort_word_;
  std::vector<std::unique_ptr<Group>> world_, lanes_;
  std::vector<std::unique_ptr<ThreadPool>> pools_;
  std::vector<std::unique_ptr<DeepSeekModel>> models_;
  std::vector<LatentCache> caches_;
};

std::shared_ptr<const ExpertTable> contiguous(const ModelConfig& config, int ranks,
                                              int64_t redundant) {
  return std::make_shared<const ExpertTable>(
      ExpertTable::contiguous(num_moe_layers(config, false), config.num_experts, ranks, redundant));
}

// Experts anywhere, some with several copies, other ones in each layer.
std::shared_ptr<const ExpertTable> scattered(const ModelConfig& config, int ranks, uint32_t seed) {
  std::mt19937 random(seed);
  ExpertLists lists(static_cast<size_t>(num_moe_layers(config, false)),
                    RankLists(static_cast<size_t>(ranks)));
  for (RankLists& layer : lists) {
    std::vector<int32_t> experts(static_cast<size_t>(config.num_experts));
    std::iota(experts.begin(), experts.end(), 0);
    std::shuffle(experts.begin(), experts.end(), random);
    for (const int32_t expert : experts) {
      for (uint32_t copies = 1 + random() % 3; copies > 0; --copies) {
        layer[random() % layer.size()].push_back(expert);
      }
    }
  }
  return std::make_shared<const ExpertTable>(
      *ExpertTable::create(config.num_experts, ranks, lists, ""));
}

std::unique_ptr<Checkpoint> open(const std::string& name) {
  auto checkpoint =
      Checkpoint::open(name == "fathom-tiny" ? bundled_model() : goldens_directory() + name);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  return std::make_unique<Checkpoint>(std::move(*checkpoint));
}

// Rows that are further from one rank's than 2^-7 of its largest logit.
int64_t count_far(const std::vector<float>& actual, const std::vector<float>& expected,
                  int64_t vocab) {
  int64_t far = 0;
  for (size_t at = 0; at < expected.size(); at += static_cast<size_t>(vocab)) {
    float largest = 0, off = 0;
    for (size_t i = at; i < at + static_cast<size_t>(vocab); ++i) {
      largest = std::max(largest, std::abs(expected[i]));
      off = std::max(off, std::isfinite(actual[i]) ? std::abs(expected[i] - actual[i]) : INFINITY);
    }
    far += !(off <= largest / 128);
  }
  return far;
}

class ExpertParallel : public testing::TestWithParam<std::string> {};

TEST_P(ExpertParallel, HasTheBitsOfOneRank) {
  const auto checkpoint = open(GetParam());
  const ModelConfig& config = checkpoint->config();
  std::vector<Form> forms = {{DType::kBF16, CacheFormat::kBF16}};
  // The bundled model is larger than all others together.
  if (GetParam() != "fathom-tiny") forms.push_back({DType::kF32, CacheFormat::kF32});
  if (config.kv_lora_rank % 128 == 0) forms.push_back({DType::kBF16, CacheFormat::kFp8Scaled});
  for (const Form& form : forms) {
    const Outcome expected = Ranks(*checkpoint, {}, form, nullptr).run();
    for (const int ranks : {2, 3, 4, 8}) {
      SCOPED_TRACE(testing::Message()
                   << ranks << " ranks, cache format " << static_cast<int>(form.cache));
      const Placement placement = {.dp = ranks, .expert_parallel = true};
      ASSERT_TRUE(check_placement(placement, config));
      const auto first = contiguous(config, ranks, 0);
      Ranks team(*checkpoint, placement, form, first);
      const Outcome outcome = team.run();
      EXPECT_TRUE(outcome.logits == expected.logits);
      EXPECT_TRUE(outcome.cache_rows == expected.cache_rows);
      EXPECT_EQ(team.routed(),
                team.last_rows() * config.experts_per_token * num_moe_layers(config, false));
      // Experts move and get copies, and the answers stay.
      const auto second = scattered(config, ranks, 3);
      team.place(first, second);
      EXPECT_TRUE(team.run() == expected) << "moved";
      team.place(second, contiguous(config, ranks, 3));
      EXPECT_TRUE(team.run() == expected) << "moved again";
    }
  }
}

class TensorParallelExperts : public testing::TestWithParam<std::string> {};

TEST_P(TensorParallelExperts, DoNotDependOnTheirPlacement) {
  const auto checkpoint = open(GetParam());
  const ModelConfig& config = checkpoint->config();
  const Outcome one = Ranks(*checkpoint, {}, {}, nullptr).run();
  int tried = 0;
  for (const int tp : {2, 3, 4}) {
    if (!check_placement({.tp = tp}, config)) continue;
    ++tried;
    SCOPED_TRACE(testing::Message() << "tp " << tp);
    std::optional<Outcome> expected;
    for (const int dp : {1, 2}) {
      if (dp * tp > 6) continue;
      const Placement placement = {.tp = tp, .dp = dp, .expert_parallel = true};
      const int ranks = placement.world();
      for (const auto& table : {contiguous(config, ranks, 0), scattered(config, ranks, 8)}) {
        const Outcome outcome = Ranks(*checkpoint, placement, {}, table).run();
        if (!expected) expected = outcome;
        EXPECT_TRUE(outcome == *expected) << "dp " << dp;
      }
    }
    for (size_t s = 0; s < kSequences; ++s) {
      EXPECT_EQ(count_far(expected->logits[s], one.logits[s], config.vocab_size), 0) << s;
    }
  }
  EXPECT_GT(tried, 0);
}

std::string name_of_model(const testing::TestParamInfo<std::string>& model) {
  std::string name = model.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Goldens, ExpertParallel,
                         testing::Values("fathom-tiny", "kimi", "odd", "v2_fp8_tensor", "v2_group",
                                         "v2lite", "v2_ct_channel", "v3", "v3_fp8", "v3_fp8_e8m0",
                                         "v3_fp8_ue8m0", "v3_yarn"),
                         name_of_model);
// Those whose heads can be split.
INSTANTIATE_TEST_SUITE_P(Goldens, TensorParallelExperts,
                         testing::Values("fathom-tiny", "kimi", "odd", "v2_fp8_tensor", "v2_group",
                                         "v2lite", "v2_ct_channel", "v3", "v3_fp8", "v3_yarn"),
                         name_of_model);

// What ranks of a process hold alike is in memory once: copies of an expert, shared experts, and
// what data-parallel lanes do not split.
TEST(ExpertParallelWeights, AreInAProcessOnce) {
  const auto checkpoint = open("v3");
  const ModelConfig& config = checkpoint->config();
  const auto table = contiguous(config, 3, 6);
  std::vector<ModelSpec> specs;
  for (int rank = 0; rank < 3; ++rank) {
    specs.push_back(make_spec(config, {.dp = 3, .expert_parallel = true}, rank, table));
  }
  const auto weights = load_weights(*checkpoint, specs, DType::kBF16, {.show_progress = false});
  ASSERT_TRUE(weights) << weights.error().message;
  const auto moe_of = [&](int rank) -> const MoeWeights& {
    return *(*weights)[static_cast<size_t>(rank)].layers.back().moe;
  };
  std::map<int32_t, const std::byte*> gate_up, down;
  size_t slots = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const auto experts = table->experts_of(0, rank);
    ASSERT_EQ(moe_of(rank).experts.size(), experts.size());
    slots += experts.size();
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      const MlpWeights& held = moe_of(rank).experts[slot];
      EXPECT_EQ(gate_up.emplace(experts[slot], held.gate_up.data()).first->second,
                held.gate_up.data());
      EXPECT_EQ(down.emplace(experts[slot], held.down.data()).first->second, held.down.data());
    }
    EXPECT_EQ(moe_of(rank).shared->gate_up.data(), moe_of(0).shared->gate_up.data());
    EXPECT_EQ(moe_of(rank).gate.data(), moe_of(0).gate.data());
    EXPECT_EQ(moe_of(rank).shared->down.cols(), config.moe_intermediate);
  }
  EXPECT_EQ(slots, static_cast<size_t>(config.num_experts + 6));
  EXPECT_EQ(gate_up.size(), static_cast<size_t>(config.num_experts));
}

}  // namespace
}  // namespace fathom
