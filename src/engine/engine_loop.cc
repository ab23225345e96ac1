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

// Made before memory can be short.
const Status kAborted = {Code::kUnavailable, "the request was aborted"};
const Status kStopped = {Code::kUnavailable, "the engine was stopped"};
const Status kDead = {Code::kUnavailable, "engine is dead"};  // fits without an allocation

EngineOptions with_clock(EngineOptions options) {
  if (!options.clock) options.clock = std::chrono::steady_clock::now;
  return options;
}

Inbox::Limits inbox_limits(const EngineOptions& options, int64_t num_pages) {
  return {.max_requests = options.max_queued_requests,
          .max_tokens = options.max_queued_tokens > 0 ? options.max_queued_tokens
                                                      : 4 * num_pages * kPageSize};
}

}  // namespace

EngineLoop::EngineLoop(const EngineOptions& options, std::unique_ptr<Runner> runner,
                       std::unique_ptr<PageStore> store)
    : options_(with_clock(options)),
      runner_(std::move(runner)),
      store_(std::move(store)),
      pool_(runner_->num_pages()),
      tree_(pool_, options.prefix_caching, store_.get()),
      scheduler_({.max_num_seqs = options.max_num_seqs,
                  .max_batched_tokens = options.max_batched_tokens,
                  .max_prompt_logit_rows = options.max_prompt_logit_rows,
                  .long_prompt_rows = options.long_prompt_rows > 0
                                          ? options.long_prompt_rows
                                          : ceil_div(options.max_batched_tokens, 8),
                  .keys_worth_a_row = runner_->keys_worth_a_row(),
                  .share_answers = runner_->answers_equal_prompts(),
                  .preempt_every = options.preempt_every},
                 tree_),
      steps_(static_cast<size_t>(runner_->max_steps_in_flight())),
      inbox_(inbox_limits(options, runner_->num_pages())),
      last_step_(now()) {
  publish_stats();
}

void EngineLoop::run() {
  while (true) {
    drain_inbox();
    if (stopping_) return;
    expire();
    if (is_idle()) {
      tree_.take_ended(/*wait=*/true);
      continue;
    }
    const bool has_room = steps_in_flight() < std::ssize(steps_);
    const bool has_begun = has_room && scheduler_.has_work() && begin_step();
    if (steps_in_flight() > 0 && (!has_begun || steps_in_flight() == std::ssize(steps_))) {
      end_step();
    } else if (!has_begun && scheduler_.has_work()) {
      tree_.take_ended(/*wait=*/true);  // nobody runs before a copy has ended
    }
    if (is_idle()) check_idle();
    publish_stats();
  }
}

void EngineLoop::drain_inbox() {
  inbox_.take(news_, /*wait=*/is_idle() && tree_.copies_in_flight() == 0);
  for (std::unique_ptr<ActiveRequest>& request : news_.requests) {
    add_request(request);
  }
  for (const RequestId id : news_.aborts) {
    if (const auto it = requests_.find(id); it != requests_.end()) {
      end_request(*it->second, FinishReason::kAbort, kAborted);
    }
  }
  if (news_.flush) tree_.clear();
  if (std::exchange(news_.stop, false)) {
    stopping_ = true;
    end_all(FinishReason::kAbort, kStopped);
  }
  if (death_) end_all(FinishReason::kError, *death_);  // those that came before it was known
  if (is_idle()) {
    check_idle();
    publish_stats();
  }
}

// A request that there is no memory for may be left with some sequences in the scheduler and some
// not; ending them makes no difference.
void EngineLoop::add_request(std::unique_ptr<ActiveRequest>& request) {
  ActiveRequest& added = *request;
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
      sequence->prefix = tree_.chain(0, request.request.cache_salt);
    } else if (has_choices) {
      sequence->prefix = tree_.chain(request.id, "");
    }
    sequence->order = order_of(*sequence);
    sequence->arrival = ++arrivals_;
    scheduler_.add(*sequence);
  }
  const Time queued = request.sequences.front()->timings.queued;
  if (options_.max_queue_time.count() > 0) {
    must_start_.push_back({queued + options_.max_queue_time, request.id});
  }
  if (options_.max_total_time.count() > 0) {
    must_end_.push_back({queued + options_.max_total_time, request.id});
  }
}

