#include "engine/scheduler.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <span>
#include <tuple>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

bool goes_before(const Sequence* a, const Sequence* b) {
  return std::tie(a->order, a->priority, a->arrival) < std::tie(b->order, b->priority, b->arrival);
}

template <typename List>
void insert_in_order(List& list, Sequence* sequence) {
  list.insert(std::upper_bound(list.begin(), list.end(), sequence, goes_before), sequence);
}

template <typename List>
void erase_from(List& list, Sequence* sequence) {
  const auto it = std::lower_bound(list.begin(), list.end(), sequence, goes_before);
  FATHOM_CHECK(it != list.end() && *it == sequence, "sequence {} is not where its phase says",
               sequence->arrival);
  list.erase(it);
}

bool is_in_long_prompt(const Sequence* sequence) {
  return sequence->is_long && !sequence->awaits_rows() && sequence->remaining() > 1;
}

int64_t pages_for(int64_t num_tokens) { return ceil_div(num_tokens, kPageSize); }

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, PrefixTree& tree, PrefixSource* source,
                     RemotePrefill* remote)
    : options_(options), tree_(&tree), source_(source), remote_(remote) {
  // insert_in_order(running_) never allocates.
  running_.reserve(static_cast<size_t>(options.max_num_seqs));
}

void Scheduler::add(Sequence& sequence) {
  insert_in_order(waiting_, &sequence);
  sequence.phase = Sequence::Phase::kWaiting;
}

void Scheduler::schedule(StepPlan& plan, bool with_prompts, bool with_drafts) {
  const size_t before = plan.entries.size();
  planning_ = nullptr;
  budget_ = options_.max_batched_tokens;
  draft_budget_ = with_drafts ? budget_ : 0;
  prompt_logit_budget_ = options_.max_prompt_logit_rows;
  preempted_ = false;
  ++num_steps_;
  const int64_t copies_ended = tree_->num_copies_ended();
  if (options_.preempt_every > 0 && num_steps_ % options_.preempt_every == 0 &&
      running_.size() > 1) {
    planning_ = running_.back();
    preempt(*running_.back());
  }
  go_on_loading(plan);
  plan_decode(plan);
  if (with_drafts && options_.max_drafts > 0) plan_drafts(std::span(plan.entries).subspan(before));
  if (with_prompts) plan_prompts(plan);
  if (remote_ != nullptr) order_prompts();
  // Frees pages that the next step may need, but only a share of a small pool, whose pages are
  // cached texts.
  tree_->make_room_ahead(std::min(pages_for(options_.max_batched_tokens) + num_running(),
                                  tree_->pool().total() / kPoolShareAhead));
  // Memory freed by a copy that ended during this step may only be usable in the next one.
  const bool is_copying = tree_->copies_in_flight() > 0 || tree_->num_copies_ended() > copies_ended;
  FATHOM_CHECK(plan.entries.size() > before || !has_work() || is_copying || !with_prompts ||
                   !with_drafts ||
                   !std::all_of(running_.begin(), running_.end(),
                                [](const Sequence* sequence) { return sequence->may_run(); }),
               "{} waiting, {} running, nothing to run", waiting_.size(), running_.size());
}

void Scheduler::advance(std::span<const StepEntry> entries) {
  for (const StepEntry& entry : entries) {
    entry.sequence->computed += entry.num_tokens;
    entry.sequence->mtp_len = entry.sequence->computed;
    entry.sequence->prompt_logits_done += entry.num_prompt_logits;
    commit_tokens(*entry.sequence);
  }
}

void Scheduler::preempt_all() {
  while (!running_.empty()) {
    planning_ = running_.back();
    preempt(*planning_);
  }
}

void Scheduler::commit_tokens(Sequence& sequence, int64_t accepted) {
  sequence.computed += accepted;
  try {
    publish(sequence);
  } catch (const std::bad_alloc&) {
    // The page stays private for now. The next publish() begins at the first page not in the tree.
  }
}

