// What a launcher tells its processes about their place: the defaults of --nnodes, --node-rank and
// --dist-init-addr.
//
// mpirun of Open MPI: OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK. If all processes are on this
// host (OMPI_COMM_WORLD_LOCAL_SIZE equals the size) the address is 127.0.0.1 with a port made from
// the job's id, so that two jobs of a host do not meet; over several hosts an address has to be
// given.
// Kubernetes' LeaderWorkerSet: LWS_GROUP_SIZE, LWS_WORKER_INDEX and LWS_LEADER_ADDRESS, with
// kDefaultDistPort.
// mpirun's go before LeaderWorkerSet's: who calls mpirun in a pod means its processes.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "base/status.h"

namespace fathom {

inline constexpr int kDefaultDistPort = 5000;

struct DistDefaults {
  int nnodes = 1;
  int node_rank = 0;
  // HOST:PORT of node 0; no value: it has to be given, or there is one node.
  std::optional<std::string> address = {};
  // Who told it, for messages: "mpirun", "LeaderWorkerSet"; empty: nobody.
  std::string source = {};
};

// `get` answers as getenv() does: null for what is not set. A variable that is empty counts as not
// set. Fails if a launcher's variables are incomplete or no numbers in their range.
Result<DistDefaults> dist_defaults(const std::function<const char*(const char*)>& get);

}  // namespace fathom
