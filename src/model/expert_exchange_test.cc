// Dispatch and combine against moe() on one rank, which adds a row's experts in ascending order:
// equal bits for any table, any numbers of rows on the ranks, and whichever rank comes late.
#include "model/expert_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/random.h"
#include "comm/node_threads.h"
#include "comm/rank_threads.h"
#include "ops/linear/linear_test_data.h"

namespace fathom {
namespace {

using testing::Rows;
using testing::Scales;
using testing::Source;

constexpr int64_t kHidden = 72, kIntermediate = 56, kExperts = 7, kPerToken = 3, kLayers = 2;

MlpWeights make_expert(uint64_t seed, DType stored, WeightFormat format) {
  const Scales scales = format == WeightFormat::kF8E4M3 ? Scales::kBlock : Scales::kNone;
  const Source gate(seed, kIntermediate, kHidden, stored, scales);
  const Source up(seed + 1, kIntermediate, kHidden, stored, scales);
  MlpWeights weights;
  weights.gate_up = *PackedMatrix::allocate(2 * kIntermediate, kHidden, format, "test");
  weights.gate_up.pack(kIntermediate, up.matrix);
  weights.gate_up.pack(0, gate.matrix);
  weights.down = pack(Source(seed + 2, kHidden, kIntermediate, stored, scales), format);
  return weights;
}

// The experts of all layers.
struct Model {
  explicit Model(DType stored = DType::kBF16, WeightFormat format = WeightFormat::kBF16) {
    layers.resize(kLayers);
    for (uint64_t i = 0; i < kLayers * kExperts; ++i) {
      layers[i / kExperts].push_back(make_expert(10 * i, stored, format));
    }
  }
  std::vector<MlpWeights> slots_of(const ExpertTable& table, int64_t layer, int rank) const {
    std::vector<MlpWeights> slots;
    for (const int32_t expert : table.experts_of(layer, rank)) {
      const MlpWeights& held = layers[static_cast<size_t>(layer)][static_cast<size_t>(expert)];
      slots.push_back({held.gate_up.share(), held.down.share()});
    }
    return slots;
  }
  std::vector<std::vector<MlpWeights>> layers;
};

// A rank's tokens in a layer and where they go.
struct Tokens {
  // `only`: the token's first expert; -1: any.
  Tokens(uint64_t seed, int64_t rows, int32_t only = -1) : x(seed, rows, kHidden) {
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<int32_t> all(kExperts);
      std::iota(all.begin(), all.end(), 0);
      for (size_t i = all.size() - 1; i > 0; --i) {
        const uint64_t bits = random_bits(seed, 3, static_cast<uint64_t>(row) * kExperts + i);
        std::swap(all[i], all[bits % (i + 1)]);
      }
      if (only >= 0) std::iter_swap(all.begin() + 1, std::find(all.begin(), all.end(), only));
      ids.insert(ids.end(), all.begin(), all.begin() + kPerToken);
      for (int64_t k = 0; k < kPerToken; ++k) {
        weights.push_back(0.6f + 0.5f * testing::random_value(seed, 4, row * kPerToken + k));
      }
    }
  }
  int64_t rows() const { return x.view.size(0); }
  ConstTensorView ids_view() const { return {ids.data(), {rows(), kPerToken}}; }
  ConstTensorView weights_view() const { return {weights.data(), {rows(), kPerToken}}; }

