#include "comm/dist_defaults.h"

#include <charconv>
#include <string_view>

#include "base/random.h"
#include "comm/socket.h"

namespace fathom {
namespace {

using Get = std::function<const char*(const char*)>;

// The dynamic ports (RFC 6335) above those that Linux gives to outgoing connections.
constexpr int kFirstJobPort = 61000, kLastJobPort = 65535;
constexpr int kMaxNodes = 4096;

std::optional<std::string_view> text_of(const Get& get, const char* name) {
  const char* value = get(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

// The variable's number, from `least` to `most`; `beside` is the one that asks for it.
Result<int> number_of(const Get& get, const char* name, const char* beside, int least, int most) {
  const auto text = text_of(get, name);
  if (!text) return invalid("{} is set, {} is not", beside, name);
  int value = 0;
  const auto [end, failed] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (failed != std::errc() || end != text->data() + text->size() || value < least ||
      value > most) {
    return invalid("{} is '{}'; it is a number from {} to {}", name, *text, least, most);
  }
  return value;
}

int port_of_job(std::string_view job) {
  uint64_t hash = mix64(job.size());
  for (const char c : job) hash = mix64(hash ^ static_cast<unsigned char>(c));
  return kFirstJobPort + static_cast<int>(hash % (kLastJobPort - kFirstJobPort + 1));
}

Result<DistDefaults> of_mpirun(const Get& get) {
  DistDefaults defaults;
  defaults.source = "mpirun";
  const char* const size = "OMPI_COMM_WORLD_SIZE";
  FATHOM_TRY(defaults.nnodes, number_of(get, size, size, 1, kMaxNodes));
  FATHOM_TRY(defaults.node_rank,
             number_of(get, "OMPI_COMM_WORLD_RANK", size, 0, defaults.nnodes - 1));
  FATHOM_TRY(const int local,
             number_of(get, "OMPI_COMM_WORLD_LOCAL_SIZE", size, 1, defaults.nnodes));
  auto job = text_of(get, "OMPI_MCA_ess_base_jobid");
  if (!job) job = text_of(get, "PMIX_NAMESPACE");
  if (defaults.nnodes > 1 && local == defaults.nnodes && job) {
    defaults.address = to_string(Endpoint{"127.0.0.1", port_of_job(*job)});
  }
  return defaults;
}

Result<DistDefaults> of_leader_worker_set(const Get& get, std::string_view leader) {
  DistDefaults defaults;
  defaults.source = "LeaderWorkerSet";
  const char* const address = "LWS_LEADER_ADDRESS";
  FATHOM_TRY(defaults.nnodes, number_of(get, "LWS_GROUP_SIZE", address, 1, kMaxNodes));
  FATHOM_TRY(defaults.node_rank,
             number_of(get, "LWS_WORKER_INDEX", address, 0, defaults.nnodes - 1));
  if (defaults.nnodes > 1) {
    defaults.address = to_string(Endpoint{std::string(leader), kDefaultDistPort});
  }
  return defaults;
}

}  // namespace

Result<DistDefaults> dist_defaults(const Get& get) {
  if (text_of(get, "OMPI_COMM_WORLD_SIZE")) return of_mpirun(get);
  if (const auto leader = text_of(get, "LWS_LEADER_ADDRESS")) {
    return of_leader_worker_set(get, *leader);
  }
  return DistDefaults{};
}

}  // namespace fathom