void Scheduler::finish(Sequence& sequence) {
  switch (sequence.phase) {
    case Sequence::Phase::kNew:
      break;
    case Sequence::Phase::kWaiting:
      erase_from(waiting_, &sequence);
      break;
    case Sequence::Phase::kRunning:
      erase_from(running_, &sequence);
      break;
    case Sequence::Phase::kFinished:
      FATHOM_CHECK(false, "sequence {} ends twice", sequence.arrival);
  }
  release_pages(sequence);
  sequence.phase = Sequence::Phase::kFinished;
}

void Scheduler::plan_prompts(StepPlan& plan) {
  const int64_t kept = rows_for_long_prompts();
  budget_ -= kept;
  plan_short_prompts(plan);
  // A sequence preempted in this step would only take its pages back.
  if (!preempted_) admit_waiting(plan);
  budget_ += kept;
  plan_long_prompts(plan);
}

Sequence* Scheduler::first_waiting() const {
  if (waiting_.empty() || waiting_.front()->awaited) return nullptr;
  return waiting_.front();
}

bool Scheduler::would_admit(const Sequence& sequence) const {
  return num_running() < options_.max_num_seqs &&
         pages_to_start(sequence) <= tree_->available() - pages_promised();
}

bool Scheduler::would_admit_first() const {
  if (num_running() >= options_.max_num_seqs) return false;
  const PrefixTree::Found found = find_prefix(*waiting_.front());
  return pages_to_start(*waiting_.front()) - found.pages <=
         tree_->available() - found.unheld - pages_promised();
}

void Scheduler::withdraw(Sequence& sequence) {
  erase_from(waiting_, &sequence);
  sequence.awaited.reset();
  sequence.planned_step = 0;
  sequence.phase = Sequence::Phase::kNew;
}

bool Scheduler::has_prompts() const {
  return !waiting_.empty() ||
         std::any_of(running_.begin(), running_.end(), [](const Sequence* sequence) {
           return !sequence->awaits_rows() && sequence->remaining() > 1;
         });
}

bool Scheduler::has_decode() const {
  return std::any_of(running_.begin(), running_.end(), [](const Sequence* sequence) {
    return sequence->remaining() == 1 && sequence->may_run();
  });
}

// In order, so that a sequence preempted for another is never in the plan already.
void Scheduler::plan_decode(StepPlan& plan) {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.remaining() != 1 || !sequence.may_run()) continue;
    const int64_t rows = sequence.mtp_len < sequence.computed ? sequence.num_mtp_rows() : 0;
    if (rows > draft_budget_) continue;
    if (plan_chunk(sequence, plan)) draft_budget_ -= rows;
    // If the sequence preempted itself, it has left the list, and everything after it had been
    // preempted before.
  }
}

// Plans drafts for sequences whose newest token is planned.
void Scheduler::plan_drafts(std::span<StepEntry> entries) {
  for (StepEntry& entry : entries) entry.num_drafts = most_drafts(entry);
  if (options_.draft_policy != nullptr) options_.draft_policy->choose(entries);
  for (StepEntry& entry : entries) {
    // Rows of the MTP layer that the sequence has not in any case.
    const int64_t mtp_rows = entry.sequence->mtp_len < entry.sequence->computed ? 0 : 1;
    const bool has_room = mtp_rows <= draft_budget_;
    const int64_t wanted = has_room ? std::min(entry.num_drafts, budget_) : 0;
    entry.num_drafts = wanted > 0 ? reserve_drafts(*entry.sequence, wanted) : 0;
    if (entry.num_drafts == 0) continue;
    budget_ -= entry.num_drafts;
    draft_budget_ -= mtp_rows;
  }
}

int64_t Scheduler::most_drafts(const StepEntry& entry) const {
  const Sequence& sequence = *entry.sequence;
  // The prompt's last row decides about the prompt's pages alone.
  if (!entry.samples || entry.num_tokens > 1 || sequence.output_len() == 0) return 0;
  const int64_t left = sequence.max_len - sequence.len() - 1;  // behind the token to come
  return std::max<int64_t>(0, std::min({options_.max_drafts, sequence.max_drafts, left}));
}

