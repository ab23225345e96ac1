// Expert-parallel ranks as threads against one rank: every golden checkpoint and the bundled model,
// over lanes of one rank and of several, with lanes that have nothing to do, redundant copies, and
// placements of any kind, in one process and over nodes (threads that are joined over loopback).
// With tp 1 logits and caches have the bits of one rank; with more, bits do not depend on the
// experts' placement, and logits are within 2^-7 of one rank's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "comm/node_threads.h"
#include "e2e/golden.h"
#include "model/rank_team.h"

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

// What a run leaves behind, by sequence; of several nodes, where its lane's first rank is.
struct Outcome {
  std::vector<std::vector<float>> logits;          // [sequences] of every position
  std::vector<std::vector<std::byte>> cache_rows;  // [sequences] its pages
  bool operator==(const Outcome&) const = default;
};

// All ranks of a placement, or those of a node, with their caches. The lanes have the sequences in
// turns.
class Ranks {
 public:
  Ranks(const Checkpoint& checkpoint, const Placement& placement, const Form& form,
        std::shared_ptr<const ExpertTable> table, World* world = nullptr)
      : placement_(placement), vocab_(checkpoint.config().vocab_size) {
    auto team = RankTeam::load(
        checkpoint, {.placement = placement,
                     .model = {.compute = form.compute, .max_rows = 256, .attention = {}},
                     .cache_format = form.cache,
                     .num_pages = kPages,
                     .num_threads = placement.world(),
                     .load = {.show_progress = false},
                     .group = {},
                     .world = world,
                     .expert_table = std::move(table)});
    FATHOM_CHECK(team.has_value(), "{}", team.error().message);
    team_ = std::move(*team);
  }

  RankTeam& team() { return *team_; }

