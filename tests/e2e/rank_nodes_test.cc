// Ranks on several nodes against one process: every golden checkpoint and the bundled model, nodes
// as threads that are joined over loopback and, with 8 ranks, as processes. Logits and
// caches have the bits of one process with as many ranks a lane, before and after experts move.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <thread>

#include "comm/node_threads.h"
#include "e2e/rank_harness.h"

namespace fathom {
namespace {

struct Nodes {
  Placement placement;
  std::vector<int> ranks;  // of each node

  int count() const { return static_cast<int>(ranks.size()); }
};

// One node's part of every run. With expert parallelism there are three: as the contiguous table
// says, and after all nodes have placed experts elsewhere, twice; their weights are read again
// where none of a node's ranks has them.
std::vector<Outcome> run_node(const Checkpoint& checkpoint, const Nodes& nodes, int node,
                              const TestListener& listener) {
  const ModelConfig& config = checkpoint.config();
  const Placement& placement = nodes.placement;
  const int ranks = placement.world();
  AbortWord abort_word;
  const auto world =
      join(test_join_options(listener, nodes.count(), node, nodes.ranks[static_cast<size_t>(node)]),
           abort_word);
  FATHOM_CHECK(world.has_value(), "{}", world.error().message);
  const bool by_experts = placement.expert_parallel;
  Ranks here(checkpoint, placement, {}, by_experts ? contiguous(config, ranks, 0) : nullptr,
             world->get());
  std::vector<Outcome> parts = {here.run()};
  if (!by_experts) return parts;
  for (const auto& table : {scattered(config, ranks, 3), contiguous(config, ranks, 3)}) {
    const auto moved = here.team().place_experts(table);
    FATHOM_CHECK(moved.has_value(), "{}", moved.error().message);
    parts.push_back(here.run());
  }
  return parts;
}

// Takes what a node has into the outcomes of all.
void merge(std::vector<Outcome> parts, std::vector<Outcome>& whole) {
  whole.resize(parts.size());
  for (size_t turn = 0; turn < parts.size(); ++turn) {
    whole[turn].logits.resize(kSequences);
    whole[turn].cache_rows.resize(kSequences);
    for (size_t s = 0; s < kSequences; ++s) {
      if (parts[turn].logits[s].empty()) continue;  // its lane begins on another node
      whole[turn].logits[s] = std::move(parts[turn].logits[s]);
      whole[turn].cache_rows[s] = std::move(parts[turn].cache_rows[s]);
    }
  }
}

std::vector<Outcome> run_in_threads(const Checkpoint& checkpoint, const Nodes& nodes) {
  std::vector<Outcome> whole;
  std::mutex mutex;
  const TestListener listener;
  std::vector<std::thread> threads;
  threads.reserve(nodes.ranks.size());
  for (int node = 0; node < nodes.count(); ++node) {
    threads.emplace_back([&, node] {
      std::vector<Outcome> parts = run_node(checkpoint, nodes, node, listener);
      const std::lock_guard lock(mutex);
      merge(std::move(parts), whole);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return whole;
}

template <typename T>
void write_vector(std::FILE* file, const std::vector<T>& values) {
  const size_t size = values.size();
  const bool written = std::fwrite(&size, sizeof size, 1, file) == 1 &&
                       (size == 0 || std::fwrite(values.data(), sizeof(T), size, file) == size);
  FATHOM_CHECK(written, "a node cannot write its outcome");
}

template <typename T>
std::vector<T> read_vector(std::FILE* file) {
  size_t size = 0;
  if (std::fread(&size, sizeof size, 1, file) != 1 || size == 0) return {};
  std::vector<T> values(size);
  if (std::fread(values.data(), sizeof(T), size, file) != size) return {};
  return values;
}

// Each node is a forked process that writes its outcomes to a file.
std::vector<Outcome> run_in_processes(const Checkpoint& checkpoint, const Nodes& nodes) {
  const size_t turns = nodes.placement.expert_parallel ? 3 : 1;
  const TestListener listener;
  struct Process {
    std::FILE* file;
    pid_t pid;
  };
  std::vector<Process> processes;
  for (int node = 0; node < nodes.count(); ++node) {
    std::FILE* const file = std::tmpfile();
    FATHOM_CHECK(file != nullptr, "no temporary file");
    const pid_t pid = fork();
    if (pid == 0) {
      for (const Outcome& outcome : run_node(checkpoint, nodes, node, listener)) {
        for (size_t s = 0; s < kSequences; ++s) {
          write_vector(file, outcome.logits[s]);
          write_vector(file, outcome.cache_rows[s]);
        }
      }
      _exit(std::fflush(file));
    }
    processes.push_back({file, pid});
  }
  std::vector<Outcome> whole;
  for (const Process& process : processes) {
    int status = -1;
    EXPECT_EQ(waitpid(process.pid, &status, 0), process.pid);
    EXPECT_EQ(status, 0);
    std::rewind(process.file);
    std::vector<Outcome> parts(turns);
    for (Outcome& outcome : parts) {
      for (size_t s = 0; s < kSequences; ++s) {
        outcome.logits.push_back(read_vector<float>(process.file));
        outcome.cache_rows.push_back(read_vector<std::byte>(process.file));
      }
    }
    std::fclose(process.file);
    merge(std::move(parts), whole);
  }
  return whole;
}

// One process with as many ranks a lane, and one lane.
Outcome run_alone(const Checkpoint& checkpoint, const Placement& placement) {
  const Placement alone = {.tp = placement.tp, .expert_parallel = placement.expert_parallel};
  const bool has_table = alone.expert_parallel && alone.tp > 1;
  return Ranks(checkpoint, has_table ? alone : Placement{.tp = alone.tp}, {},
               has_table ? contiguous(checkpoint.config(), alone.tp, 0) : nullptr)
      .run();
}

const std::vector<Nodes> kEveryCase = {{{.dp = 2, .expert_parallel = true}, {1, 1}},
                                       {{.dp = 4, .expert_parallel = true}, {1, 1, 1, 1}},
                                       {{.dp = 3, .expert_parallel = true}, {2, 1}},
                                       {{.tp = 2, .expert_parallel = true}, {1, 1}},
                                       {{.tp = 2, .dp = 2, .expert_parallel = true}, {2, 2}},
                                       {{.tp = 2, .dp = 2, .expert_parallel = true}, {1, 2, 1}},
                                       {{.tp = 2, .dp = 2, .expert_parallel = true}, {1, 1, 1, 1}}};

class RankNodes : public testing::TestWithParam<std::string> {
 protected:
  void expect_bits_of_one_process(const std::vector<Nodes>& cases);
};

void RankNodes::expect_bits_of_one_process(const std::vector<Nodes>& cases) {
  const auto checkpoint = open_golden(GetParam());
  std::map<int, Outcome> of_one;  // process, by tp
  for (const Nodes& nodes : cases) {
    const Placement& placement = nodes.placement;
    if (!check_placement(placement, checkpoint->config())) continue;
    SCOPED_TRACE(testing::Message() << "tp " << placement.tp << ", dp " << placement.dp << ", "
                                    << nodes.count() << " nodes");
    if (!of_one.contains(placement.tp)) of_one[placement.tp] = run_alone(*checkpoint, placement);
    for (const Outcome& outcome : run_in_threads(*checkpoint, nodes)) {
      EXPECT_TRUE(outcome.logits == of_one[placement.tp].logits);
      EXPECT_TRUE(outcome.cache_rows == of_one[placement.tp].cache_rows);
    }
  }
}

// The bundled model, larger than all others together, has the other cases in a slow test.
TEST_P(RankNodes, HaveTheBitsOfOneProcess) {
  expect_bits_of_one_process(
      GetParam() == "fathom-tiny" ? std::vector{kEveryCase.front(), kEveryCase[5]} : kEveryCase);
}

INSTANTIATE_TEST_SUITE_P(Goldens, RankNodes,
                         testing::Values("fathom-tiny", "kimi", "odd", "v32", "v2_fp8_tensor",
                                         "v2_group", "v2lite", "v2_ct_channel", "v3", "v3_fp8",
                                         "v3_fp8_e8m0", "v3_fp8_ue8m0", "v3_yarn", "youtu",
                                         "kimi_k25", "glm_dsa_shared"),
                         name_of_model);

// In `make test-slow`.
using RankNodesBundled = RankNodes;
TEST_P(RankNodesBundled, DISABLED_HaveTheBitsOfOneProcessInEveryCase) {
  expect_bits_of_one_process(kEveryCase);
}
INSTANTIATE_TEST_SUITE_P(Goldens, RankNodesBundled, testing::Values("fathom-tiny"), name_of_model);

// Eight ranks, with and without expert parallelism, in two processes and in four.
class RankProcesses : public testing::TestWithParam<std::string> {};

TEST_P(RankProcesses, OfManyRanksHaveTheBitsOfOne) {
  const auto checkpoint = open_golden(GetParam());
  for (const bool by_experts : {false, true}) {
    std::map<int, Outcome> of_one;  // process, by tp
    for (const Nodes& nodes :
         {Nodes{{.tp = 8}, {4, 4}}, Nodes{{.tp = 8}, {2, 2, 2, 2}}, Nodes{{.tp = 8}, {5, 3}},
          Nodes{{.tp = 4, .dp = 2}, {4, 4}}, Nodes{{.tp = 4, .dp = 2}, {1, 3, 2, 2}}}) {
      Nodes these = nodes;
      these.placement.expert_parallel = by_experts;
      const int tp = these.placement.tp;
      SCOPED_TRACE(testing::Message() << "tp " << tp << ", dp " << these.placement.dp << ", "
                                      << these.count() << " processes, experts " << by_experts);
      const auto checked = check_placement(these.placement, checkpoint->config());
      ASSERT_TRUE(checked) << checked.error().message;
      if (!of_one.contains(tp)) of_one[tp] = run_alone(*checkpoint, these.placement);
      for (const Outcome& outcome : run_in_processes(*checkpoint, these)) {
        EXPECT_TRUE(outcome.logits == of_one[tp].logits);
        EXPECT_TRUE(outcome.cache_rows == of_one[tp].cache_rows);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, RankProcesses, testing::Values("heads", "fp8_heads"),
                         name_of_model);

}  // namespace
}  // namespace fathom
