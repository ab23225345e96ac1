#include "comm/dist_defaults.h"

#include <gtest/gtest.h>

#include <map>

#include "comm/socket.h"

namespace fathom {
namespace {

using Environment = std::map<std::string, std::string>;

Result<DistDefaults> defaults_in(const Environment& environment) {
  return dist_defaults([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

std::string error_in(const Environment& environment) {
  const auto defaults = defaults_in(environment);
  return defaults ? "" : defaults.error().message;
}

const Environment kSet = {{"LWS_LEADER_ADDRESS", "fathom-0.fathom.default"},
                          {"LWS_GROUP_SIZE", "4"},
                          {"LWS_WORKER_INDEX", "3"}};
const Environment kJob = {{"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_RANK", "2"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                          {"OMPI_MCA_ess_base_jobid", "1234567"}};

Environment with(Environment environment, const std::string& name, const std::string& value) {
  environment[name] = value;
  return environment;
}

Environment without(Environment environment, const std::string& name) {
  environment.erase(name);
  return environment;
}

TEST(DistDefaults, OneNodeWhereNobodyTells) {
  for (const Environment& environment :
       {Environment{}, Environment{{"OMPI_COMM_WORLD_SIZE", ""}, {"LWS_LEADER_ADDRESS", ""}},
        Environment{{"LWS_GROUP_SIZE", "4"}}}) {
    const auto defaults = defaults_in(environment);
    ASSERT_TRUE(defaults);
    EXPECT_EQ(defaults->nnodes, 1);
    EXPECT_EQ(defaults->node_rank, 0);
    EXPECT_FALSE(defaults->address);
    EXPECT_EQ(defaults->source, "");
  }
}

TEST(DistDefaults, OfLeaderWorkerSet) {
  const auto defaults = defaults_in(kSet);
  ASSERT_TRUE(defaults);
  EXPECT_EQ(defaults->nnodes, 4);
  EXPECT_EQ(defaults->node_rank, 3);
  EXPECT_EQ(defaults->address, "fathom-0.fathom.default:5000");
  EXPECT_EQ(defaults->source, "LeaderWorkerSet");
  const auto alone = defaults_in(with(with(kSet, "LWS_GROUP_SIZE", "1"), "LWS_WORKER_INDEX", "0"));
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->nnodes, 1);
  EXPECT_FALSE(alone->address);
  EXPECT_EQ(*defaults_in(with(kSet, "LWS_LEADER_ADDRESS", "fd00::1"))->address, "[fd00::1]:5000");
}

TEST(DistDefaults, OfMpirunOnOneHost) {
  const auto defaults = defaults_in(kJob);
  ASSERT_TRUE(defaults);
  EXPECT_EQ(defaults->nnodes, 4);
  EXPECT_EQ(defaults->node_rank, 2);
  EXPECT_EQ(defaults->source, "mpirun");
  ASSERT_TRUE(defaults->address);
  const auto endpoint = parse_endpoint(*defaults->address);
  ASSERT_TRUE(endpoint);
  EXPECT_EQ(endpoint->host, "127.0.0.1");
  EXPECT_GE(endpoint->port, 61000);

  // All processes of a job agree, whatever else differs between them; another job has another port.
  EXPECT_EQ(defaults_in(with(kJob, "OMPI_COMM_WORLD_RANK", "0"))->address, defaults->address);
  EXPECT_NE(defaults_in(with(kJob, "OMPI_MCA_ess_base_jobid", "1234568"))->address,
            defaults->address);
  // Open MPI 5 names the job elsewhere.
  const Environment newer =
      with(without(kJob, "OMPI_MCA_ess_base_jobid"), "PMIX_NAMESPACE", "prterun-host-77@1");
  ASSERT_TRUE(defaults_in(newer)->address);
  EXPECT_NE(defaults_in(newer)->address,
            defaults_in(with(newer, "PMIX_NAMESPACE", "prterun-host-78@1"))->address);
}

TEST(DistDefaults, OfMpirunOverHostsHaveNoAddress) {
  for (const Environment& environment :
       {with(kJob, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"), without(kJob, "OMPI_MCA_ess_base_jobid")}) {
    const auto defaults = defaults_in(environment);
    ASSERT_TRUE(defaults);
    EXPECT_EQ(defaults->nnodes, 4);
    EXPECT_FALSE(defaults->address);
  }
}

TEST(DistDefaults, MpirunGoesFirst) {
  Environment both = kJob;
  both.insert(kSet.begin(), kSet.end());
  EXPECT_EQ(defaults_in(both)->source, "mpirun");
  EXPECT_EQ(defaults_in(both)->node_rank, 2);
}

TEST(DistDefaults, WhatIsIncompleteOrNoNumberIsRefused) {
  EXPECT_EQ(error_in(without(kSet, "LWS_GROUP_SIZE")),
            "LWS_LEADER_ADDRESS is set, LWS_GROUP_SIZE is not");
  EXPECT_EQ(error_in(without(kSet, "LWS_WORKER_INDEX")),
            "LWS_LEADER_ADDRESS is set, LWS_WORKER_INDEX is not");
  EXPECT_EQ(error_in(with(kSet, "LWS_WORKER_INDEX", "4")),
            "LWS_WORKER_INDEX is '4'; it is a number from 0 to 3");
  EXPECT_EQ(error_in(with(kSet, "LWS_GROUP_SIZE", "0")),
            "LWS_GROUP_SIZE is '0'; it is a number from 1 to 4096");
  EXPECT_EQ(error_in(with(kSet, "LWS_GROUP_SIZE", "four")),
            "LWS_GROUP_SIZE is 'four'; it is a number from 1 to 4096");
  EXPECT_EQ(error_in(with(kJob, "OMPI_COMM_WORLD_RANK", "-1")),
            "OMPI_COMM_WORLD_RANK is '-1'; it is a number from 0 to 3");
  EXPECT_EQ(error_in(with(kJob, "OMPI_COMM_WORLD_SIZE", "4x")),
            "OMPI_COMM_WORLD_SIZE is '4x'; it is a number from 1 to 4096");
  EXPECT_EQ(error_in(without(kJob, "OMPI_COMM_WORLD_LOCAL_SIZE")),
            "OMPI_COMM_WORLD_SIZE is set, OMPI_COMM_WORLD_LOCAL_SIZE is not");
}

}  // namespace
}  // namespace fathom