// All requests grow older at one rate, so who goes before whom never changes: a level is worth as
// much as having been submitted so much earlier.
int64_t EngineLoop::order_of(const Sequence& sequence) const {
  if (options_.priority_ageing.count() == 0) return 0;
  const int64_t level = std::clamp(sequence.priority, -kMostPriorityLevels, kMostPriorityLevels);
  const auto queued = std::chrono::nanoseconds(sequence.timings.queued.time_since_epoch());
  return queued.count() + level * options_.priority_ageing.count();
}

// Looks only at the first of each list: requests come in the order in which they were queued, but
// for what two threads that submit at once may differ by.
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

// False: no step has begun, because all sequences wait for the one in flight, or because there was
// no memory for one.
bool EngineLoop::begin_step() {
  Step& step = this->step(begun_ + 1);
  if (!plan(step.plan) || step.plan.empty()) return false;
  step.number = begun_ + 1;
  step.begun = now();
  record_step_shape(step.plan);
  publish_stats();  // before a step that may never end: what runs is counted, and its shape known
  if (const Result<> begun = begin(step); !begun) {
    note_failure(begun.error());
    if (!death_) fail(step.plan, begun.error());  // otherwise its sequences are gone
    return false;
  }
  ++begun_;
  for (const StepEntry& entry : step.plan.entries) {
    entry.sequence->request->last_step = step.number;
  }
  scheduler_.advance(step.plan);
  return true;
}

// False: there was no memory for a plan, and the sequence that it was wanted for has ended. What
// had been planned keeps its pages and is planned again.
bool EngineLoop::plan(StepPlan& plan) {
  bool is_planned = true;
  try {
    scheduler_.schedule(plan);
  } catch (const std::bad_alloc&) {
    is_planned = false;
  }
  note_started(plan);
  if (!is_planned) end_early(scheduler_.planning(), FinishReason::kError, out_of_memory());
  return is_planned;
}

// What a step writes are rows of its own sequences' pages, which nobody takes before advance(): one
// that breaks off leaves nothing behind when these have ended.
Result<> EngineLoop::begin(Step& step) {
  try {
    choose_rows(step, runner_->host_stream());
    const ForwardBatch& batch = builder_.build(step.plan);
    add_unknown_tokens(step);
    return runner_->begin(batch, step.rows);
  } catch (const std::bad_alloc&) {
    return tl::unexpected(out_of_memory());
  }
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
    // What it was to write may have been taken by others since it began.
    for (int64_t number = ended_ + 1; number <= begun_; ++number) {
      fail(this->step(number).plan, sampled.error());
    }
    recompute_the_rest();
    tree_.clear();
  }
  ++ended_;  // until then the step refers to sequences that have ended
  erase_finished_requests();
}

void EngineLoop::apply_sampled_tokens(Step& step, std::span<const SampledToken> sampled) {
  std::optional<StepResults> results;
  try {
    results.emplace(step, sampled, runner_->host_stream());
  } catch (const std::bad_alloc&) {
    // Some grammars may have taken their token and some not: none of these can go on.
    return fail(step.plan, out_of_memory());
  }
  for (const StepEntry& entry : step.plan.entries) deliver_token(entry, *results);
}

void EngineLoop::deliver_token(const StepEntry& entry, StepResults& results) {
  Event& event = new_event(*entry.sequence);
  bool has_news = false;
  try {
    has_news = results.append(entry, event);
  } catch (const std::bad_alloc&) {
    return end_early(*entry.sequence, FinishReason::kError, out_of_memory());
  }
  if (!has_news) return;
  scheduler_.commit_token(*entry.sequence);
  emit(*entry.sequence, event);
}

