#include "engine/engine_loop.h"

#include <utility>

#include "base/check.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

Inbox::Limits inbox_limits(const EngineOptions& options, int64_t num_pages) {
  return {.max_requests = options.max_queued_requests,
          .max_tokens = options.max_queued_tokens > 0 ? options.max_queued_tokens
                                                      : 4 * num_pages * kPageSize};
}

}  // namespace

EngineLoop::EngineLoop(const EngineOptions& options, std::unique_ptr<Runner> runner)
    : runner_(std::move(runner)),
      pool_(runner_->num_pages()),
      scheduler_({.max_num_seqs = options.max_num_seqs,
                  .max_batched_tokens = options.max_batched_tokens,
                  .max_prompt_logit_rows = options.max_prompt_logit_rows,
                  .preempt_every = options.preempt_every},
                 pool_),
      inbox_(inbox_limits(options, runner_->num_pages())),
      last_step_(Clock::now()) {
  publish_stats();
}

void EngineLoop::run() {
  while (true) {
    take_news();
    if (stopping_) return;
    if (!scheduler_.has_work()) continue;
    step();
    if (!scheduler_.has_work()) check_idle();
    publish_stats();
  }
}

void EngineLoop::take_news() {
  inbox_.take(news_, /*wait=*/!scheduler_.has_work());
  for (std::unique_ptr<ActiveRequest>& request : news_.requests) {
    for (const auto& sequence : request->sequences) {
      sequence->arrival = ++arrivals_;
      scheduler_.add(*sequence);
    }
    const RequestId id = request->id;
    requests_.emplace(id, std::move(request));
  }
  for (const RequestId id : news_.aborts) {
    if (const auto it = requests_.find(id); it != requests_.end()) {
      abort_request(*it->second, "the request was aborted");
    }
  }
  if (std::exchange(news_.stop, false)) {
    stopping_ = true;
    while (!requests_.empty()) {
      abort_request(*requests_.begin()->second, "the engine was stopped");
    }
  }
  if (!scheduler_.has_work()) {
    check_idle();
    publish_stats();
  }
}

void EngineLoop::step() {
  scheduler_.schedule(plan_);
  note_started();
  const Result<ConstTensorView> logits = runner_->forward(builder_.build(plan_));
  if (!logits) {
    for (const StepEntry& entry : plan_.entries) {
      Event& event = new_event(*entry.sequence);
      event.finish = FinishReason::kError;
      event.error = logits.error();
      emit(*entry.sequence, event);
    }
    return;
  }
  scheduler_.advance(plan_);
  postprocess_.sample(plan_, *logits, runner_->sampling_stream());
  last_step_ = Clock::now();
  ++counters_.steps;
  for (const StepEntry& entry : plan_.entries) {
    Event& event = new_event(*entry.sequence);
    if (postprocess_.append(entry, event)) emit(*entry.sequence, event);
  }
}

void EngineLoop::note_started() {
  if (plan_.started.empty()) return;
  const Time now = Clock::now();
  for (Sequence* sequence : plan_.started) {
    sequence->timings.started = now;
    counters_.cached_tokens += sequence->usage.cached_tokens;
    counters_.prompt_tokens += sequence->prompt_len;
    leave_queue(*sequence->request);
  }
}

void EngineLoop::leave_queue(ActiveRequest& request) {
  if (std::exchange(request.counted_as_queued, false)) inbox_.note_left_queue(request);
}

void EngineLoop::abort_request(ActiveRequest& request, const char* why) {
  // The last emission destroys the request, and its list of sequences with it.
  const size_t count = request.sequences.size();
  int left = request.unfinished;
  for (size_t i = 0; i < count && left > 0; ++i) {
    Sequence& sequence = *request.sequences[i];
    if (sequence.phase == Sequence::Phase::kFinished) continue;
    --left;
    Event& event = new_event(sequence);
    event.finish = FinishReason::kAbort;
    event.error = {Code::kUnavailable, why};
    emit(sequence, event);
  }
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
    requests_.erase(request.id);
    inbox_.note_ended();
  }
}

void EngineLoop::end_sequence(Sequence& sequence, Event& event) {
  scheduler_.finish(sequence);
  RequestTimings& timings = sequence.timings;
  timings.finished = Clock::now();
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
  stats.last_step_age_seconds =
      std::chrono::duration<double>(Clock::now() - published_last_step_).count();
  return stats;
}

void EngineLoop::check_idle() const {
  FATHOM_CHECK(requests_.empty(), "{} requests without a sequence", requests_.size());
  FATHOM_CHECK(pool_.used() == 0, "{} of {} pages are used by nobody", pool_.used(), pool_.total());
  pool_.check_invariant();
}

}  // namespace fathom
