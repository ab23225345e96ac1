#include "router/policy.h"

#include <algorithm>

#include "base/check.h"

namespace fathom::router {
namespace {

constexpr std::string_view kPolicies[] = {"cache_aware", "power_of_two", "round_robin", "random"};
constexpr std::string_view kReasons[] = {"only", "imbalance",   "session", "prefix",
                                         "load", "round_robin", "random"};
static_assert(std::size(kReasons) == kNumReasons);

bool is_less_loaded(const Candidate& a, const Candidate& b) {
  return a.load != b.load ? a.load < b.load : a.cache_use < b.cache_use;
}

// FNV-1a over both texts, then a finalizer (splitmix64's) because FNV's high bits mix late.
uint64_t weight_of(std::string_view session, std::string_view replica) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    hash = (hash ^ 0xFF) * 0x100000001b3;  // a byte that UTF-8 does not have separates the texts
  };
  add(session);
  add(replica);
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

// Rendezvous hashing (Thaler and Ravishankar 1998): the largest weight wins.
size_t session_place(std::span<const Candidate> candidates, std::string_view session) {
  const auto best = std::max_element(
      candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
        return weight_of(session, a.name) < weight_of(session, b.name);
      });
  return static_cast<size_t>(best - candidates.begin());
}

size_t less_loaded_of_two(std::span<const Candidate> candidates, uint64_t random) {
  const size_t size = candidates.size();
  const size_t first = (random & 0xFFFFFFFF) % size;
  // Any of the others.
  const size_t second = (first + 1 + (random >> 32) % (size - 1)) % size;
  return is_less_loaded(candidates[second], candidates[first]) ? second : first;
}

}  // namespace

std::optional<Policy> policy_named(std::string_view name) {
  const auto found = std::find(std::begin(kPolicies), std::end(kPolicies), name);
  if (found == std::end(kPolicies)) return std::nullopt;
  return static_cast<Policy>(found - std::begin(kPolicies));
}

std::string_view name_of(Reason reason) { return kReasons[static_cast<size_t>(reason)]; }

Choice choose(const PolicyOptions& options, std::span<const Candidate> candidates,
              int64_t prompt_bytes, std::string_view session, int64_t turn, uint64_t random) {
  FATHOM_CHECK(!candidates.empty(), "there is nothing to choose from");
  if (candidates.size() == 1) return {0, Reason::kOnly};
  const bool cache_aware = options.policy == Policy::kCacheAware;
  if (cache_aware) {
    const auto [least, most] =
        std::minmax_element(candidates.begin(), candidates.end(), is_less_loaded);
    if (most->load - least->load > options.balance_abs &&
        static_cast<double>(most->load) > options.balance_rel * static_cast<double>(least->load)) {
      return {static_cast<size_t>(least - candidates.begin()), Reason::kImbalance};
    }
  }
  if (!session.empty()) return {session_place(candidates, session), Reason::kSession};
  if (options.policy == Policy::kRoundRobin) {
    return {static_cast<size_t>(turn) % candidates.size(), Reason::kRoundRobin};
  }
  if (options.policy == Policy::kRandom) {
    return {static_cast<size_t>(random % candidates.size()), Reason::kRandom};
  }
  if (cache_aware) {
    const auto best = std::max_element(
        candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
          return a.prefix_bytes != b.prefix_bytes ? a.prefix_bytes < b.prefix_bytes
                                                  : is_less_loaded(b, a);
        });
    if (best->prefix_bytes > 0 && static_cast<double>(best->prefix_bytes) >
                                      options.cache_threshold * static_cast<double>(prompt_bytes)) {
      return {static_cast<size_t>(best - candidates.begin()), Reason::kPrefix};
    }
  }
  return {less_loaded_of_two(candidates, random), Reason::kLoad};
}

}  // namespace fathom::router