// A step has not begun, or has not ended well: what of its sequences there still is ends.
void EngineLoop::fail(const StepPlan& plan, const Status& why) {
  for (const StepEntry& entry : plan.entries) {
    if (entry.sequence->phase == Sequence::Phase::kFinished) continue;
    end_early(*entry.sequence, FinishReason::kError, why);
  }
}

// A sequence that runs and has no part in the steps that failed may still hold pages of a text that
// they were to write: it gives them up and is computed again.
void EngineLoop::recompute_the_rest() {
  while (scheduler_.num_running() > 0) {
    try {
      scheduler_.preempt_all();
    } catch (const std::bad_alloc&) {
      end_early(scheduler_.planning(), FinishReason::kError, out_of_memory());
    }
  }
}

// Out of memory is no failure of the device.
void EngineLoop::note_failure(const Status& why) {
  if (why.code == Code::kInternal) ++failed_steps_;
  if (!death_ && (runner_->is_lost() || failed_steps_ >= kMostFailedSteps)) die(why);
}

// Known to everybody who asks before the first client hears of it. Steps in flight are still
// finished; they can end nobody any more.
void EngineLoop::die(const Status& why) {
  death_ = kDead;
  try {
    death_ = {Code::kUnavailable, fmt::format("the engine is dead: {}", why.message)};
    inbox_.die(*death_);
  } catch (const std::bad_alloc&) {
    inbox_.die(Status(kDead));
  }
  end_all(FinishReason::kError, *death_);
  tree_.clear();
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
    counters_.step_rows += entry.num_tokens;
    counters_.step_longest =
        std::max(counters_.step_longest, entry.sequence->computed + entry.num_tokens);
  }
}

// A step that has ended. One that was begun while the last one ran counts from that one's end.
void EngineLoop::count_step(const Step& step) {
  const Time begun = std::max(step.begun, last_step_);
  last_step_ = now();
  ++counters_.steps;
  counters_.step_seconds += std::chrono::duration<double>(last_step_ - begun).count();
  int64_t rows = 0;
  for (const StepEntry& entry : step.plan.entries) rows += entry.num_tokens;
  counters_.rows += rows;
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

// Tells the caller. A sequence that has ended gives its pages back before anybody hears of it, and
// a request that has ended is gone afterwards.
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

// A request that has ended is gone, unless a step in flight refers to its sequences.
void EngineLoop::forget(ActiveRequest& request) {
  const auto it = requests_.find(request.id);
  if (it == requests_.end()) return;  // there was no memory to add it
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
  scheduler_.finish(sequence);
  RequestTimings& timings = sequence.timings;
  timings.finished = now();
  if (timings.started == Time{}) timings.started = timings.finished;
  if (timings.first_token == Time{}) timings.first_token = timings.finished;
  sequence.usage.completion_tokens = sequence.output_len();
  event.timings = timings;
  event.usage = sequence.usage;
  event.last = --sequence.request->unfinished == 0;
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
  // Only a last event has set what follows.
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
  counters_.running = scheduler_.num_running();
  counters_.waiting = scheduler_.num_waiting();
  counters_.pages_total = pool_.total();
  counters_.pages_used = pool_.used();
  counters_.pages_cached = pool_.cached();
  counters_.pages_in_transfer = pool_.in_transfer();
  counters_.pages_stored = tree_.num_stored();
  counters_.prefix_returns = tree_.num_returns();
  counters_.prefix_evictions = tree_.num_evictions();
  counters_.preemptions = scheduler_.num_preemptions();
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
  stats.last_step_age_seconds = std::chrono::duration<double>(now() - published_last_step_).count();
  return stats;
}

void EngineLoop::check_idle() const {
  FATHOM_CHECK(requests_.empty(), "{} requests without a sequence", requests_.size());
  FATHOM_CHECK(pool_.used() == 0, "{} of {} pages are used by nobody", pool_.used(), pool_.total());
  try {
    tree_.check_invariant();
  } catch (const std::bad_alloc&) {  // recounted when the engine is idle again
  }
}

}  // namespace fathom
