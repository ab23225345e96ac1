#include "engine/lanes.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

// A prompt row that a lane has to compute costs as much as 1/256 of another sequence in it: an
// answer is some hundred rows. A row that it can copy costs an eighth of that, so that the texts of
// a conversation stay together until the lanes differ by more than they are worth.
constexpr double kRowsWorthASequence = 256;
constexpr double kCostOfACopiedRow = 0.125;

SchedulerOptions scheduler_options(const EngineOptions& options, const Runner& runner,
                                   DraftPolicy& draft_policy) {
  return {.max_num_seqs = options.max_num_seqs,
          .max_batched_tokens = options.max_batched_tokens,
          .max_prompt_logit_rows = options.max_prompt_logit_rows,
          .long_prompt_rows = options.long_prompt_rows > 0
                                  ? options.long_prompt_rows
                                  : ceil_div(options.max_batched_tokens, 8),
          .keys_worth_a_row = runner.keys_worth_a_row(),
          .max_drafts = std::min(options.max_drafts, runner.max_drafts()),
          .draft_policy = options.adapts_drafts ? &draft_policy : nullptr,
          .share_answers = runner.answers_equal_prompts(),
          .preempt_every = options.preempt_every};
}

}  // namespace

Lanes::Lane::Lane(Lanes& all, int lane, const EngineOptions& options, const Runner& runner,
                  std::unique_ptr<PageStore> page_store, const PrefixHasher& hasher)
    : lanes(all),
      number(lane),
      store(std::move(page_store)),
      pool(runner.num_pages()),
      tree(pool, options.prefix_caching, store.get(), hasher),
      scheduler(scheduler_options(options, runner, all.draft_policy_), tree,
                runner.num_lanes() > 1 && options.prefix_caching ? this : nullptr,
                all.orders_.get()) {
  const auto index = static_cast<size_t>(lane);
  if (index < options.cache_observers.size()) tree.watch(options.cache_observers[index].get());
}

Lanes::Lanes(const EngineOptions& options, Runner& runner,
             std::vector<std::unique_ptr<PageStore>> stores)
    : options_(options), runner_(runner) {
  FATHOM_CHECK(std::ssize(stores) == runner.num_lanes(), "{} stores for {} lanes", stores.size(),
               runner.num_lanes());
  if (options.prefill.link != nullptr) {
    orders_ = std::make_unique<PrefillOrders>(options.prefill, options.clock);
  }
  for (int lane = 0; lane < runner.num_lanes(); ++lane) {
    lanes_.emplace_back(*this, lane, options_, runner, std::move(stores[static_cast<size_t>(lane)]),
                        hasher_);
    if (orders_) orders_->add_lane(lanes_.back().pool, *runner.page_transfer(lane));
  }
  if (orders_) orders_->begin_landings();
}

PrefixChain Lanes::chain(uint64_t scope, std::string_view salt) const {
  return lanes_.front().tree.chain(scope, salt);
}

void Lanes::choose_lane(std::span<const std::unique_ptr<Sequence>> choices, int wanted) {
  int chosen = std::max(wanted, 0);
  if (wanted < 0 && lanes_.size() > 1) {
    Sequence& first = *choices.front();
    const auto pages = (first.len() - 1) / kPageSize;
    if (first.prefix) lanes_.front().tree.extend(*first.prefix, first.tokens);
    int64_t most_pages = 0;  // of the text, in any lane's pool
    for (const Lane& lane : lanes_) {
      if (first.prefix)
        most_pages = std::max(most_pages, lane.tree.find(*first.prefix, pages).pages);
    }
    double least = 0;
    for (const Lane& lane : lanes_) {
      const double work = work_of(lane, first, most_pages);
      if (lane.number == 0 || work < least) {
        least = work;
        chosen = lane.number;
      }
    }
  }
  for (const auto& choice : choices) {
    choice->lane = chosen;
    choice->stays_in_lane = wanted >= 0;
  }
}

// The lane's work if it gets the sequence, in sequences.
double Lanes::work_of(const Lane& lane, const Sequence& sequence, int64_t most_pages) const {
  const int64_t pages = (sequence.len() - 1) / kPageSize;
  const auto found =
      sequence.prefix ? lane.tree.find(*sequence.prefix, pages) : PrefixTree::Found{};
  const int64_t copied = std::max<int64_t>(0, most_pages - found.all());
  const int64_t computed = sequence.len() - (found.all() + copied) * kPageSize;
  const double rows =
      static_cast<double>(computed) + kCostOfACopiedRow * static_cast<double>(copied * kPageSize);
  const int64_t needed = ceil_div(sequence.len() + 1, kPageSize) - found.pages;
  // Where pages are missing it waits as if the lane were full.
  const int64_t waits = needed > lane.tree.available() - found.unheld ? options_.max_num_seqs : 0;
  return static_cast<double>(lane.load() + waits) + rows / kRowsWorthASequence;
}

