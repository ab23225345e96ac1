#include "engine/engine_loop.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "base/out_of_memory.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

// Allocated up front, because they are needed when memory is short.
const Status kAborted = {Code::kUnavailable, "the request was aborted"};
const Status kStopped = {Code::kUnavailable, "the engine was stopped"};
const Status kDead = {Code::kUnavailable, "engine is dead"};  // short: does not allocate

EngineOptions with_clock(EngineOptions options) {
  if (!options.clock) options.clock = std::chrono::steady_clock::now;
  return options;
}

Inbox::Limits inbox_limits(const EngineOptions& options, int64_t num_pages) {
  return {.max_requests = options.max_queued_requests,
          .max_tokens =
              options.max_queued_tokens > 0 ? options.max_queued_tokens : 4 * num_pages * kPageSize,
          .ids_after = options.ids_after};
}

}  // namespace

EngineLoop::EngineLoop(const EngineOptions& options, std::unique_ptr<Runner> runner,
                       std::vector<std::unique_ptr<PageStore>> stores)
    : options_(with_clock(options)),
      runner_(std::move(runner)),
      lanes_(options_, *runner_, std::move(stores)),
      exports_(*runner_),
      steps_(static_cast<size_t>(runner_->max_steps_in_flight())),
      inbox_(inbox_limits(options, runner_->num_lanes() * runner_->num_pages())),
      last_step_(now()) {
  publish_stats();
  runner_->watch_loss([this] { inbox_.lose(); });
  if (options_.prefill.mailbox) options_.prefill.mailbox->watch([this] { inbox_.poke(); });
}

EngineLoop::~EngineLoop() {
  if (options_.prefill.mailbox) options_.prefill.mailbox->watch(nullptr);
  runner_->watch_loss(nullptr);
}

void EngineLoop::run() {
  while (true) {
    drain_inbox();
    if (stopping_) return;
    expire();
    take_pieces();
    send_pages();
    if (is_idle()) {
      lanes_.take_ended(/*wait=*/true);
      publish_stats();  // pages may have left quarantine, or a copy
      continue;
    }
    const bool has_begun = may_begin() && lanes_.has_work() && begin_step();
    if (steps_in_flight() > 0 && (!has_begun || !may_begin())) {
      end_step();
    } else if (!has_begun && lanes_.has_work()) {
      // Nothing can run before a copy has ended, or another engine has sent or taken something.
      if (lanes_.copies_in_flight() == 0) wait_for_peer();
      lanes_.take_ended(/*wait=*/true);
    }
    if (is_idle()) check_idle();
    publish_stats();
  }
}

void EngineLoop::drain_inbox() {
  inbox_.take(news_, /*wait=*/is_idle() && lanes_.copies_in_flight() == 0);
  for (std::unique_ptr<ActiveRequest>& request : news_.requests) {
    add_request(request);
  }
  for (const RequestId id : news_.aborts) {
    if (const auto it = requests_.find(id); it != requests_.end()) {
      end_request(*it->second, FinishReason::kAbort, kAborted);
    }
  }
  if (news_.flush) lanes_.clear_cache();
  if (std::exchange(news_.stop, false)) {
    stopping_ = true;
    end_all(FinishReason::kAbort, kStopped);
  }
  if (news_.lost && !death_ && runner_->is_lost()) die(runner_->loss());
  if (death_) end_all(FinishReason::kError, *death_);  // those submitted before it was known
  if (is_idle()) {
    check_idle();
    publish_stats();
  }
}

// Out of memory may leave the request with only some sequences in the scheduler. Ending them is
// valid in either state.
void EngineLoop::add_request(std::unique_ptr<ActiveRequest>& request) {
  ActiveRequest& added = *request;
  counters_.prefill.exports += added.request.page_export != nullptr;
  try {
    requests_.try_emplace(added.id).first->second = std::move(request);
    enqueue(added);
  } catch (const std::bad_alloc&) {
    end_request(added, FinishReason::kAbort, out_of_memory());
  }
}

void EngineLoop::enqueue(ActiveRequest& request) {
  const bool has_choices = request.sequences.size() > 1;
  for (const auto& sequence : request.sequences) {
    if (options_.prefix_caching) {
      sequence->prefix = lanes_.chain(0, request.request.cache_salt);
    } else if (has_choices) {
      sequence->prefix = lanes_.chain(request.id, "");
    }
    sequence->order = order_of(*sequence);
    sequence->arrival = ++arrivals_;
  }
  lanes_.choose_lane(request.sequences, request.request.lane.value_or(-1));
  for (const auto& sequence : request.sequences) lanes_.add(*sequence);
  const Time queued = request.sequences.front()->timings.queued;
  if (options_.max_queue_time.count() > 0) {
    must_start_.push_back({queued + options_.max_queue_time, request.id});
  }
  if (options_.max_total_time.count() > 0) {
    must_end_.push_back({queued + options_.max_total_time, request.id});
  }
}

