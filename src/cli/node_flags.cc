#include "cli/node_flags.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>

#include "comm/dist_defaults.h"
#include "comm/socket.h"
#include "device/cpu/thread_pool.h"

namespace fathom {
namespace {

constexpr int64_t kMaxNodes = 4096;

}  // namespace

void add_node_flags(CLI::App& app, NodeFlags* flags) {
  FlagGroup nodes(app, "Several nodes");
  nodes.count("--nnodes", &flags->nnodes, 1, kMaxNodes,
              "Nodes (processes) that run the model together, each with a part of the ranks", "1");
  nodes.count("--node-rank", &flags->node_rank, 0, kMaxNodes - 1,
              "Number of this node; 0 leads, the others compute what it sends", "0");
  nodes.text("--dist-init-addr", &flags->address, "HOST:PORT",
             "Where node 0 listens for the others (default, as for --nnodes and --node-rank: "
             "what mpirun or a LeaderWorkerSet says)");
  nodes.count("--dist-timeout", &flags->join_seconds, 1, 86'400,
              "Seconds that a node waits for the others at the start");
}

Result<NodePlace> node_place(const NodeFlags& flags,
                             const std::function<const char*(const char*)>& get) {
  // Variables of a launcher that flags override need not be complete.
  const bool asks = !flags.nnodes || !flags.node_rank || flags.address.empty();
  DistDefaults defaults;
  if (asks && flags.nnodes != 1) {
    FATHOM_TRY(defaults, dist_defaults(get));
  }
  NodePlace place;
  place.nnodes = static_cast<int>(flags.nnodes.value_or(defaults.nnodes));
  if (place.nnodes == 1) {
    if (flags.node_rank.value_or(0) == 0) return place;
    return invalid("--node-rank is {}, must be below --nnodes, 1", *flags.node_rank);
  }
  if (!flags.node_rank && defaults.nnodes == 1) {
    return invalid("--nnodes is {}: --node-rank, 0 to {}, is missing", place.nnodes,
                   place.nnodes - 1);
  }
  place.node_rank = static_cast<int>(flags.node_rank.value_or(defaults.node_rank));
  if (place.node_rank >= place.nnodes) {
    return invalid("--node-rank is {}, must be below --nnodes, {}", place.node_rank, place.nnodes);
  }
  place.address = flags.address.empty() ? defaults.address.value_or("") : flags.address;
  if (place.address.empty()) {
    return invalid("there are {} nodes{}: --dist-init-addr HOST:PORT of node 0 is missing",
                   place.nnodes,
                   defaults.source.empty() ? "" : fmt::format(" ({} says so)", defaults.source));
  }
  const auto endpoint = parse_endpoint(place.address);
  if (!endpoint) return with_context("--dist-init-addr: ", endpoint.error());
  place.join_limit = std::chrono::seconds(flags.join_seconds);
  return place;
}

Result<NodePlace> node_place(const NodeFlags& flags) {
  return node_place(flags, [](const char* name) -> const char* { return std::getenv(name); });
}

int64_t default_threads() {
  const int64_t cores = usable_cores();
  const char* const processes = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  // mpirun gives processes cores of their own, or leaves all cores to all of them.
  const bool has_own = cores < sysconf(_SC_NPROCESSORS_ONLN);
  if (processes == nullptr || has_own) return cores;
  return std::max<int64_t>(1, cores / std::max(1, std::atoi(processes)));
}

Result<std::vector<int>> ranks_of_nodes(const NodePlace& place, int64_t ranks) {
  if (ranks < place.nnodes) {
    return invalid("there are {} nodes and {} rank{} (--tp times --dp): each node needs a rank",
                   place.nnodes, ranks, ranks == 1 ? "" : "s");
  }
  std::vector<int> counts(static_cast<size_t>(place.nnodes),
                          static_cast<int>(ranks / place.nnodes));
  for (int64_t node = 0; node < ranks % place.nnodes; ++node) ++counts[static_cast<size_t>(node)];
  return counts;
}

}  // namespace fathom