  Rows<bf16> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// What the residual holds before, and what one rank makes of it.
std::vector<float> residual_of(uint64_t seed, int64_t rows) {
  std::vector<float> values;
  for (int64_t i = 0; i < rows * kHidden; ++i) values.push_back(testing::random_value(seed, 5, i));
  return values;
}
std::vector<float> expected_of(const Model& model, int64_t layer, const Tokens& tokens,
                               uint64_t seed) {
  std::vector<float> out = residual_of(seed, tokens.rows());
  const int64_t bytes =
      moe_workspace_bytes(tokens.rows(), kHidden, kExperts, kPerToken, kIntermediate, 0);
  const Buffer workspace = *Buffer::allocate(bytes, "test");
  ThreadPool pool(1);
  moe(Stream(pool), tokens.x.view, tokens.ids_view(), tokens.weights_view(),
      model.layers[static_cast<size_t>(layer)], nullptr,
      TensorView(out.data(), {tokens.rows(), kHidden}),
      {workspace.data(), static_cast<size_t>(bytes)});
  return out;
}

// Any copies on any ranks, other ones in each layer; rank 1 of several has no slots in layer 0.
ExpertTable random_table(uint64_t seed, int ranks) {
  ExpertLists lists(kLayers, RankLists(static_cast<size_t>(ranks)));
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t expert = 0; expert < kExperts; ++expert) {
      const uint64_t copies = 1 + random_bits(seed, layer, static_cast<uint64_t>(expert)) % 3;
      for (uint64_t copy = 0; copy < copies; ++copy) {
        const uint64_t bits =
            random_bits(seed, 100 + layer, static_cast<uint64_t>(expert) * 3 + copy);
        size_t rank = bits % static_cast<uint64_t>(ranks);
        if (layer == 0 && ranks > 1 && rank == 1) rank = 0;
        lists[layer][rank].push_back(expert);
      }
    }
  }
  return *ExpertTable::create(kExperts, ranks, lists, "");
}

std::vector<ExpertTable> tables_of(int ranks) {
  std::vector<ExpertTable> tables;
  const int64_t missing = std::max<int64_t>(0, ranks - kExperts);
  tables.push_back(ExpertTable::contiguous(kLayers, kExperts, ranks, missing));
  if (ranks > 1) tables.push_back(ExpertTable::contiguous(kLayers, kExperts, ranks, 5 + missing));
  for (uint64_t seed = 1; seed <= 3; ++seed) tables.push_back(random_table(seed, ranks));
  return tables;
}

enum class Load { kRandom, kSomeRanksIdle, kOneRank, kOneExpert };
constexpr Load kLoads[] = {Load::kRandom, Load::kSomeRanksIdle, Load::kOneRank, Load::kOneExpert};

Tokens tokens_of(Load load, uint64_t seed, int rank) {
  const auto rows = static_cast<int64_t>(random_bits(seed, 1, static_cast<uint64_t>(rank)) % 20);
  const uint64_t own = seed * 100 + static_cast<uint64_t>(rank);
  switch (load) {
    case Load::kRandom:
      return {own, rows + 1};
    case Load::kSomeRanksIdle:
      return {own, rank % 2 == 0 ? 0 : rows + 1};
    case Load::kOneRank:
      return {own, rank == 0 ? 33 : 0};
    case Load::kOneExpert:
      return {own, rows + 100, 4};
  }
  return {own, 0};
}

// The layers' sums of one rank, with the outcome compared.
void expect_one_ranks_bits(Group& group, ExpertExchange& exchange, const Model& model,
                           const ExpertTable& table, Load load, uint64_t seed) {
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const Tokens tokens = tokens_of(load, seed + static_cast<uint64_t>(layer), group.rank());
    const auto slots = model.slots_of(table, layer, group.rank());
    std::vector<float> out = residual_of(seed, tokens.rows());
    exchange.add_experts(table, layer, slots, tokens.x.view, tokens.ids_view(),
                         tokens.weights_view(), TensorView(out.data(), {tokens.rows(), kHidden}));
    const std::vector<float> expected = expected_of(model, layer, tokens, seed);
    EXPECT_TRUE(out.empty() ||
                std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0)
        << "rank " << group.rank() << " of " << group.size() << ", layer " << layer << ", load "
        << static_cast<int>(load);
  }
}

void expect_all_returned(const std::vector<RankEnd>& ends) {
  for (const RankEnd& end : ends) EXPECT_TRUE(end.returned) << end.what;
}

TEST(ExpertExchange, HasTheBitsOfOneRank) {
  const Model model, fp8(DType::kF8E4M3, WeightFormat::kF8E4M3);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const std::vector<ExpertTable> tables = tables_of(ranks);
    expect_all_returned(run_ranks(ranks, [&](Group& group) {
      ThreadPool pool(1 + group.rank() % 2);
      ExpertExchange exchange(group, Stream(pool));
      uint64_t seed = 0;
      for (const ExpertTable& table : tables) {
        for (const Load load : kLoads) {
          expect_one_ranks_bits(group, exchange, model, table, load, ++seed);
          expect_one_ranks_bits(group, exchange, fp8, table, load, ++seed);
        }
      }
    }));
  }
}