void Lanes::schedule(StepPlan& plan, bool with_drafts) {
  plan.clear();
  planning_ = nullptr;
  if (lanes_.size() > 1) balance();
  const bool with_prompts = prompts_may_run();
  for (Lane& lane : lanes_) {
    try {
      lane.scheduler.schedule(plan, with_prompts, with_drafts);
    } catch (const std::bad_alloc&) {
      planning_ = lane.scheduler.planning();
      throw;
    }
    plan.lane_ends.push_back(plan.entries.size());
  }
  const auto is_prompt = [](const StepEntry& entry) { return entry.sequence->remaining() > 1; };
  const auto is_cut = [](const StepEntry& entry) { return !entry.samples; };
  had_prompts_ = std::any_of(plan.entries.begin(), plan.entries.end(), is_prompt);
  left_prompts_ = std::any_of(plan.entries.begin(), plan.entries.end(), is_cut) ||
                  std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
                    return with_prompts && lane.scheduler.num_waiting() > 0;
                  });
  update_roles();
}

// After a step was planned: who still waits has no room in any lane, but for one that stays in its
// own.
void Lanes::update_roles() {
  if (options_.prefill.roles == nullptr) return;
  const auto is_full = [](const Lane& lane) {
    const Sequence* const waiting = lane.scheduler.first_waiting();
    return waiting != nullptr && !waiting->stays_in_lane && !lane.scheduler.would_admit_first();
  };
  try {
    options_.prefill.roles->update({.rows_missing = orders_->rows_missing(),
                                    .decoding = num_running() - orders_->num_orders(),
                                    .is_full = std::any_of(lanes_.begin(), lanes_.end(), is_full)});
  } catch (const std::bad_alloc&) {  // of would_admit_first(); the next step updates them
  }
}

void Lanes::rest() {
  if (options_.prefill.roles != nullptr) options_.prefill.roles->update({.is_idle = true});
}

bool Lanes::prompts_may_run() const {
  if (lanes_.size() == 1 || !had_prompts_ || left_prompts_) return true;
  const auto has_prompts = [](const Lane& lane) { return lane.scheduler.has_prompts(); };
  const auto has_decode = [](const Lane& lane) { return lane.scheduler.has_decode(); };
  return std::all_of(lanes_.begin(), lanes_.end(), has_prompts) ||
         std::none_of(lanes_.begin(), lanes_.end(), has_decode);
}

// Sequences move only while they wait: they have no pages, and all of their tokens are known.
void Lanes::balance() {
  for (Lane& lane : lanes_) {
    for (;;) {
      Sequence* const sequence = lane.scheduler.first_waiting();
      if (sequence == nullptr || sequence->stays_in_lane || sequence->num_unknown > 0) break;
      planning_ = sequence;
      if (lane.scheduler.would_admit_first()) break;
      Lane* const other = roomiest_for(*sequence);
      if (other == nullptr) break;
      lane.scheduler.withdraw(*sequence);
      sequence->lane = other->number;
      other->scheduler.add(*sequence);
      ++num_moves_;
    }
  }
}

// The lane with the least load that would admit the sequence now; null: none.
Lanes::Lane* Lanes::roomiest_for(const Sequence& sequence) {
  Lane* best = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.number == sequence.lane || !lane.scheduler.has_room_for(sequence)) continue;
    if (best == nullptr || lane.load() < best->load()) best = &lane;
  }
  return best;
}

void Lanes::bring_prefix(Lane& to, const Sequence& sequence, int64_t max_pages) {
  const PrefixTree::Found here = to.tree.find(*sequence.prefix, max_pages);
  const Lane* from = nullptr;
  int64_t most = here.all();
  for (const Lane& lane : lanes_) {
    if (lane.number == to.number || !runner_.can_copy_pages(lane.number, to.number)) continue;
    const int64_t pages = lane.tree.find(*sequence.prefix, max_pages).pages;
    if (pages <= most) continue;
    most = pages;
    from = &lane;
  }
  if (from == nullptr) return;
  from->tree.find_pages(*sequence.prefix, sequence.tokens, most, sources_);
  if (std::ssize(sources_) <= here.all() || !to.scheduler.would_admit(sequence)) return;
  targets_.clear();
  targets_.reserve(sources_.size());
  try {
    to.tree.take(*sequence.prefix, sequence.tokens, here.pages, targets_);
    copy_pages(*from, to, sequence, std::ssize(targets_));
  } catch (const std::bad_alloc&) {
    to.tree.release_all(targets_);
    throw;
  }
  to.tree.release_all(targets_);
}

// Copies pages sources_[first_page …] of the text into new pages of the lane, and inserts them.
void Lanes::copy_pages(const Lane& from, Lane& to, const Sequence& sequence, int64_t first_page) {
  const int64_t count = std::ssize(sources_) - first_page;
  if (to.tree.allocate(count, targets_) != PrefixTree::Room::kNow) return;
  for (auto page = static_cast<size_t>(first_page); page < sources_.size(); ++page) {
    runner_.copy_page(from.number, sources_[page], to.number, targets_[page]);
    if (!to.tree.insert(*sequence.prefix, sequence.tokens, static_cast<int64_t>(page), targets_)) {
      return;
    }
    ++num_pages_copied_;
  }
}