// Reserves pages and memory for the drafts' tokens; returns for how many.
int64_t Scheduler::reserve_drafts(Sequence& sequence, int64_t drafts) {
  planning_ = &sequence;
  if (reserve(sequence, sequence.len() + drafts) != PrefixTree::Room::kNow) {
    drafts = std::min(drafts, std::ssize(sequence.pages) * kPageSize - sequence.len());
  }
  const auto tokens = sequence.tokens.size() + 1 + static_cast<size_t>(drafts);
  if (tokens > sequence.tokens.capacity()) sequence.tokens.reserve(2 * tokens);
  sequence.drafts.reserve(static_cast<size_t>(drafts));
  return drafts;
}

// Work of one row after `context` tokens, in rows without context.
double Scheduler::prefill_cost(int64_t context) const {
  if (options_.keys_worth_a_row == 0) return 1;
  return 1 + static_cast<double>(context) / static_cast<double>(options_.keys_worth_a_row);
}

bool Scheduler::is_long(const Sequence& sequence, int64_t cached_tokens) const {
  const int64_t rows = sequence.len() - cached_tokens;
  const double work = static_cast<double>(rows) * prefill_cost(cached_tokens + rows / 2);
  return work > static_cast<double>(kLongPromptSteps * options_.max_batched_tokens);
}

// Whether there are shorter sequences than long prompts, or were in the last kCompanySteps steps.
bool Scheduler::has_short_sequences() const {
  return !waiting_.empty() || num_steps_ - last_company_ < kCompanySteps ||
         !std::all_of(running_.begin(), running_.end(), is_in_long_prompt);
}

// Rows left for long prompts: a share while there are short sequences, otherwise all.
int64_t Scheduler::rows_for_long_prompts() const {
  if (std::none_of(running_.begin(), running_.end(), is_in_long_prompt)) return 0;
  return has_short_sequences() ? std::min(budget_, options_.long_prompt_rows) : budget_;
}

void Scheduler::plan_short_prompts(StepPlan& plan) {
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.is_long || sequence.awaits_rows() || sequence.remaining() == 1) continue;
    plan_chunk(sequence, plan);
  }
}

// Each long prompt gets at least one row, whatever its cost. Among long prompts only, rows are
// shared instead of work: all their clients wait long anyway.
void Scheduler::plan_long_prompts(StepPlan& plan) {
  const bool has_shorter = std::any_of(running_.begin(), running_.end(),
                                       [](const Sequence* sequence) { return !sequence->is_long; });
  if (has_shorter) last_company_ = num_steps_;
  budget_ = rows_for_long_prompts();
  auto work = static_cast<double>(options_.long_prompt_rows);
  const bool bounded = num_steps_ - last_company_ < kCompanySteps;
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    Sequence& sequence = *running_[i];
    if (!is_in_long_prompt(&sequence)) continue;
    const double each = prefill_cost(sequence.computed);
    if (bounded) budget_ = std::min(budget_, std::max<int64_t>(1, std::llround(work / each)));
    if (!plan_chunk(sequence, plan)) continue;
    work -= each * static_cast<double>(plan.entries.back().num_tokens);
    if (bounded && work < each) return;
  }
}