// Ranks come to meetings in any order, and some are still reading when others have left.
TEST(ExpertExchange, HasTheSameBitsAThousandTimesUnderDisturbedTiming) {
  const Model model;
  constexpr int kRanks = 3;
  const ExpertTable table = random_table(9, kRanks);
  GroupOptions options;
  options.at_meeting = [](const MeetingPoint& at) {
    if (at.phase != MeetingPhase::kBefore) return;
    const uint64_t bits = random_bits(11, static_cast<uint64_t>(at.rank), at.number);
    if (bits % 4 == 0) std::this_thread::yield();
    if (bits % 4 == 1) std::this_thread::sleep_for(std::chrono::microseconds(bits / 4 % 150));
  };
  const auto body = [&](Group& group) {
    ThreadPool pool(1);
    ExpertExchange exchange(group, Stream(pool));
    // The loads alternate, so that what is left of a step before would be seen.
    std::vector<Tokens> tokens;
    std::vector<std::vector<float>> expected;
    for (const Load load : kLoads) {
      tokens.push_back(tokens_of(load, 1, group.rank()));
      expected.push_back(expected_of(model, 1, tokens.back(), 1));
    }
    const auto slots = model.slots_of(table, 1, group.rank());
    int wrong = 0;
    for (size_t repeat = 0; repeat < 1000; ++repeat) {
      const Tokens& now = tokens[repeat % tokens.size()];
      std::vector<float> out = residual_of(1, now.rows());
      exchange.add_experts(table, 1, slots, now.x.view, now.ids_view(), now.weights_view(),
                           TensorView(out.data(), {now.rows(), kHidden}));
      wrong += out != expected[repeat % expected.size()];
    }
    EXPECT_EQ(wrong, 0) << "rank " << group.rank();
  };
  expect_all_returned(run_ranks(kRanks, body, options));
}

TEST(ExpertExchange, HasTheBitsOfOneRankOverNodes) {
  const Model model;
  const std::vector<ExpertTable> tables = tables_of(3);
  const auto ends = run_nodes({1, 2}, [&](World&, Group& group) {
    ThreadPool pool(1);
    ExpertExchange exchange(group, Stream(pool));
    uint64_t seed = 0;
    for (const ExpertTable& table : tables) {
      for (const Load load : kLoads) {
        expect_one_ranks_bits(group, exchange, model, table, load, ++seed);
      }
    }
  });
  for (const NodeEnd& node : ends) {
    EXPECT_EQ(node.join_error, "");
    expect_all_returned(node.ranks);
  }
}

// A row whose experts are all on one rank is given to it once, and to no other.
TEST(ExpertExchange, GivesARowOnceToARank) {
  const Model model;
  constexpr int64_t kRows = 40, kRowBytes = kHidden * 2;
  std::vector<int32_t> all(kExperts);
  std::iota(all.begin(), all.end(), 0);
  const ExpertTable table =
      *ExpertTable::create(kExperts, 3, ExpertLists(kLayers, {{}, all, {}}), "");
  uint64_t dispatched = 0;
  std::vector<Group*> groups(3);
  GroupOptions options;
  options.at_meeting = [&](const MeetingPoint& at) {
    if (at.rank != 0 || at.phase != MeetingPhase::kBefore) return;
    if (at.kind == Collective::kCombine) dispatched = groups[0]->last_of(0).bytes;
  };
  expect_all_returned(run_ranks(
      3,
      [&](Group& group) {
        if (group.rank() == 0) groups[0] = &group;
        ThreadPool pool(1);
        ExpertExchange exchange(group, Stream(pool));
        const Tokens tokens(1, group.rank() == 0 ? kRows : 0);
        std::vector<float> out = residual_of(1, tokens.rows());
        exchange.add_experts(table, 0, model.slots_of(table, 0, group.rank()), tokens.x.view,
                             tokens.ids_view(), tokens.weights_view(),
                             TensorView(out.data(), {tokens.rows(), kHidden}));
      },
      options));
  EXPECT_GE(dispatched, kRows * kRowBytes);
  EXPECT_LT(dispatched, kRows * (kRowBytes + 8 * kPerToken));
}

}  // namespace
}  // namespace fathom