const std::vector<Lanes::Stranded>& Lanes::take_pieces() {
  stranded_.clear();
  if (orders_ == nullptr) return stranded_;
  const PrefillOptions& options = options_.prefill;
  for (const PrefillOrders::Ended& order : orders_->take_pieces()) {
    Sequence& sequence = *order.sequence;
    Scheduler& scheduler = of(sequence).scheduler;
    const int64_t missing = sequence.len() - 1 - sequence.computed;
    if (order.has_arrived) {
      num_cached_there_ += scheduler.arrive(sequence, order.cached_tokens);
    } else if (order.why.code != Code::kUnavailable &&
               ++sequence.prefill_attempts < options.max_attempts) {
      continue;  // the next step orders it again
    } else if (missing <= options.most_rows_here || scheduler.num_running() == 1) {
      scheduler.prefill_here(sequence);
      ++num_prefilled_here_;
    } else {
      stranded_.push_back({&sequence, order.why});
      ++num_stranded_;
    }
  }
  return stranded_;
}

void Lanes::advance(const StepPlan& plan) {
  size_t begin = 0;
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    const size_t end = plan.lane_ends[lane];
    lanes_[lane].scheduler.advance(std::span(plan.entries).subspan(begin, end - begin));
    begin = end;
  }
}

void Lanes::preempt_all() {
  for (Lane& lane : lanes_) {
    try {
      lane.scheduler.preempt_all();
    } catch (const std::bad_alloc&) {
      planning_ = lane.scheduler.planning();
      throw;
    }
  }
}

bool Lanes::has_work() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.scheduler.has_work(); });
}

int64_t Lanes::num_running() const {
  int64_t running = 0;
  for (const Lane& lane : lanes_) running += lane.scheduler.num_running();
  return running;
}

// Waits in one lane at most.
void Lanes::take_ended(bool wait) {
  for (Lane& lane : lanes_) {
    const bool waits = wait && lane.tree.copies_in_flight() > 0;
    lane.tree.take_ended(waits);
    if (waits) wait = false;
  }
}

int64_t Lanes::copies_in_flight() const {
  int64_t copies = 0;
  for (const Lane& lane : lanes_) copies += lane.tree.copies_in_flight();
  return copies;
}

void Lanes::clear_cache() {
  for (Lane& lane : lanes_) lane.tree.clear();
}

void Lanes::publish(EngineStats& stats) const {
  stats.lanes.resize(lanes_.size());
  stats.running = stats.waiting = stats.preemptions = 0;
  stats.pages_total = stats.pages_used = stats.pages_cached = stats.pages_in_transfer = 0;
  stats.pages_quarantined = 0;
  stats.pages_stored = stats.prefix_returns = stats.prefix_evictions = 0;
  for (const Lane& lane : lanes_) {
    LaneStats& own = stats.lanes[static_cast<size_t>(lane.number)];
    own = {.running = lane.scheduler.num_running(),
           .waiting = lane.scheduler.num_waiting(),
           .pages_total = lane.pool.total(),
           .pages_used = lane.pool.used(),
           .pages_cached = lane.pool.cached(),
           .pages_in_transfer = lane.pool.in_transfer(),
           .pages_quarantined = lane.pool.quarantined(),
           .preemptions = lane.scheduler.num_preemptions()};
    stats.running += own.running;
    stats.waiting += own.waiting;
    stats.pages_total += own.pages_total;
    stats.pages_used += own.pages_used;
    stats.pages_cached += own.pages_cached;
    stats.preemptions += own.preemptions;
    stats.pages_in_transfer += own.pages_in_transfer;
    stats.pages_quarantined += own.pages_quarantined;
    stats.pages_stored += lane.tree.num_stored();
    stats.prefix_returns += lane.tree.num_returns();
    stats.prefix_evictions += lane.tree.num_evictions();
  }
  if (orders_) {
    const PrefillStats orders = orders_->stats();
    stats.prefill.orders = orders.orders;
    stats.prefill.arrived = orders.arrived;
    stats.prefill.failed = orders.failed;
    stats.prefill.pieces = orders.pieces;
    stats.prefill.computed_here = num_prefilled_here_;
    stats.prefill.refused = num_stranded_;
    stats.prefill.cached_tokens = num_cached_there_;
  }
  stats.sequences_moved = num_moves_;
  stats.pages_copied = num_pages_copied_;
}

void Lanes::check_idle() const {
  for (const Lane& lane : lanes_) {
    const int64_t draining = orders_ ? orders_->pages_draining(lane.number) : 0;
    FATHOM_CHECK(lane.pool.used() == 0 && lane.pool.quarantined() == draining,
                 "{} of {} pages of lane {} are used by nobody, {} quarantined, rows land in {}",
                 lane.pool.used(), lane.pool.total(), lane.number, lane.pool.quarantined(),
                 draining);
    try {
      lane.tree.check_invariant();
    } catch (const std::bad_alloc&) {  // recounted when the engine is idle again
    }
  }
}

}  // namespace fathom
