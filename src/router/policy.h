// Which replica gets a request. A pure function of what is known of the replicas, the request and
// random bits.
//
// kCacheAware, in this order:
//   imbalance  the loads differ by more than `balance_abs` and by more than the factor
//   `balance_rel`:
//              the least loaded
//   session    the request names a session: the replica that its hash chooses, which stays the same
//              while the replicas do and moves few sessions when one comes or goes
//   prefix     a replica has seen more than `cache_threshold` of the prompt: the one with the most,
//              of equal ones the least loaded
//   load       power of two choices: the less loaded of two random replicas
// The other policies do what their names say; sessions go before them, imbalance does not.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fathom::router {

enum class Policy { kCacheAware, kPowerOfTwo, kRoundRobin, kRandom };
std::optional<Policy> policy_named(std::string_view name);  // "cache_aware", …

struct PolicyOptions {
  Policy policy = Policy::kCacheAware;
  double cache_threshold = 0.3;  // share of the prompt, 0 to 1
  int64_t balance_abs = 64;      // requests
  double balance_rel = 1.5;
};

// A replica that may get the request.
struct Candidate {
  std::string_view name;     // distinguishes replicas; sessions are hashed with it
  int64_t load = 0;          // requests that run or wait there
  double cache_use = 0;      // share of its KV cache in use, 0 to 1; decides between equal loads
  int64_t prefix_bytes = 0;  // how much of the prompt it has seen
};

enum class Reason { kOnly, kImbalance, kSession, kPrefix, kLoad, kRoundRobin, kRandom };
constexpr int kNumReasons = 7;
std::string_view name_of(Reason reason);  // "only", "imbalance", …

struct Choice {
  size_t index = 0;
  Reason reason = Reason::kOnly;
};

// `session`: empty if the request names none. `turn`: number of the request, for kRoundRobin.
// Precondition: there is a candidate.
Choice choose(const PolicyOptions& options, std::span<const Candidate> candidates,
              int64_t prompt_bytes, std::string_view session, int64_t turn, uint64_t random);

}  // namespace fathom::router