// Adds the sequence's next chunk to the plan, as large as budgets and pages allow. Preempts later
// sequences that are not planned yet to get pages. Returns false if the sequence cannot advance by
// one token; it preempts itself if it is the last of those.
bool Scheduler::plan_chunk(Sequence& sequence, StepPlan& plan) {
  planning_ = &sequence;
  int64_t num_tokens = chunk_length(sequence);
  if (num_tokens == 0) return false;
  for (;;) {
    const PrefixTree::Room has_room = reserve(sequence, sequence.computed + num_tokens);
    if (has_room == PrefixTree::Room::kNow) break;
    if (has_room == PrefixTree::Room::kLater) {
      // Use the pages that are free now; more are free only when copies have ended.
      const int64_t room = (std::ssize(sequence.pages) + tree_->pool().free()) * kPageSize;
      num_tokens = std::min(num_tokens, room - sequence.computed);
      if (num_tokens <= 0) return false;
      continue;
    }
    Sequence* victim = last_unplanned();
    if (victim != nullptr && goes_before(&sequence, victim)) {
      preempt(*victim);
      continue;
    }
    // No more pages can be had: shrink the chunk to the available ones.
    const int64_t left = (std::ssize(sequence.pages) + tree_->available()) * kPageSize;
    num_tokens = std::min(num_tokens, left - sequence.computed);
    if (num_tokens > 0) continue;
    if (running_.back() == &sequence) preempt(sequence);
    return false;
  }
  StepEntry entry{.sequence = &sequence, .num_tokens = num_tokens};
  const int64_t end = sequence.computed + num_tokens;
  entry.first_prompt_logit = std::max(sequence.computed, sequence.prompt_logits_done);
  entry.num_prompt_logits =
      std::max<int64_t>(0, std::min(end, sequence.prompt_logits_end) - entry.first_prompt_logit);
  entry.samples = end == sequence.len() && !sequence.is_prompt_only;
  entry.end = end;
  entry.preemptions = sequence.usage.preemptions;
  // Reserves memory for the token to come, so that std::bad_alloc is thrown here and not later.
  if (entry.samples && sequence.tokens.size() == sequence.tokens.capacity()) {
    sequence.tokens.reserve(2 * sequence.tokens.size());
  }
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
  passed_.clear();
  for (size_t i = 0; i < waiting_.size();) {
    if (budget_ == 0 || num_running() >= options_.max_num_seqs) return;
    Sequence& sequence = *waiting_[i];
    planning_ = &sequence;
    if (is_computed_elsewhere(sequence)) {
      ++i;
      continue;
    }
    PrefixTree::Found found = find_prefix(sequence);
    if (source_ != nullptr && found.all() < reusable_pages(sequence)) {
      source_->bring_prefix(sequence, reusable_pages(sequence));
      found = find_prefix(sequence);
    }
    sequence.is_long = is_long(sequence, found.all() * kPageSize);
    const bool in_turn = passed_.empty() || !sequence.is_long;
    if (!in_turn || !admit(sequence, found)) {
      if (!sequence.is_long || sequence.times_passed == options_.max_num_seqs) return;
      passed_.push_back(&sequence);
      ++i;
      continue;
    }
    bool enough = false;  // one of the passed sequences has reached its limit
    for (Sequence* passed : passed_) enough |= ++passed->times_passed == options_.max_num_seqs;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    start(sequence, plan);
    // Long prompts are planned after the others.
    const bool is_planned_later = sequence.is_long || sequence.awaits_rows();
    if (!is_planned_later && !plan_chunk(sequence, plan)) return;
    if (enough) return;
  }
}

// Whether a running sequence is computing pages that this one could use next. Caches the last such
// page in `awaited`, so that a waiting sequence costs one lookup per step.
bool Scheduler::is_computed_elsewhere(Sequence& sequence) {
  if (!sequence.prefix || pending_.empty()) return false;
  if (sequence.awaited) {
    if (pending_.owner(*sequence.awaited) != nullptr) return true;
    sequence.awaited.reset();
  }
  const int64_t pages = reusable_pages(sequence);
  const std::vector<PageKey>& keys = sequence.prefix->keys;
  for (int64_t page = find_prefix(sequence).all(); page < pages; ++page) {
    const Sequence* owner = pending_.owner(keys[page]);
    if (owner == nullptr || owner->priority > sequence.priority) break;
    sequence.awaited = keys[page];
  }
  return sequence.awaited.has_value();
}

PrefixTree::Found Scheduler::find_prefix(Sequence& sequence) const {
  if (!sequence.prefix) return {};
  tree_->extend(*sequence.prefix, std::span<const int32_t>(sequence.tokens)
                                      .first(static_cast<size_t>(shareable_len(sequence))));
  return tree_->find(*sequence.prefix, reusable_pages(sequence));
}

// The number of leading tokens whose pages may be shared.
int64_t Scheduler::shareable_len(const Sequence& sequence) const {
  const int64_t known = sequence.known_len();
  return options_.share_answers ? known : std::min(known, sequence.prompt_len);
}