// All requests age at the same rate, so the order of two sequences never changes: a priority level
// is worth a fixed difference of submission times.
int64_t EngineLoop::order_of(const Sequence& sequence) const {
  if (options_.priority_ageing.count() == 0) return 0;
  const int64_t level = std::clamp(sequence.priority, -kMostPriorityLevels, kMostPriorityLevels);
  const auto queued = std::chrono::nanoseconds(sequence.timings.queued.time_since_epoch());
  return queued.count() + level * options_.priority_ageing.count();
}

// Looks only at the front of each list. Requests arrive in the order in which they were queued, up
// to the small difference between concurrent submit() calls.
void EngineLoop::expire() {
  if (must_start_.empty() && must_end_.empty()) return;
  const Time time = now();
  const auto expire_from = [&](std::deque<Deadline>& deadlines, bool only_queued,
                               std::chrono::duration<double> limit, const char* state,
                               const char* field) {
    while (!deadlines.empty()) {
      const auto it = requests_.find(deadlines.front().request);
      const bool gone = it == requests_.end() || (only_queued && !it->second->counted_as_queued);
      if (!gone && deadlines.front().at > time) return;
      deadlines.pop_front();
      if (gone) continue;
      ++counters_.expired;
      const std::chrono::duration<double> age =
          time - it->second->sequences.front()->timings.queued;
      Status why = out_of_memory();
      try {
        why = {Code::kDeadlineExceeded,
               fmt::format("the request {} {:.1f} s after it was submitted, {} is {:.1f} s", state,
                           age.count(), field, limit.count())};
      } catch (const std::bad_alloc&) {
      }
      end_request(*it->second, FinishReason::kAbort, why);
    }
  };
  expire_from(must_start_, true, options_.max_queue_time, "has not started", "max_queue_time");
  expire_from(must_end_, false, options_.max_total_time, "has not ended", "max_total_time");
}

// A step with drafts, which need the tokens of the step before, is in flight alone.
bool EngineLoop::may_begin() const {
  if (steps_in_flight() == 0) return true;
  return steps_in_flight() < std::ssize(steps_) &&
         (std::min(options_.max_drafts, runner_->max_drafts()) == 0 || undrafted_steps_ > 0);
}

// After a step was planned, before it begins.
void EngineLoop::limit_overlap(const StepPlan& plan) {
  if (steps_in_flight() > 0) {
    undrafted_steps_ = plan.started.empty() ? undrafted_steps_ - 1 : 0;
    return;
  }
  bool could_draft = false, drafts = false;
  for (const StepEntry& entry : plan.entries) {
    could_draft |= entry.num_tokens == 1 && entry.samples && entry.sequence->output_len() > 0;
    drafts |= entry.num_drafts > 0;
  }
  const bool rests = options_.adapts_drafts && could_draft && !drafts;
  undrafted_steps_ = rests ? lanes_.draft_policy().rest() : 0;
}

// Returns false if no step has begun: all sequences wait for the step in flight, or memory ran out.
bool EngineLoop::begin_step() {
  Step& step = this->step(begun_ + 1);
  if (!plan(step.plan) || step.plan.empty()) return false;
  step.number = begun_ + 1;
  step.begun = step.drafted = now();
  record_step_shape(step.plan);
  publish_stats();  // before a step that may hang, so that its shape is visible
  if (const Result<> begun = begin(step); !begun) {
    note_failure(begun.error());
    if (!death_) fail(step.plan, begun.error());  // if dead, its sequences have ended already
    return false;
  }
  ++begun_;
  for (const StepEntry& entry : step.plan.entries) {
    entry.sequence->request->last_step = step.number;
  }
  lanes_.advance(step.plan);
  return true;
}

// Returns false if memory ran out; the sequence that needed it, if it was one, has ended. Sequences
// planned before it keep their pages and are planned again.
bool EngineLoop::plan(StepPlan& plan) {
  bool is_planned = true;
  try {
    lanes_.schedule(plan, /*with_drafts=*/steps_in_flight() == 0);
    limit_overlap(plan);
  } catch (const std::bad_alloc&) {
    is_planned = false;
  }
  note_started(plan);
  if (!is_planned && lanes_.planning() != nullptr) {
    end_early(*lanes_.planning(), FinishReason::kError, out_of_memory());
  }
  return is_planned;
}

