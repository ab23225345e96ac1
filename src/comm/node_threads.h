// For tests: nodes as threads of this process, each with a world of its own, joined over loopback.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/rank_threads.h"
#include "comm/rendezvous.h"

namespace fathom {

// A listening socket on a free port of loopback, and its address.
struct TestListener {
  explicit TestListener(const std::string& host = "127.0.0.1") {
    auto listener = listen_on({host, 0});
    if (!listener) return;
    fd = std::move(*listener);
    address = to_string(*local_endpoint(fd.get()));
  }
  Fd fd;
  std::string address;
};

// What became of a node.
struct NodeEnd {
  std::string join_error;  // empty: it joined
  std::vector<RankEnd> ranks;
  std::optional<AbortWord::Reason> abort;
};

// Options for `nnodes` nodes that join over `listener`.
inline JoinOptions test_join_options(const TestListener& listener, int nnodes, int node_rank,
                                     int num_ranks) {
  JoinOptions options;
  options.nnodes = nnodes;
  options.node_rank = node_rank;
  options.address = listener.address;
  options.num_ranks = num_ranks;
  options.facts = {{"version", "1.0"}, {"model", "abc"}};
  options.limit = std::chrono::minutes(5);
  // Threads of a busy machine may be late.
  options.heartbeat.silence = std::chrono::minutes(2);
  if (node_rank == 0) options.listener = listener.fd.get();
  return options;
}

// A rank's groups beside that of all ranks, by name.
using GroupsByName = std::map<std::string, Group*>;

// Runs body(world, group, others) on a thread for each rank of all nodes; `group` has all ranks,
// `others` those of `extra` (name -> ranks) that the rank is in.
inline std::vector<NodeEnd> run_nodes_with_groups(
    const std::vector<int>& ranks_of_node, const std::map<std::string, std::vector<int>>& extra,
    const std::function<void(World&, Group&, const GroupsByName&)>& body,
    const GroupOptions& group_options = {}) {
  const TestListener listener;
  std::vector<NodeEnd> ends(ranks_of_node.size());
  std::vector<std::thread> nodes;
  for (size_t node = 0; node < ranks_of_node.size(); ++node) {
    nodes.emplace_back([&, node] {
      AbortWord abort_word;
      auto world = join(test_join_options(listener, static_cast<int>(ranks_of_node.size()),
                                          static_cast<int>(node), ranks_of_node[node]),
                        abort_word);
      if (!world) {
        ends[node].join_error = world.error().message;
        return;
      }
      auto groups = (*world)->make_groups(group_options);
      std::vector<std::unique_ptr<Group>> others;
      std::map<int, GroupsByName> others_of_rank;
      for (const auto& [name, ranks] : extra) {
        for (auto& end : (*world)->make_groups({.name = name, .world_ranks = ranks})) {
          others_of_rank[end->world_rank(end->rank())][name] = end.get();
          others.push_back(std::move(end));
        }
      }
      ends[node].ranks = run_ranks(groups, abort_word, [&](Group& group) {
        const auto mine = others_of_rank.find(group.rank());
        body(**world, group, mine == others_of_rank.end() ? GroupsByName() : mine->second);
      });
      groups.clear();
      others.clear();
      world->reset();
      if (abort_word.aborted()) ends[node].abort = abort_word.reason();
    });
  }
  for (std::thread& node : nodes) node.join();
  return ends;
}

inline std::vector<NodeEnd> run_nodes(const std::vector<int>& ranks_of_node,
                                      const std::function<void(World&, Group&)>& body,
                                      const GroupOptions& group_options = {}) {
  return run_nodes_with_groups(
      ranks_of_node, {},
      [&](World& world, Group& group, const GroupsByName&) { body(world, group); }, group_options);
}

}  // namespace fathom