// The number of full pages that the sequence may take from the prefix tree. It computes at least
// one token itself, whose logits are sampled, and all prompt positions whose logits are still
// wanted.
int64_t Scheduler::reusable_pages(const Sequence& sequence) const {
  if (!sequence.prefix) return 0;
  int64_t tokens = std::min(sequence.len() - 1, shareable_len(sequence));
  if (sequence.prompt_logits_done < sequence.prompt_logits_end) {
    tokens = std::min(tokens, sequence.prompt_logits_done);
  }
  return tokens / kPageSize;
}

// Whether the sequence may run now. If so, it holds its cached prefix pages on return.
bool Scheduler::admit(Sequence& sequence, PrefixTree::Found found) {
  const int64_t needed = pages_to_start(sequence);
  const int64_t promised = pages_promised();
  if (needed - found.pages > tree_->available() - found.unheld - promised) return false;
  bool is_more = false;
  if (sequence.prefix) {
    is_more = tree_->take(*sequence.prefix, sequence.tokens, found.all(), sequence.pages);
  }
  const bool has_all = tree_->settle(sequence.pages) && !is_more;
  const int64_t taken = std::ssize(sequence.pages);
  // Fewer pages than were found in the pool if another text has the same keys; then there may be
  // too few pages left. Those found in the store needed pool pages anyway.
  if (taken < found.pages && needed - taken > tree_->available() - promised) {
    tree_->release_all(sequence.pages);
    return false;
  }
  sequence.is_loading = !has_all;
  sequence.pages_to_load = is_more ? found.all() : 0;
  sequence.computed = sequence.mtp_len = has_all ? taken * kPageSize : 0;
  sequence.pages_in_tree = taken;
  return true;
}

void Scheduler::start(Sequence& sequence, StepPlan& plan) {
  insert_in_order(running_, &sequence);  // reserved by the constructor
  sequence.phase = Sequence::Phase::kRunning;
  if (sequence.prefix) pending_.add(sequence, sequence.pages_in_tree);
  if (!sequence.is_loading) begin_computing(sequence, plan);
}

// The sequence's pages are in the pool: it starts to compute.
void Scheduler::begin_computing(Sequence& sequence, StepPlan& plan) {
  sequence.is_arriving = remote_ != nullptr && remote_->takes(sequence);
  if (sequence.has_started) return;
  plan.started.push_back(&sequence);
  sequence.has_started = true;
  sequence.usage.cached_tokens = sequence.computed;
}

// Orders the prompts of arriving sequences that have no ticket, as soon as they have their pages.
void Scheduler::order_prompts() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (!sequence.is_arriving || sequence.ticket != 0) continue;
    planning_ = &sequence;
    if (reserve_all(sequence)) remote_->begin(sequence);
  }
}

// Reserves pages for all tokens; later sequences that are not planned yet give way. False: not now,
// or the sequence has preempted itself.
bool Scheduler::reserve_all(Sequence& sequence) {
  for (;;) {
    const PrefixTree::Room room = reserve(sequence, sequence.len());
    if (room != PrefixTree::Room::kNever) return room == PrefixTree::Room::kNow;
    Sequence* victim = last_unplanned();
    if (victim != nullptr && goes_before(&sequence, victim)) {
      preempt(*victim);
      continue;
    }
    if (running_.back() == &sequence) preempt(sequence);
    return false;
  }
}

int64_t Scheduler::arrive(Sequence& sequence, int64_t cached_tokens) {
  sequence.is_arriving = false;
  sequence.computed = sequence.mtp_len = sequence.len() - 1;
  sequence.is_long = false;
  commit_tokens(sequence);
  if (sequence.usage.preemptions > 0) return 0;
  const int64_t found = std::min(cached_tokens, sequence.prompt_len - 1);
  const int64_t more = std::max<int64_t>(0, found - sequence.usage.cached_tokens);
  sequence.usage.cached_tokens += more;
  return more;
}

void Scheduler::prefill_here(Sequence& sequence) {
  sequence.is_arriving = false;
  sequence.prefills_here = true;
  sequence.is_long = is_long(sequence, sequence.computed);
}