// A step writes only to its own sequences' pages, which are not shared before advance(). So an
// error leaves nothing behind once these sequences have ended.
Result<> EngineLoop::begin(Step& step) {
  try {
    FATHOM_RETURN_IF_ERROR(propose_drafts(step));
    choose_rows(step, runner_->host_stream());
    const std::span<const ForwardBatch> batches = builder_.build(step.plan, step.rows);
    add_unknown_tokens(step);
    return runner_->begin(batches, step.rows);
  } catch (const std::bad_alloc&) {
    return tl::unexpected(out_of_memory());
  }
}

// Asks the runner for the drafts that the plan has room for.
Result<> EngineLoop::propose_drafts(Step& step) {
  int64_t rows = 0, drafting = 0, most = 0;
  for (const StepEntry& entry : step.plan.entries) {
    rows += entry.has_draft_rows();
    drafting += entry.num_drafts > 0;
    most = std::max(most, entry.num_drafts);
  }
  if (rows == 0) return {};
  choose_draft_rows(step);
  FATHOM_TRY(const std::span<const int32_t> drafts,
             runner_->draft(builder_.build_drafts(step.plan, step.rows), step.rows));
  for (const StepEntry& entry : step.plan.entries) {
    if (entry.has_draft_rows()) entry.sequence->mtp_len = entry.sequence->computed + 1;
  }
  take_drafts(step.plan, drafts);
  step.drafted = now();
  if (most > 0) {
    lanes_.draft_policy().record_drafting(
        drafting, most, std::chrono::duration<double>(step.drafted - step.begun).count());
  }
  return {};
}

void EngineLoop::end_step() {
  const auto sampled = runner_->finish();
  Step& step = this->step(ended_ + 1);
  if (sampled) {
    failed_steps_ = 0;
    count_step(step);
    apply_sampled_tokens(step, *sampled);
  } else {
    note_failure(sampled.error());
    // Steps begun since may have shared the pages that the failed one was to write.
    for (int64_t number = ended_ + 1; number <= begun_; ++number) {
      fail(this->step(number).plan, sampled.error());
    }
    recompute_the_rest();
    lanes_.clear_cache();
  }
  ++ended_;  // only now, since the step refers to sequences that have ended
  erase_finished_requests();
}

void EngineLoop::apply_sampled_tokens(Step& step, std::span<const SampledToken> sampled) {
  std::optional<StepResults> results;
  try {
    results.emplace(step, sampled, runner_->host_stream());
  } catch (const std::bad_alloc&) {
    // Some grammars may have consumed their token and others not, so none of these sequences can go
    // on.
    return fail(step.plan, out_of_memory());
  }
  for (const StepEntry& entry : step.plan.entries) deliver_tokens(entry, *results);
}

void EngineLoop::deliver_tokens(const StepEntry& entry, StepResults& results) {
  if (entry.sequence->is_prompt_only) return export_rows(entry);
  Event& event = new_event(*entry.sequence);
  bool has_news = false;
  try {
    has_news = results.append(entry, event);
  } catch (const std::bad_alloc&) {
    return end_early(*entry.sequence, FinishReason::kError, out_of_memory());
  }
  if (!has_news) return;
  const int64_t accepted = std::max<int64_t>(0, std::ssize(event.ids) - 1);
  count_drafts(entry, accepted);
  lanes_.commit_tokens(*entry.sequence, accepted);
  emit(*entry.sequence, event);
}

void EngineLoop::count_drafts(const StepEntry& entry, int64_t accepted) {
  lanes_.draft_policy().record_window(*entry.sequence, entry.num_drafts, accepted);
  if (entry.num_drafts == 0) return;
  SpeculationStats& stats = counters_.speculation;
  ++stats.drafts;
  stats.draft_tokens += entry.num_drafts;
  stats.accepted_tokens += accepted;
  for (int64_t i = 0; i < accepted; ++i) ++stats.accepted_per_pos[static_cast<size_t>(i)];
  entry.sequence->usage.draft_tokens += entry.num_drafts;
  entry.sequence->usage.accepted_tokens += accepted;
}

// Ends the remaining sequences of a step that did not begin or that failed.
void EngineLoop::fail(const StepPlan& plan, const Status& why) {
  for (const StepEntry& entry : plan.entries) {
    if (entry.sequence->phase == Sequence::Phase::kFinished) continue;
    end_early(*entry.sequence, FinishReason::kError, why);
  }
}

