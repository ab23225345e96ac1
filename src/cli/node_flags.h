// The flags that make one engine of several processes: --nnodes, --node-rank, --dist-init-addr.
//
// Each process is a node with a part of the ranks. Node 0 leads: it has the command line or HTTP,
// and plans all steps; the others compute what it sends. Launchers' variables are the flags'
// defaults (comm/dist_defaults.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "cli/flags.h"

namespace fathom {

struct NodeFlags {
  std::optional<int64_t> nnodes = {}, node_rank = {};  // none: the launcher's, or one node
  std::string address = {};                            // HOST:PORT of node 0; empty: the launcher's
  int64_t join_seconds = 600;
};

void add_node_flags(CLI::App& app, NodeFlags* flags);

// A process's place among the nodes.
struct NodePlace {
  int nnodes = 1;
  int node_rank = 0;
  std::string address = {};  // of node 0; empty with one node
  std::chrono::seconds join_limit{0};

  bool is_one_of_several() const { return nnodes > 1; }
  bool follows() const { return node_rank > 0; }
};

// Fails if a flag or a variable is missing or out of range. `get` answers as getenv().
Result<NodePlace> node_place(const NodeFlags& flags,
                             const std::function<const char*(const char*)>& get);
// With this process's environment.
Result<NodePlace> node_place(const NodeFlags& flags);

// CPU threads of a process when no flag says: one a core, less where mpirun has put several
// processes on the same cores.
int64_t default_threads();

// The ranks of each node: consecutive, and at most one more on earlier nodes than on later ones.
// Fails if there are fewer ranks than nodes. `ranks` is tp * dp.
Result<std::vector<int>> ranks_of_nodes(const NodePlace& place, int64_t ranks);

}  // namespace fathom