// Sequences whose pages have arrived take part in this step already.
void Scheduler::go_on_loading(StepPlan& plan) {
  tree_->take_ended(false);
  for (Sequence* sequence : running_) {
    planning_ = sequence;
    if (!sequence->is_loading || !has_loaded(*sequence)) continue;
    const int64_t loaded = std::ssize(sequence->pages);
    pending_.remove(*sequence);  // including pages that have loaded since
    sequence->is_loading = false;
    sequence->computed = sequence->mtp_len = loaded * kPageSize;
    sequence->pages_in_tree = loaded;
    sequence->is_long = is_long(*sequence, sequence->computed);
    pending_.add(*sequence, loaded);
    begin_computing(*sequence, plan);
  }
}

bool Scheduler::has_loaded(Sequence& sequence) {
  while (tree_->settle(sequence.pages)) {
    const int64_t loaded = std::ssize(sequence.pages);
    if (loaded >= sequence.pages_to_load) return true;
    if (tree_->take(*sequence.prefix, sequence.tokens, sequence.pages_to_load, sequence.pages)) {
      if (std::ssize(sequence.pages) == loaded) return false;
    } else {
      sequence.pages_to_load = 0;
    }
  }
  return false;
}

// Pages for one token more than it has: room for the first new one. The last token is never cached.
int64_t Scheduler::pages_to_start(const Sequence& sequence) {
  return pages_for(std::min(sequence.len() + 1, sequence.max_len - 1));
}

// Pages that running sequences still need for tokens they already have.
int64_t Scheduler::pages_promised() const {
  int64_t promised = 0;
  for (const Sequence* sequence : running_) {
    promised += std::max<int64_t>(0, pages_for(sequence->len()) - std::ssize(sequence->pages));
  }
  return promised;
}

PrefixTree::Room Scheduler::reserve(Sequence& sequence, int64_t num_tokens) {
  const int64_t missing = pages_for(num_tokens) - std::ssize(sequence.pages);
  return missing <= 0 ? PrefixTree::Room::kNow : tree_->allocate(missing, sequence.pages);
}

Sequence* Scheduler::last_unplanned() const {
  for (auto it = running_.rbegin(); it != running_.rend(); ++it) {
    if ((*it)->planned_step != num_steps_) return *it;
  }
  return nullptr;
}

void Scheduler::preempt(Sequence& sequence) {
  insert_in_order(waiting_, &sequence);  // may throw; then the sequence still runs
  erase_from(running_, &sequence);
  release_pages(sequence);
  sequence.computed = sequence.mtp_len = sequence.final_rows = 0;
  sequence.phase = Sequence::Phase::kWaiting;
  ++sequence.usage.preemptions;
  ++num_preemptions_;
  preempted_ = true;
}

// Published pages stay in the tree, so a preempted sequence may find its own again.
void Scheduler::release_pages(Sequence& sequence) {
  if (sequence.is_arriving) remote_->cancel(sequence);
  sequence.is_arriving = false;
  if (sequence.is_prompt_only) sequence.request->request.page_export->recall();
  pending_.remove(sequence);
  sequence.awaited.reset();
  sequence.pages_in_tree = 0;
  sequence.is_loading = false;
  tree_->release_all(sequence.pages);
}

void Scheduler::publish(Sequence& sequence) {
  const int64_t full =
      std::min({sequence.computed, sequence.mtp_len, shareable_len(sequence)}) / kPageSize;
  if (!sequence.prefix || full <= sequence.pages_in_tree) return;
  const std::span<const int32_t> tokens = sequence.tokens;
  tree_->extend(*sequence.prefix, tokens.first(static_cast<size_t>(full * kPageSize)));
  for (; sequence.pages_in_tree < full; ++sequence.pages_in_tree) {
    const int64_t page = sequence.pages_in_tree;
    if (!tree_->insert(*sequence.prefix, tokens, page, sequence.pages)) {
      // Another text has this key: the sequence's pages are private from now on.
      pending_.remove(sequence);
      sequence.prefix.reset();
      return;
    }
    pending_.done(sequence.prefix->keys[page]);
  }
}

}  // namespace fathom