// A running sequence without a part in the failed steps may still hold pages that they were to
// write. It gives up its pages and is recomputed.
void EngineLoop::recompute_the_rest() {
  while (lanes_.num_running() > 0) {
    try {
      lanes_.preempt_all();
    } catch (const std::bad_alloc&) {
      end_early(*lanes_.planning(), FinishReason::kError, out_of_memory());
    }
  }
}

// Out of memory (kUnavailable) is not a failure of the device and does not count.
void EngineLoop::note_failure(const Status& why) {
  if (why.code == Code::kInternal) ++failed_steps_;
  if (!death_ && (runner_->is_lost() || failed_steps_ >= kMostFailedSteps)) die(why);
}

// The death is visible to all callers before the first client gets its error. Steps in flight are
// still finished, but their sequences have ended.
void EngineLoop::die(const Status& why) {
  death_ = kDead;
  try {
    death_ = {Code::kUnavailable, fmt::format("the engine is dead: {}", why.message)};
    inbox_.die(*death_);
  } catch (const std::bad_alloc&) {
    inbox_.die(Status(kDead));
  }
  end_all(FinishReason::kError, *death_);
  lanes_.clear_cache();
}

void EngineLoop::end_all(FinishReason reason, const Status& why) {
  while (!requests_.empty()) end_request(*requests_.begin()->second, reason, why);
}

void EngineLoop::note_started(const StepPlan& plan) {
  if (plan.started.empty()) return;
  const Time time = now();
  for (Sequence* sequence : plan.started) {
    sequence->timings.started = time;
    counters_.cached_tokens += sequence->usage.cached_tokens;
    counters_.prompt_tokens += sequence->prompt_len;
    if (sequence->is_prompt_only) {
      counters_.prefill.export_prompt_tokens += sequence->prompt_len;
      counters_.prefill.export_cached_tokens += sequence->usage.cached_tokens;
    }
    if (options_.prefix_caching) {
      counters_.prefix_queries += sequence->prompt_len;
      counters_.prefix_hits += sequence->usage.cached_tokens;
    }
    leave_queue(*sequence->request);
  }
}

void EngineLoop::record_step_shape(const StepPlan& plan) {
  counters_.step_sequences = std::ssize(plan.entries);
  counters_.step_rows = counters_.step_longest = 0;
  for (const StepEntry& entry : plan.entries) {
    counters_.step_rows += entry.num_rows();
    counters_.step_longest =
        std::max(counters_.step_longest, entry.sequence->computed + entry.num_rows());
  }
}

// Counts a step that has ended. A step begun while the previous one ran is timed from that one's
// end.
void EngineLoop::count_step(const Step& step) {
  const Time begun = std::max(step.begun, last_step_);
  last_step_ = now();
  ++counters_.steps;
  counters_.step_seconds += std::chrono::duration<double>(last_step_ - begun).count();
  int64_t rows = 0;
  for (const StepEntry& entry : step.plan.entries) rows += entry.num_rows();
  counters_.rows += rows;
  const auto is_decode = [](const StepEntry& entry) {
    return entry.num_tokens == 1 && entry.samples;
  };
  if (std::all_of(step.plan.entries.begin(), step.plan.entries.end(), is_decode)) {
    const std::chrono::duration<double> seconds = last_step_ - std::max(step.drafted, begun);
    lanes_.draft_policy().record_step(std::ssize(step.plan.entries), rows, seconds.count());
  }
  const auto kind = std::ranges::lower_bound(kStepRowBounds, rows) - std::begin(kStepRowBounds);
  ++counters_.steps_by_rows[static_cast<size_t>(kind)];
}

void EngineLoop::leave_queue(ActiveRequest& request) {
  if (std::exchange(request.counted_as_queued, false)) inbox_.note_left_queue(request);
}

void EngineLoop::end_request(ActiveRequest& request, FinishReason reason, const Status& why) {
  // The last emission destroys the request, and its list of sequences with it.
  const size_t count = request.sequences.size();
  int left = request.unfinished;
  for (size_t i = 0; i < count && left > 0; ++i) {
    Sequence& sequence = *request.sequences[i];
    if (sequence.phase == Sequence::Phase::kFinished) continue;
    --left;
    end_early(sequence, reason, why);
  }
}

