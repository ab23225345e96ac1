#include "cli/node_flags.h"

#include <gtest/gtest.h>

#include <map>

namespace fathom {
namespace {

using Variables = std::map<std::string, std::string>;

Result<NodePlace> place_of(const NodeFlags& flags, const Variables& variables = {}) {
  return node_place(flags, [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const NodeFlags& flags, const Variables& variables = {}) {
  const auto place = place_of(flags, variables);
  return place ? "" : place.error().message;
}

const Variables kMpirun = {{"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_RANK", "3"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                           {"PMIX_NAMESPACE", "12345"}};
const Variables kPod = {
    {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "1"}, {"LWS_LEADER_ADDRESS", "leader.svc"}};

TEST(NodePlace, WithoutAWordThereIsOneProcess) {
  const auto place = place_of({});
  ASSERT_TRUE(place);
  EXPECT_FALSE(place->is_one_of_several());
  EXPECT_FALSE(place->follows());
}

TEST(NodePlace, FlagsNameIt) {
  const auto place =
      place_of({.nnodes = 2, .node_rank = 1, .address = "10.0.0.1:5000", .join_seconds = 7});
  ASSERT_TRUE(place) << place.error().message;
  EXPECT_EQ(place->nnodes, 2);
  EXPECT_TRUE(place->follows());
  EXPECT_EQ(place->address, "10.0.0.1:5000");
  EXPECT_EQ(place->join_limit, std::chrono::seconds(7));
}

TEST(NodePlace, LaunchersAreTheDefaults) {
  const auto mpi = place_of({}, kMpirun);
  ASSERT_TRUE(mpi) << mpi.error().message;
  EXPECT_EQ(mpi->nnodes, 4);
  EXPECT_EQ(mpi->node_rank, 3);
  EXPECT_EQ(mpi->address.substr(0, 10), "127.0.0.1:");
  const auto pod = place_of({}, kPod);
  ASSERT_TRUE(pod) << pod.error().message;
  EXPECT_EQ(pod->address, "leader.svc:5000");
  EXPECT_EQ(pod->node_rank, 1);
}

TEST(NodePlace, FlagsGoBeforeLaunchers) {
  const auto place = place_of({.address = "h:1"}, kMpirun);
  ASSERT_TRUE(place) << place.error().message;
  EXPECT_EQ(place->nnodes, 4);
  EXPECT_EQ(place->address, "h:1");
  EXPECT_FALSE(place_of({.nnodes = 1}, kMpirun)->is_one_of_several());
  const auto all =
      place_of({.nnodes = 2, .node_rank = 0, .address = "h:1"}, {{"OMPI_COMM_WORLD_SIZE", "none"}});
  ASSERT_TRUE(all) << all.error().message;
}

TEST(NodePlace, WhatIsMissingOrOutOfRangeIsNamed) {
  EXPECT_EQ(error_of({.node_rank = 1}), "--node-rank is 1, must be below --nnodes, 1");
  EXPECT_EQ(error_of({.nnodes = 2, .node_rank = 2, .address = "h:1"}),
            "--node-rank is 2, must be below --nnodes, 2");
  EXPECT_EQ(error_of({.nnodes = 2, .address = "h:1"}),
            "--nnodes is 2: --node-rank, 0 to 1, is missing");
  EXPECT_EQ(error_of({.nnodes = 2, .node_rank = 0}),
            "there are 2 nodes: --dist-init-addr HOST:PORT of node 0 is missing");
  Variables two_hosts = kMpirun;
  two_hosts["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_EQ(error_of({}, two_hosts),
            "there are 4 nodes (mpirun says so): --dist-init-addr HOST:PORT of node 0 is missing");
  EXPECT_TRUE(
      error_of({.nnodes = 2, .node_rank = 0, .address = "h"}).starts_with("--dist-init-addr: "));
  EXPECT_NE(error_of({}, {{"OMPI_COMM_WORLD_SIZE", "none"}}), "");
}

TEST(RanksOfNodes, ConsecutiveAndAlmostEqual) {
  const NodePlace place{.nnodes = 3};
  EXPECT_EQ(*ranks_of_nodes(place, 6), (std::vector<int>{2, 2, 2}));
  EXPECT_EQ(*ranks_of_nodes(place, 8), (std::vector<int>{3, 3, 2}));
  EXPECT_EQ(ranks_of_nodes(place, 2).error().message,
            "there are 3 nodes and 2 ranks (--tp times --dp): each node needs a rank");
}

}  // namespace
}  // namespace fathom
