#include "engine/scheduler.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

bool arrived_before(const Sequence* a, const Sequence* b) { return a->arrival < b->arrival; }

template <typename List>
void insert_by_arrival(List& list, Sequence* sequence) {
  list.insert(std::upper_bound(list.begin(), list.end(), sequence, arrived_before), sequence);
}

template <typename List>
void erase_from(List& list, Sequence* sequence) {
  const auto it = std::lower_bound(list.begin(), list.end(), sequence, arrived_before);
  FATHOM_CHECK(it != list.end() && *it == sequence, "sequence {} is not where its phase says",
               sequence->arrival);
  list.erase(it);
}

int64_t pages_for(int64_t num_tokens) { return ceil_div(num_tokens, kPageSize); }

}  // namespace

void Scheduler::add(Sequence& sequence) {
  FATHOM_CHECK(waiting_.empty() || arrived_before(waiting_.back(), &sequence), "arrival {}",
               sequence.arrival);
  sequence.phase = Sequence::Phase::kWaiting;
  waiting_.push_back(&sequence);
}

void Scheduler::schedule(StepPlan& plan) {
  plan.clear();
  budget_ = options_.max_batched_tokens;
  prompt_logit_budget_ = options_.max_prompt_logit_rows;
  preempted_ = false;
  ++num_steps_;
  if (options_.preempt_every > 0 && num_steps_ % options_.preempt_every == 0 &&
      running_.size() > 1) {
    preempt(*running_.back());
  }
  plan_decode(plan);
  plan_prefill(plan);
  // What has just been preempted would only take its pages back.
  if (!preempted_) admit_waiting(plan);
  FATHOM_CHECK(!plan.empty() || !has_work(), "{} waiting, {} running, nothing to run",
               waiting_.size(), running_.size());
}

void Scheduler::advance(const StepPlan& plan) {
  for (const StepEntry& entry : plan.entries) {
    entry.sequence->computed += entry.num_tokens;
    entry.sequence->prompt_logits_done += entry.num_prompt_logits;
  }
}

void Scheduler::finish(Sequence& sequence) {
  switch (sequence.phase) {
    case Sequence::Phase::kWaiting:
      erase_from(waiting_, &sequence);
      break;
    case Sequence::Phase::kRunning:
      erase_from(running_, &sequence);
      break;
    case Sequence::Phase::kFinished:
      FATHOM_CHECK(false, "sequence {} ends twice", sequence.arrival);
  }
  pool_->release_all(sequence.pages);
  sequence.phase = Sequence::Phase::kFinished;
}

// In order of arrival, so that what is preempted for a sequence is never already in the plan.
void Scheduler::plan_decode(StepPlan& plan) {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.remaining() == 1) plan_chunk(sequence, plan);
    // A sequence that preempted itself has left the list; everything after it arrived later and
    // had been preempted before it.
  }
}

void Scheduler::plan_prefill(StepPlan& plan) {
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.remaining() > 1) plan_chunk(sequence, plan);
  }
}

// Adds the sequence's next chunk to the plan, as much as budgets and pages allow; takes pages from
// later arrivals that are not planned yet, and gives its own up when it is itself the last of
// those and cannot advance by one token.
bool Scheduler::plan_chunk(Sequence& sequence, StepPlan& plan) {
  int64_t num_tokens = chunk_length(sequence);
  if (num_tokens == 0) return false;
  while (!reserve(sequence, sequence.computed + num_tokens)) {
    Sequence* victim = latest_unplanned();
    if (victim != nullptr && victim->arrival > sequence.arrival) {
      preempt(*victim);
      continue;
    }
    // Only what is left: fill the pages there are.
    const int64_t room = (std::ssize(sequence.pages) + pool_->free()) * kPageSize;
    num_tokens = std::min(num_tokens, room - sequence.computed);
    if (num_tokens > 0) continue;
    if (running_.back() == &sequence) preempt(sequence);
    return false;
  }
  StepEntry entry{.sequence = &sequence, .num_tokens = num_tokens};
  const int64_t end = sequence.computed + num_tokens;
  entry.first_prompt_logit = std::max(sequence.computed, sequence.prompt_logits_done);
  entry.num_prompt_logits =
      std::max<int64_t>(0, std::min(end, sequence.prompt_logits_end) - entry.first_prompt_logit);
  entry.samples = end == sequence.len();
  budget_ -= num_tokens;
  prompt_logit_budget_ -= entry.num_prompt_logits;
  sequence.planned_step = num_steps_;
  plan.entries.push_back(entry);
  return true;
}