  // Runs the sequences in chunks of different lengths, with the logits of every position.
  Outcome run() {
    for (int rank = 0; rank < placement_.world(); ++rank) {
      for (int32_t page = 0; page < kPages && team_->has_rank(rank); ++page) {
        std::memset(team_->cache(rank).page(page), 0xFF, page_bytes());
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
      if (!is_here(s)) continue;
      for (int32_t page = 0; page < kMostPages; ++page) {
        const std::byte* from = team_->cache(first_rank_of(s)).page(page_of(s, page));
        rows.insert(rows.end(), from, from + page_bytes());
      }
    }
    return outcome;
  }

  // Tokens that the ranks routed in the last step.
  int64_t routed() const {
    int64_t sum = 0;
    for (int rank = 0; rank < team_->size(); ++rank) {
      for (const int32_t count : team_->expert_counts(rank)) sum += count;
    }
    return sum;
  }
  int64_t last_rows() const { return last_rows_; }
  bool is_here(size_t sequence) const { return team_->has_rank(first_rank_of(sequence)); }

 private:
  size_t lane_of(size_t sequence) const { return sequence % static_cast<size_t>(placement_.dp); }
  int first_rank_of(size_t sequence) const {
    return placement_.rank_of(static_cast<int>(lane_of(sequence)), 0);
  }
  size_t page_bytes() const {
    int first = 0;
    while (!team_->has_rank(first)) ++first;
    const LatentCache& cache = team_->cache(first);
    return static_cast<size_t>(cache.num_layers() * cache.layout().page_bytes());
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
    for (ForwardBatch& batch : batches) {
      batch.logit_rows.resize(batch.token_ids.size());
      std::iota(batch.logit_rows.begin(), batch.logit_rows.end(), 0);
    }
    const auto samples = [&](size_t lane) {
      return team_->has_rank(placement_.rank_of(static_cast<int>(lane), 0));
    };
    int64_t rows_here = 0;
    for (size_t lane = 0; lane < batches.size(); ++lane) {
      if (samples(lane)) rows_here += batches[lane].num_rows();
    }
    std::vector<float> logits(static_cast<size_t>(rows_here * vocab_), NAN);
    const auto ran = team_->forward(batches, TensorView(logits.data(), {rows_here, vocab_}));
    FATHOM_CHECK(ran.has_value(), "{}", ran.error().message);
    const float* of_lane = logits.data();
    for (size_t lane = 0; lane < batches.size(); ++lane) {
      if (!samples(lane)) continue;
      for (size_t m = 0; m < members[lane].size(); ++m) {
        auto& all = outcome.logits[members[lane][m]];
        all.insert(all.end(), of_lane + batches[lane].query_start[m] * vocab_,
                   of_lane + batches[lane].query_start[m + 1] * vocab_);
      }
      of_lane += batches[lane].num_rows() * vocab_;
    }
  }

  const Placement placement_;
  const int64_t vocab_;
  int64_t last_rows_ = 0;
  std::unique_ptr<RankTeam> team_;
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
      Ranks team(*checkpoint, placement, form, contiguous(config, ranks, 0));
      const Outcome outcome = team.run();
      EXPECT_TRUE(outcome.logits == expected.logits);
      EXPECT_TRUE(outcome.cache_rows == expected.cache_rows);
      EXPECT_EQ(team.routed(),
                team.last_rows() * config.experts_per_token * num_moe_layers(config, false));
      // Experts move and get copies, and the answers stay.
      ASSERT_TRUE(team.team().place_experts(scattered(config, ranks, 3)));
      EXPECT_TRUE(team.run() == expected) << "moved";
      ASSERT_TRUE(team.team().place_experts(contiguous(config, ranks, 3)));
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

// Runs the sequences on nodes with so many ranks, three times: as `table` says, and after all nodes
// have placed experts elsewhere, whose weights they read again where none of their ranks has them.
std::vector<Outcome> run_on_nodes(const Checkpoint& checkpoint, const Placement& placement,
                                  const Form& form, const std::vector<int>& ranks_of_node) {
  const ModelConfig& config = checkpoint.config();
  const int ranks = placement.world();
  std::vector<Outcome> whole(3);
  for (Outcome& outcome : whole) {
    outcome.logits.resize(kSequences);
    outcome.cache_rows.resize(kSequences);
  }
  std::mutex mutex;
  const TestListener listener;
  std::vector<std::thread> nodes;
  for (size_t node = 0; node < ranks_of_node.size(); ++node) {
    nodes.emplace_back([&, node] {
      AbortWord abort_word;
      const auto world = join(test_join_options(listener, static_cast<int>(ranks_of_node.size()),
                                                static_cast<int>(node), ranks_of_node[node]),
                              abort_word);
      FATHOM_CHECK(world.has_value(), "{}", world.error().message);
      Ranks here(checkpoint, placement, form, contiguous(config, ranks, 0), world->get());
      for (size_t turn = 0; turn < whole.size(); ++turn) {
        if (turn > 0) {
          const auto moved = here.team().place_experts(turn == 1 ? scattered(config, ranks, 3)
                                                                 : contiguous(config, ranks, 3));
          FATHOM_CHECK(moved.has_value(), "{}", moved.error().message);
        }
        Outcome part = here.run();
        const std::lock_guard lock(mutex);
        for (size_t s = 0; s < kSequences; ++s) {
          if (!here.is_here(s)) continue;
          whole[turn].logits[s] = std::move(part.logits[s]);
          whole[turn].cache_rows[s] = std::move(part.cache_rows[s]);
        }
      }
    });
  }
  for (std::thread& node : nodes) node.join();
  return whole;
}

class ExpertNodes : public testing::TestWithParam<std::string> {};

TEST_P(ExpertNodes, HaveTheBitsOfOneProcess) {
  const auto checkpoint = open(GetParam());
  const ModelConfig& config = checkpoint->config();
  struct Case {
    Placement placement;
    std::vector<int> ranks_of_node;
  };
  const Case cases[] = {{{.dp = 2, .expert_parallel = true}, {1, 1}},
                        {{.dp = 4, .expert_parallel = true}, {1, 1, 1, 1}},
                        {{.dp = 3, .expert_parallel = true}, {2, 1}},
                        {{.tp = 2, .expert_parallel = true}, {1, 1}},
                        {{.tp = 2, .dp = 2, .expert_parallel = true}, {2, 2}},
                        {{.tp = 2, .dp = 2, .expert_parallel = true}, {1, 2, 1}},
                        {{.tp = 2, .dp = 2, .expert_parallel = true}, {1, 1, 1, 1}}};
  std::map<int, Outcome> of_one;  // process, by tp
  for (const Case& one : cases) {
    if (!check_placement(one.placement, config)) continue;
    SCOPED_TRACE(testing::Message() << "tp " << one.placement.tp << ", dp " << one.placement.dp
                                    << ", " << one.ranks_of_node.size() << " nodes");
    const int tp = one.placement.tp;
    if (!of_one.contains(tp)) {
      const Placement alone = {.tp = tp, .expert_parallel = true};
      of_one[tp] =
          Ranks(*checkpoint, alone, {}, tp == 1 ? nullptr : contiguous(config, tp, 0)).run();
    }
    for (const Outcome& outcome : run_on_nodes(*checkpoint, one.placement, {}, one.ranks_of_node)) {
      EXPECT_TRUE(outcome.logits == of_one[tp].logits);
      EXPECT_TRUE(outcome.cache_rows == of_one[tp].cache_rows);
    }
  }
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
INSTANTIATE_TEST_SUITE_P(Goldens, ExpertNodes,
                         testing::Values("fathom-tiny", "kimi", "odd", "v2_fp8_tensor", "v2_group",
                                         "v2lite", "v2_ct_channel", "v3", "v3_fp8", "v3_fp8_e8m0",
                                         "v3_fp8_ue8m0", "v3_yarn"),
                         name_of_model);
// Those whose heads can be split.
INSTANTIATE_TEST_SUITE_P(Goldens, TensorParallelExperts,
                         testing::Values("fathom-tiny", "kimi", "odd", "v2_fp8_tensor", "v2_group",
                                         "v2lite", "v2_ct_channel", "v3", "v3_fp8", "v3_yarn"),
                         name_of_model);

// A rank that fails in dispatch or combine ends the step of all ranks, those without tokens too.
TEST(ExpertParallelRanks, ARankThatFailsEndsTheStep) {
  const auto checkpoint = open("v3");
  const ModelConfig& config = checkpoint->config();
  for (const Collective failing : {Collective::kDispatch, Collective::kCombine}) {
    for (const int failing_rank : {0, 2}) {
      GroupOptions group;
      group.at_meeting = [=](const MeetingPoint& at) {
        if (at.rank == failing_rank && at.kind == failing) throw std::runtime_error("planted");
      };
      const auto team =
          RankTeam::load(*checkpoint, {.placement = {.dp = 3, .expert_parallel = true},
                                       .model = {.attention = {}},
                                       .num_pages = 1,
                                       .num_threads = 3,
                                       .load = {.show_progress = false},
                                       .group = group,
                                       .expert_table = contiguous(config, 3, 0)});
      ASSERT_TRUE(team) << team.error().message;
      std::vector<ForwardBatch> batches(3);
      ForwardBatch& batch = batches[1];
      batch.token_ids = {5};
      batch.positions = batch.context_lens = batch.block_tables = batch.logit_rows = {0};
      batch.query_start = {0, 1};
      batch.prompt_lens = {1};
      batch.max_pages = 1;
      std::vector<float> logits(static_cast<size_t>(config.vocab_size));
      for (int attempt = 0; attempt < 2; ++attempt) {
        const auto ran =
            (*team)->forward(batches, TensorView(logits.data(), {1, config.vocab_size}));
        ASSERT_FALSE(ran);
        EXPECT_NE(ran.error().message.find("planted"), std::string::npos) << ran.error().message;
      }
      EXPECT_TRUE((*team)->has_failed());
    }
  }
}

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
