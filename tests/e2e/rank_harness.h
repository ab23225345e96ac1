// For tests of ranks: all ranks of a placement as threads, or those of a node, with their caches,
// that run a few sequences in chunks and say what is left behind.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "e2e/golden.h"
#include "model/rank_team.h"

namespace fathom {

inline constexpr int64_t kPages = 24;
inline constexpr int32_t kMostPages = 3;  // of a sequence
inline constexpr int kMostRanks = 16;  // of lanes of several ranks: they are threads of two cores
inline constexpr int32_t kLengths[] = {150, 70, 9, 33};
inline constexpr size_t kSequences = std::size(kLengths);

inline int32_t page_of(size_t sequence, int32_t i) {
  return static_cast<int32_t>(sequence) + 7 * i;
}

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
    return static_cast<size_t>(team_->cache(first).page_bytes());
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

inline std::shared_ptr<const ExpertTable> contiguous(const ModelConfig& config, int ranks,
                                                     int64_t redundant) {
  return std::make_shared<const ExpertTable>(
      ExpertTable::contiguous(num_moe_layers(config, false), config.num_experts, ranks, redundant));
}

// Experts anywhere, some with several copies, other ones in each layer.
inline std::shared_ptr<const ExpertTable> scattered(const ModelConfig& config, int ranks,
                                                    uint32_t seed) {
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

// The bundled model or a golden checkpoint.
inline std::unique_ptr<Checkpoint> open_golden(const std::string& name) {
  auto checkpoint =
      Checkpoint::open(name == "fathom-tiny" ? bundled_model() : goldens_directory() + name);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  return std::make_unique<Checkpoint>(std::move(*checkpoint));
}

// For INSTANTIATE_TEST_SUITE_P.
inline std::string name_of_model(const testing::TestParamInfo<std::string>& model) {
  std::string name = model.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace fathom