int64_t Scheduler::chunk_length(const Sequence& sequence) const {
  int64_t num_tokens = std::min(sequence.remaining(), budget_);
  const int64_t first_wanted = std::max(sequence.computed, sequence.prompt_logits_done);
  if (first_wanted < sequence.prompt_logits_end) {
    const int64_t allowed_end = first_wanted + prompt_logit_budget_;
    if (allowed_end < sequence.prompt_logits_end) {
      num_tokens = std::min(num_tokens, allowed_end - sequence.computed);
    }
  }
  return num_tokens;
}

void Scheduler::admit_waiting(StepPlan& plan) {
  for (size_t i = 0; i < waiting_.size();) {
    if (budget_ == 0 || num_running() >= options_.max_num_seqs) return;
    Sequence& sequence = *waiting_[i];
    const Sequence* source = sequence.fork_source;
    // Its prompt is being computed by another choice: wait for those pages, let others pass.
    if (source != nullptr && source->phase == Sequence::Phase::kRunning &&
        source->computed < source->prompt_len) {
      ++i;
      continue;
    }
    if (!admit(sequence, plan)) return;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    insert_by_arrival(running_, &sequence);
    if (!plan_chunk(sequence, plan)) return;
  }
}

// Whether the sequence may run now; if so it holds the pages that it shares.
bool Scheduler::admit(Sequence& sequence, StepPlan& plan) {
  const int64_t shared = shareable_pages(sequence);
  // One more than it has tokens: room for the first that it writes. The last token is never cached.
  const int64_t needed = pages_for(std::min(sequence.len() + 1, sequence.max_len - 1)) - shared;
  if (needed > pool_->free() - pages_promised()) return false;
  for (int64_t i = 0; i < shared; ++i) {
    pool_->share(sequence.fork_source->pages[i]);
    sequence.pages.push_back(sequence.fork_source->pages[i]);
  }
  sequence.computed = shared * kPageSize;
  sequence.phase = Sequence::Phase::kRunning;
  if (!sequence.has_started) {
    sequence.has_started = true;
    sequence.usage.cached_tokens = sequence.computed;
    plan.started.push_back(&sequence);
  }
  return true;
}

// Full pages of the prompt that the fork source has computed; the sequence keeps at least one token
// to compute itself, whose logits choose the next.
int64_t Scheduler::shareable_pages(const Sequence& sequence) const {
  const Sequence* source = sequence.fork_source;
  if (source == nullptr || source->phase != Sequence::Phase::kRunning) return 0;
  const int64_t tokens = std::min({sequence.prompt_len, source->computed, sequence.len() - 1});
  return tokens / kPageSize;
}

// Pages that running sequences still need for the tokens they already have.
int64_t Scheduler::pages_promised() const {
  int64_t promised = 0;
  for (const Sequence* sequence : running_) {
    promised += std::max<int64_t>(0, pages_for(sequence->len()) - std::ssize(sequence->pages));
  }
  return promised;
}

bool Scheduler::reserve(Sequence& sequence, int64_t num_tokens) {
  const int64_t missing = pages_for(num_tokens) - std::ssize(sequence.pages);
  return missing <= 0 || pool_->allocate(missing, sequence.pages);
}

Sequence* Scheduler::latest_unplanned() const {
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) {
    if ((*it)->planned_step != num_steps_) return *it;
  }
  return nullptr;
}

void Scheduler::preempt(Sequence& sequence) {
  erase_from(running_, &sequence);
  pool_->release_all(sequence.pages);
  sequence.computed = 0;
  sequence.phase = Sequence::Phase::kWaiting;
  insert_by_arrival(waiting_, &sequence);
  ++sequence.usage.preemptions;
  ++num_preemptions_;
  preempted_ = true;
}

}  // namespace fathom
