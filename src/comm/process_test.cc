// Nodes as processes: what the others see when one is killed, stopped, or ends.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/contains.h"
#include "comm/node_threads.h"

namespace fathom {
namespace {

// A forked node of `num_ranks` ranks that all-reduce for ever. It writes a byte when its ranks have
// met 50 times, and what ended each rank, a line each, when they have ended.
class NodeProcess {
 public:
  NodeProcess(const TestListener& listener, int nnodes, int node_rank, int num_ranks) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      run(listener, nnodes, node_rank, num_ranks, ends[1]);
      _exit(0);
    }
    close(ends[1]);
    out_ = Fd(ends[0]);
  }
  NodeProcess(NodeProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), out_(std::move(other.out_)) {}
  ~NodeProcess() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  void await_meetings() {
    char byte = 0;
    ASSERT_EQ(read(out_.get(), &byte, 1), 1);
    ASSERT_EQ(byte, '+');
  }
  void signal(int number) { ASSERT_EQ(kill(pid_, number), 0); }
  // What it wrote until it ended.
  std::vector<std::string> lines() {
    std::string text(1 << 16, '\0');
    size_t size = 0;
    ssize_t got = 0;
    while ((got = read(out_.get(), text.data() + size, text.size() - size)) > 0) {
      size += static_cast<size_t>(got);
    }
    std::vector<std::string> lines;
    for (size_t begin = 0; begin < size;) {
      const size_t end = text.find('\n', begin);
      lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return lines;
  }

 private:
  static void run(const TestListener& listener, int nnodes, int node_rank, int num_ranks, int out) {
    AbortWord abort_word;
    JoinOptions options = test_join_options(listener, nnodes, node_rank, num_ranks);
    options.heartbeat = {};  // as in production
    auto world = join(options, abort_word);
    std::string text = world ? "" : world.error().message + "\n";
    if (world) {
      GroupOptions group_options;
      group_options.limit = std::chrono::hours(1);  // nothing but the failure may end the waits
      auto groups = (*world)->make_groups(group_options);
      const auto ends = run_ranks(groups, abort_word, [&](Group& group) {
        std::vector<float> x(1000);
        for (int n = 1;; ++n) {
          all_reduce(group, x, x);
          if (n == 50 && group.rank() == (*world)->layout().first_rank(node_rank)) {
            if (write(out, "+", 1) != 1) _exit(1);
          }
        }
      });
      for (const RankEnd& end : ends) text += end.what + "\n";
      groups.clear();
      world->reset();
    }
    if (write(out, text.data(), text.size()) != static_cast<ssize_t>(text.size())) _exit(1);
  }

  pid_t pid_ = -1;
  Fd out_;
};

// Three nodes of 2, 1 and 1 ranks; `number` is sent to node `victim`. All ranks of the others have
// to end by themselves, with words that name the victim's node or rank and where they waited.
void expect_others_end(int victim, int number) {
  const TestListener listener;
  std::vector<NodeProcess> nodes;
  const int ranks_of_node[] = {2, 1, 1};
  nodes.reserve(3);
  for (int node = 0; node < 3; ++node) nodes.emplace_back(listener, 3, node, ranks_of_node[node]);
  for (NodeProcess& node : nodes) node.await_meetings();
  const auto begin = std::chrono::steady_clock::now();
  nodes[victim].signal(number);
  const int victims_rank = victim == 0 ? 0 : victim + 1;
  for (int node = 0; node < 3; ++node) {
    if (node == victim) continue;
    const std::vector<std::string> lines = nodes[node].lines();
    EXPECT_EQ(lines.size(), static_cast<size_t>(ranks_of_node[node]));
    for (const std::string& line : lines) {
      const bool names_victim = contains(line, "node " + std::to_string(victim)) ||
                                contains(line, "rank " + std::to_string(victims_rank)) ||
                                (victim == 0 && contains(line, "rank 1 "));
      EXPECT_TRUE(names_victim) << line;
      EXPECT_TRUE(contains(line, "all_reduce #")) << line;
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  testing::Test::RecordProperty("seconds", std::to_string(took.count()));
  std::printf("the others ended after %.2f s\n", took.count());
  if (number == SIGSTOP) nodes[victim].signal(SIGCONT);
}

TEST(Process, AKilledNodeEndsTheOthers) { expect_others_end(1, SIGKILL); }
TEST(Process, AKilledLeaderEndsTheOthers) { expect_others_end(0, SIGKILL); }
TEST(Process, AStoppedNodeEndsTheOthers) { expect_others_end(2, SIGSTOP); }
TEST(Process, AStoppedLeaderEndsTheOthers) { expect_others_end(0, SIGSTOP); }

TEST(Process, AStoppedNodeThatGoesOnEndsToo) {
  const TestListener listener;
  std::vector<NodeProcess> nodes;
  nodes.reserve(2);
  for (int node = 0; node < 2; ++node) nodes.emplace_back(listener, 2, node, 1);
  for (NodeProcess& node : nodes) node.await_meetings();
  nodes[1].signal(SIGSTOP);
  EXPECT_EQ(nodes[0].lines().size(), 1);
  nodes[1].signal(SIGCONT);
  EXPECT_EQ(nodes[1].lines().size(), 1);
}

}  // namespace
}  // namespace fathom
