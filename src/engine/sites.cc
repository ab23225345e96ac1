#include "engine/sites.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "engine/local_prefill.h"

namespace fathom {
namespace {

// Ids of the prefill site's requests are larger, those of the decode site's smaller.
constexpr RequestId kPrefillIds = RequestId{1} << 63;

// Picks the entries of `lanes` from `all`, which has one for each lane of the whole engine.
template <typename T>
std::vector<T> of_lanes(const std::vector<T>& all, const std::vector<int>& lanes) {
  std::vector<T> own;
  if (all.empty()) return own;
  for (const int lane : lanes) own.push_back(all[static_cast<size_t>(lane)]);
  return own;
}

// Orders count as requests in the prefill site's queue: there is room for all that the decode site
// can have, so that it is the decode site's queue that is full.
EngineOptions prefill_options(const EngineOptions& options, const SitesOptions& sites) {
  EngineOptions own = options;
  own.max_queued_requests =
      options.max_queued_requests +
      options.max_num_seqs * (std::ssize(sites.decode_lanes) + std::ssize(sites.prefill_lanes));
  own.max_queued_tokens = std::numeric_limits<int64_t>::max();
  own.cache_observers = of_lanes(options.cache_observers, sites.prefill_lanes);
  own.ids_after = kPrefillIds;
  return own;
}

void add(SpeculationStats& to, const SpeculationStats& more) {
  to.drafts += more.drafts;
  to.draft_tokens += more.draft_tokens;
  to.accepted_tokens += more.accepted_tokens;
  for (size_t i = 0; i < to.accepted_per_pos.size(); ++i) {
    to.accepted_per_pos[i] += more.accepted_per_pos[i];
  }
}

}  // namespace

Result<Sites> Sites::create(const EngineOptions& options, std::unique_ptr<Runner> prefill,
                            const Runner& decode, const SitesOptions& sites,
                            const std::shared_ptr<const Tokenizer>& tokenizer) {
  FATHOM_CHECK(std::ssize(sites.prefill_lanes) == prefill->num_lanes() &&
                   std::ssize(sites.decode_lanes) == decode.num_lanes(),
               "{} and {} lanes, runners have {} and {}", sites.prefill_lanes.size(),
               sites.decode_lanes.size(), prefill->num_lanes(), decode.num_lanes());
  if (prefill->page_transfer(0) == nullptr) {
    return invalid("this device cannot send pages to another engine");
  }
  Sites both;
  both.sites_ = sites;
  RoleLimits limits = sites.roles;
  limits.prefill_step_rows = options.max_batched_tokens * prefill->num_lanes();
  limits.prefill_slots = options.max_num_seqs * prefill->num_lanes();
  limits.decode_slots = options.max_num_seqs * decode.num_lanes();
  both.roles_ = std::make_shared<Roles>(limits);
  both.mailbox_ = std::make_shared<PieceMailbox>(sites.window_bytes);
  FATHOM_TRY(both.prefill_,
             Engine::create(prefill_options(options, sites), std::move(prefill), tokenizer));
  return both;
}

EngineOptions Sites::decode_options(const EngineOptions& options) const {
  EngineOptions own = options;
  own.cache_observers = of_lanes(options.cache_observers, sites_.decode_lanes);
  own.prefill.mailbox = mailbox_;
  own.prefill.link = std::make_shared<LocalPrefill>(*prefill_, mailbox_);
  own.prefill.with_digests = sites_.with_digests;
  own.prefill.roles = roles_;
  return own;
}

// A dead engine refuses with the reason.
Result<> Sites::is_alive() const { return prefill_->is_dead() ? prefill_->has_room() : Result<>(); }

Result<> Sites::choose_lane(Request& request) const {
  if (!request.lane) return {};
  const int lane = *request.lane;
  const auto own = std::find(sites_.decode_lanes.begin(), sites_.decode_lanes.end(), lane);
  if (own != sites_.decode_lanes.end()) {
    request.lane = static_cast<int>(own - sites_.decode_lanes.begin());
    return {};
  }
  const auto all = std::ssize(sites_.decode_lanes) + std::ssize(sites_.prefill_lanes);
  if (lane < 0 || lane >= all) {
    return invalid("the data-parallel rank is {}, there are {}: 0 to {}", lane, all, all - 1);
  }
  return invalid("the data-parallel rank is {}, which computes prompts for those that decode",
                 lane);
}

bool Sites::takes(const Request& request) const {
  return !request.lane && roles_->prefill_takes(request.sampling.n);
}

Result<RequestId> Sites::submit(Request request, EventSink sink) const {
  const int64_t choices = request.sampling.n;
  roles_->begin_choices(choices);
  auto id = prefill_->submit(std::move(request),
                             [sink = std::move(sink), roles = roles_](const Event& event) {
                               if (event.finish) roles->end_choices(1);
                               sink(event);
                             });
  if (id) {
    roles_->count_request();
  } else {
    roles_->end_choices(choices);
  }
  return id;
}

bool Sites::has(RequestId request) const { return request > kPrefillIds; }

EngineStats Sites::with_prefill(EngineStats decode) const {
  const EngineStats prefill = prefill_->stats();
  EngineStats all = std::move(decode);
  // Orders are requests of the decode site, and counted there. Those that it took whole are
  // admitted at once or soon.
  all.running += std::max<int64_t>(0, prefill.running + prefill.waiting - prefill.prefill.exports);
  all.prompt_tokens += prefill.prompt_tokens - prefill.prefill.export_prompt_tokens;
  all.cached_tokens += prefill.cached_tokens - prefill.prefill.export_cached_tokens;
  all.pages_total += prefill.pages_total;
  all.pages_used += prefill.pages_used;
  all.pages_cached += prefill.pages_cached;
  all.pages_in_transfer += prefill.pages_in_transfer;
  all.pages_quarantined += prefill.pages_quarantined;
  all.pages_stored += prefill.pages_stored;
  all.steps += prefill.steps;
  all.generated_tokens += prefill.generated_tokens;
  all.preemptions += prefill.preemptions;
  all.step_seconds += prefill.step_seconds;
  all.rows += prefill.rows;
  for (size_t i = 0; i < all.steps_by_rows.size(); ++i) {
    all.steps_by_rows[i] += prefill.steps_by_rows[i];
  }
  all.prefix_queries += prefill.prefix_queries;
  all.prefix_hits += prefill.prefix_hits;
  all.prefix_returns += prefill.prefix_returns;
  all.prefix_evictions += prefill.prefix_evictions;
  all.stopped += prefill.stopped;
  all.length += prefill.length;
  all.aborted += prefill.aborted;
  all.failed += prefill.failed;
  all.expired += prefill.expired;
  all.last_step_age_seconds = std::min(all.last_step_age_seconds, prefill.last_step_age_seconds);
  add(all.speculation, prefill.speculation);
  all.prefill.pages_sent = prefill.prefill.pages_sent;
  all.sequences_moved += prefill.sequences_moved;
  all.pages_copied += prefill.pages_copied;
  std::vector<LaneStats> lanes(all.lanes.size() + prefill.lanes.size());
  for (size_t i = 0; i < all.lanes.size(); ++i) {
    lanes[static_cast<size_t>(sites_.decode_lanes[i])] = all.lanes[i];
  }
  for (size_t i = 0; i < prefill.lanes.size(); ++i) {
    lanes[static_cast<size_t>(sites_.prefill_lanes[i])] = prefill.lanes[i];
  }
  all.lanes = std::move(lanes);
  all.roles = roles_->stats();
  all.roles->prefill_lanes = sites_.prefill_lanes;
  return all;
}

}  // namespace fathom
