// Ranks of several nodes: worlds that are joined over loopback sockets.
#include "comm/world.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "base/random.h"
#include "comm/collectives.h"
#include "comm/collectives_test_data.h"
#include "comm/contains.h"
#include "comm/node_threads.h"

namespace fathom {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

void expect_all_well(const std::vector<NodeEnd>& ends) {
  for (const NodeEnd& node : ends) {
    EXPECT_EQ(node.join_error, "");
    for (const RankEnd& rank : node.ranks) EXPECT_TRUE(rank.returned) << rank.what;
    EXPECT_FALSE(node.abort) << node.abort->status.message;
  }
}

TEST(World, CollectivesEqualTheOrderedReference) {
  const std::vector<std::vector<int>> worlds = {{3}, {1, 1}, {2, 3}, {1, 2, 1}, {4, 4}};
  for (const std::vector<int>& ranks_of_node : worlds) {
    expect_all_well(run_nodes(ranks_of_node, [](World& world, Group& group) {
      ASSERT_EQ(group.size(), world.size());
      uint64_t seed = 0;
      for (const int64_t count : {0, 1, 255, 3584, 16384, 20001, 300000}) {
        ++seed;
        std::vector<float> expected = values_of(0, seed, count);
        for (int rank = 1; rank < group.size(); ++rank) {
          for (int64_t i = 0; i < count; ++i) expected[i] += value_of(rank, seed, i);
        }
        std::vector<float> mine = values_of(group.rank(), seed, count), sum(count, -1.0f);
        all_reduce(group, mine, sum);
        std::fill(mine.begin(), mine.end(), -2.0f);
        EXPECT_TRUE(equal_bits(sum, expected)) << count;

        std::vector<int64_t> counts(group.size(), count / group.size());
        counts[0] += count % group.size();
        const int64_t begin =
            group.rank() == 0 ? 0 : counts[0] + (group.rank() - 1) * (count / group.size());
        std::vector<float> part(counts[group.rank()], -1.0f), whole(count, -1.0f);
        reduce_scatter(group, values_of(group.rank(), seed, count), counts, part);
        EXPECT_TRUE(equal_bits(
            part, std::span(expected).subspan(begin, static_cast<size_t>(counts[group.rank()]))));
        all_gather(group, part, counts, whole);
        EXPECT_TRUE(equal_bits(whole, expected)) << count;
      }
      std::vector<Candidate> mine = {{1.0f, group.rank() + 7}}, best(1);
      argmax(group, mine, best);
      EXPECT_EQ(best[0].id, 7);
    }));
  }
}

TEST(World, MeetsInOrderUnderRandomDelays) {
  constexpr uint64_t kMeetings = 2000;
  GroupOptions options;
  options.at_meeting = [](const MeetingPoint& at) {
    if (at.phase != MeetingPhase::kBefore) return;
    const int rank = at.rank;
    const uint64_t number = at.number;
    const uint64_t chance = random_bits(3, rank, number) % 1000;
    if (chance < 5) std::this_thread::sleep_for(microseconds(300));
  };
  expect_all_well(run_nodes(
      {2, 1, 2},
      [](World&, Group& group) {
        const auto me = static_cast<uint64_t>(group.rank());
        std::vector<uint64_t> given[2];
        for (uint64_t n = 0; n < kMeetings; ++n) {
          // To each rank another number of words, sometimes none, sometimes many.
          const uint64_t most = random_bits(8, 0, n) % 50 == 0 ? 40000 : 5;
          const auto words = [&](uint64_t from, uint64_t to) {
            return random_bits(9, n, from * 16 + to) % most;
          };
          std::vector<uint64_t>& values = given[n % 2];
          values.assign(most, n * 16 + me);
          std::vector<ConstBytes> spans;
          spans.reserve(group.size());
          for (int r = 0; r < group.size(); ++r) {
            spans.push_back(std::as_bytes(std::span(values).first(words(me, r))));
          }
          const auto all = group.meet(Collective::kDispatch, spans);
          for (int r = 0; r < group.size(); ++r) {
            ASSERT_EQ(all[r].size(), words(r, me) * sizeof(uint64_t));
            for (size_t i = 0; i < all[r].size(); i += sizeof(uint64_t)) {
              uint64_t value = 0;
              std::memcpy(&value, all[r].data() + i, sizeof value);
              ASSERT_EQ(value, n * 16 + r);
            }
          }
        }
        barrier(group);
      },
      options));
}

TEST(World, GroupsShareConnections) {
  // Four ranks on two nodes: pairs within a node, pairs between nodes, and all.
  const std::map<std::string, std::vector<int>> pairs = {
      {"row 0", {0, 1}}, {"row 1", {2, 3}}, {"column 0", {0, 2}}, {"column 1", {1, 3}}};
  const auto body = [](World&, Group& group, const GroupsByName& others) {
    const int rank = group.rank();
    Group& row = *others.at(rank < 2 ? "row 0" : "row 1");
    Group& column = *others.at(rank % 2 == 0 ? "column 0" : "column 1");
    for (int n = 0; n < 300; ++n) {
      std::vector<float> x = {static_cast<float>(1 << rank)};
      all_reduce(row, x, x);
      ASSERT_EQ(x[0], rank < 2 ? 3 : 12);
      all_reduce(column, x, x);
      ASSERT_EQ(x[0], 15);
      all_reduce(group, x, x);
      ASSERT_EQ(x[0], 60);
    }
    barrier(group);
  };
  expect_all_well(run_nodes_with_groups({2, 2}, pairs, body));
}

TEST(World, MessagesArriveInOrderBothWays) {
  expect_all_well(run_nodes({1, 1, 1}, [](World& world, Group& group) {
    const auto message = [](int node, int n) {
      // From nothing to 3 MB.
      const size_t size = n % 100 == 99 ? 3'000'000 : static_cast<size_t>(n) * 7 % 1000;
      return std::vector<std::byte>(size, static_cast<std::byte>(node * 100 + n % 50));
    };
    constexpr int kMessages = 300;
    if (world.is_leader()) {
      for (int n = 0; n < kMessages; ++n) {
        for (const int node : {1, 2}) world.send(node, message(node, n));
      }
      for (const int node : {1, 2}) {
        for (int n = 0; n < kMessages; ++n) ASSERT_EQ(world.receive(node), message(node, n));
      }
    } else {
      const int node = world.layout().node_rank;
      for (int n = 0; n < kMessages; ++n) {
        ASSERT_EQ(world.receive(0), message(node, n));
        world.send(0, message(node, n));
      }
    }
    barrier(group);
  }));
}

TEST(World, ANodeThatLeavesIsNoError) {
  std::atomic<bool> left{false};
  expect_all_well(run_nodes({1, 1, 1}, [&](World& world, Group& group) {
    barrier(group);
    if (world.layout().node_rank == 1) {
      world.send(0, std::as_bytes(std::span("last", 4)));
      return;  // and its world ends
    }
    if (world.is_leader()) {
      ASSERT_EQ(world.receive(1)->size(), 4);
      EXPECT_EQ(world.receive(1), std::nullopt);
      left = true;
    }
    // The others go on together.
    while (!left) std::this_thread::yield();
    if (world.is_leader()) {
      world.send(2, {});
    } else {
      EXPECT_TRUE(world.receive(0));
    }
  }));
}

TEST(World, WaitingForANodeThatHasLeftIsOne) {
  const auto ends = run_nodes({2, 1}, [&](World& world, Group& group) {
    std::vector<float> x(8);
    all_reduce(group, x, x);
    if (world.layout().node_rank == 1) return;
    all_reduce(group, x, x);
  });
  for (const RankEnd& rank : ends[0].ranks) {
    EXPECT_TRUE(rank.comm_error);
    EXPECT_TRUE(contains(rank.what, "rank 2 closed its connection while rank ")) << rank.what;
    EXPECT_TRUE(
        contains(rank.what, "all_reduce #2 (32 bytes) (its last: all_reduce #1 (32 bytes))"))
        << rank.what;
  }
  EXPECT_TRUE(ends[1].ranks[0].returned);
}

TEST(World, AnAbortReachesEveryNodeWithItsReason) {
  GroupOptions options;
  options.limit = std::chrono::hours(1);
  const auto ends = run_nodes(
      {2, 1, 2},
      [](World&, Group& group) {
        for (int n = 1;; ++n) {
          if (n == 20 && group.rank() == 4) throw std::runtime_error("out of memory");
          barrier(group);
        }
      },
      options);
  for (const NodeEnd& node : ends) {
    ASSERT_TRUE(node.abort);
    EXPECT_EQ(node.abort->rank, 4);
    EXPECT_EQ(node.abort->status.message, "out of memory");
  }
  for (int rank = 0; rank < 4; ++rank) {
    const RankEnd& end = rank < 2 ? ends[0].ranks[rank] : ends[rank - 1].ranks[0];
    // Rank 4 left the barrier before, which the others may not have seen yet.
    const std::string where =
        "rank 4 failed: out of memory (rank " + std::to_string(rank) + " was in barrier #";
    EXPECT_TRUE(end.what == where + "20 (0 bytes))" || end.what == where + "19 (0 bytes))")
        << end.what;
  }
}

TEST(World, NodesOfOneMachineKnowEachOther) {
  const TestListener listener;
  const std::string machines[] = {"m", "", "m", ""};
  const int ranks[] = {2, 1, 1, 1};
  std::vector<int> shared(4);
  std::vector<std::thread> nodes;
  nodes.reserve(4);
  for (int node = 0; node < 4; ++node) {
    nodes.emplace_back([&, node] {
      AbortWord abort_word;
      JoinOptions options = test_join_options(listener, 4, node, ranks[node]);
      options.machine = machines[node];
      const auto world = join(options, abort_word);
      ASSERT_TRUE(world) << world.error().message;
      shared[static_cast<size_t>(node)] = (*world)->layout().ranks_on_machine();
    });
  }
  for (std::thread& node : nodes) node.join();
  EXPECT_EQ(shared, (std::vector<int>{3, 1, 3, 1}));
}

TEST(World, AnAbortEndsAWaitForAMessage) {
  std::atomic<bool> waits{false};
  const auto ends = run_nodes({1, 1}, [&](World& world, Group&) {
    if (world.is_leader()) {
      while (!waits) std::this_thread::yield();
      std::this_thread::sleep_for(milliseconds(1));
      throw std::runtime_error("no more");
    }
    waits = true;
    world.receive(0);
  });
  EXPECT_EQ(ends[1].ranks[0].what,
            "rank 0 failed: no more (node 1 was waiting for a message of node 0)");
}

TEST(World, AMismatchIsFoundBetweenNodes) {
  const auto ends = run_nodes({1, 1}, [](World&, Group& group) {
    barrier(group);
    const std::vector<std::byte> bytes(group.rank() == 0 ? 14336 : 4096);
    group.meet(group.rank() == 0 ? Collective::kAllReduce : Collective::kAllGather, bytes);
  });
  for (const NodeEnd& node : ends) {
    const std::string& what = node.ranks[0].what;
    EXPECT_TRUE(contains(what, "all_gather #2 (4096 bytes)")) << what;
    EXPECT_TRUE(contains(what, "all_reduce #2 (14336 bytes)")) << what;
  }
}

// Between nodes, and between ranks of one.
TEST(World, AnotherPlanIsFound) {
  for (const int odd_rank : {1, 2}) {
    const auto ends = run_nodes({2, 1}, [&](World&, Group& group) {
      group.set_plan(7);
      barrier(group);
      group.set_plan(group.rank() == odd_rank ? 9 : 8);
      barrier(group);
    });
    for (const NodeEnd& node : ends) {
      for (const RankEnd& rank : node.ranks) {
        EXPECT_TRUE(contains(rank.what, "barrier #2")) << rank.what;
        EXPECT_TRUE(contains(rank.what, "0000000000000008")) << rank.what;
        EXPECT_TRUE(contains(rank.what, "0000000000000009")) << rank.what;
        EXPECT_TRUE(contains(rank.what, "rank " + std::to_string(odd_rank))) << rank.what;
      }
    }
  }
}

TEST(World, AnotherOrderOfGroupsIsFound) {
  const auto body = [](World&, Group& group, const GroupsByName& others) {
    barrier(group.rank() == 0 ? group : *others.at("experts"));
  };
  const auto ends = run_nodes_with_groups({1, 1}, {{"experts", {0, 1}}}, body);
  for (const NodeEnd& node : ends) {
    const std::string& what = node.ranks[0].what;
    EXPECT_TRUE(contains(what, "barrier #1 (0 bytes) of group world")) << what;
    EXPECT_TRUE(contains(what, "barrier #1 (0 bytes) of group experts")) << what;
  }
}

TEST(World, ARankThatStaysAwayIsNamed) {
  std::atomic<bool> ended{false};
  GroupOptions options;
  options.limit = milliseconds(100);
  const auto ends = run_nodes(
      {1, 1},
      [&](World&, Group& group) {
        if (group.rank() == 0) {
          try {
            barrier(group);
          } catch (...) {
            ended = true;
            throw;
          }
        }
        while (!ended) std::this_thread::yield();
      },
      options);
  EXPECT_EQ(ends[0].ranks[0].what,
            "rank 0 waited 0.1 s in barrier #1 (0 bytes) for rank 1 (last: no collective yet)");
}

}  // namespace
}  // namespace fathom