void EngineLoop::end_early(Sequence& sequence, FinishReason reason, const Status& why) {
  Event& event = new_event(sequence);
  event.finish = reason;
  try {
    event.error = why;
  } catch (const std::bad_alloc&) {
    event.error = out_of_memory();
  }
  emit(sequence, event);
}

// Passes the event to the caller. A sequence that has ended releases its pages first; a request
// whose last choice has ended is destroyed afterwards.
void EngineLoop::emit(Sequence& sequence, Event& event) {
  ActiveRequest& request = *sequence.request;
  const int64_t num_new = std::ssize(event.ids);
  counters_.generated_tokens += num_new;
  if (num_new > 0 && sequence.output_len() == num_new) sequence.timings.first_token = last_step_;
  if (event.finish) end_sequence(sequence, event);
  const bool is_last = event.last;
  if (is_last) {
    leave_queue(request);
    publish_stats();
  }
  request.sink(event);
  if (is_last) {
    forget(request);
    inbox_.note_ended();
  }
}

// Destroys a finished request, or keeps it until the steps in flight that refer to it have ended.
void EngineLoop::forget(ActiveRequest& request) {
  const auto it = requests_.find(request.id);
  if (it == requests_.end()) return;  // it was not added, for lack of memory
  if (request.last_step > ended_) {
    request.next_ended = std::move(ended_requests_);
    ended_requests_ = std::move(it->second);
  }
  requests_.erase(it);
}

void EngineLoop::erase_finished_requests() {
  std::unique_ptr<ActiveRequest>* link = &ended_requests_;
  while (*link != nullptr) {
    if ((*link)->last_step > ended_) {
      link = &(*link)->next_ended;
    } else {
      *link = std::move((*link)->next_ended);
    }
  }
}

void EngineLoop::end_sequence(Sequence& sequence, Event& event) {
  if (sequence.is_prompt_only) {
    exports_.remove(sequence);
    --counters_.prefill.exports;
  }
  lanes_.finish(sequence);
  RequestTimings& timings = sequence.timings;
  timings.finished = now();
  if (timings.started == Time{}) timings.started = timings.finished;
  if (timings.first_token == Time{}) timings.first_token = timings.finished;
  sequence.usage.completion_tokens = sequence.output_len();
  event.timings = timings;
  event.usage = sequence.usage;
  event.last = --sequence.request->unfinished == 0;
  if (sequence.is_prompt_only) return;  // no choice of a client
  switch (*event.finish) {
    case FinishReason::kStop:
      ++counters_.stopped;
      break;
    case FinishReason::kLength:
      ++counters_.length;
      break;
    case FinishReason::kAbort:
      ++counters_.aborted;
      break;
    case FinishReason::kError:
      ++counters_.failed;
      break;
  }
}

Event& EngineLoop::new_event(const Sequence& sequence) {
  event_.request = sequence.request->id;
  event_.index = sequence.index;
  event_.ids.clear();
  event_.text.clear();
  event_.logprobs.clear();
  event_.prompt_logprobs.clear();
  // Only an event with `finish` has set the fields below.
  if (std::exchange(event_.finish, std::nullopt)) {
    event_.matched_stop = std::monostate{};
    event_.error = {};
    event_.usage = {};
    event_.timings = {};
    event_.last = false;
  }
  return event_;
}

void EngineLoop::publish_stats() {
  counters_.prefill.pages_sent = exports_.pages_sent();
  lanes_.publish(counters_);
  if (is_idle()) lanes_.rest();
  const std::lock_guard lock(stats_mutex_);
  published_ = counters_;
  published_last_step_ = last_step_;
}

EngineStats EngineLoop::stats() const {
  const Inbox::Counts counts = inbox_.counts();
  const std::lock_guard lock(stats_mutex_);
  EngineStats stats = published_;
  stats.queued_requests = counts.queued_requests;
  stats.queued_tokens = counts.queued_tokens;
  stats.rejected = counts.rejected;
  stats.experts = runner_->expert_stats();
  stats.last_step_age_seconds = std::chrono::duration<double>(now() - published_last_step_).count();
  return stats;
}

EngineProgress EngineLoop::progress() const {
  const Inbox::Counts counts = inbox_.counts();
  const std::lock_guard lock(stats_mutex_);
  return {.steps = published_.steps + peer_waits_,
          .has_work = published_.running + published_.waiting + counts.queued_requests > 0};
}

void EngineLoop::check_idle() const {
  FATHOM_CHECK(requests_.empty(), "{} requests without a sequence", requests_.size());
  lanes_.check_idle();
}

}  // namespace fathom
