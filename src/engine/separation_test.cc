// An engine whose prompts another engine computes, over the fake model: each choice's output equals
// the serial oracle's, whatever happens on the way, or ends with an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <mutex>
#include <thread>

#include "engine/engine_load.h"
#include "engine/event_queue.h"
#include "engine/local_prefill.h"
#include "engine/plain_request.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

EngineOptions decode_options() {
  EngineOptions options{.max_num_seqs = 8, .max_batched_tokens = 70, .eos_ids = {kFakeEos}};
  options.prefill.least_rows = 0;
  options.prefill.with_digests = true;
  return options;
}

Separation prefill_side(int64_t num_pages = 64) {
  return {.num_pages = num_pages,
          .options = {.max_num_seqs = 6, .max_batched_tokens = 50, .eos_ids = {kFakeEos}}};
}

Load separated_load(uint32_t seed = 1) {
  return {.model = {.num_pages = 200},
          .options = decode_options(),
          .seed = seed,
          .separation = prefill_side()};
}

// Chunked prompts, prefixes, prompts shorter than a page, n up to 4, log-probabilities, penalties,
// seeds, stops, an end-of-sequence token first: what random_request() has.
TEST(Separation, AnswersAreThoseOfOneEngine) {
  int64_t arrived = 0;
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    Load load = separated_load(seed);
    load.steps_in_flight = 1 + static_cast<int>(seed % 2);
    load.separation->steps_in_flight = 1 + static_cast<int>(seed / 2 % 2);
    load.options.prefix_caching = seed % 3 != 0;
    const EngineStats stats = run_once(load);
    EXPECT_EQ(stats.prefill.failed + stats.prefill.computed_here + stats.prefill.refused, 0);
    EXPECT_EQ(stats.prefill.orders, stats.prefill.arrived);
    EXPECT_EQ(stats.failed, 0);
    arrived += stats.prefill.arrived;
  }
  EXPECT_GT(arrived, 300);
}

TEST(Separation, EverySmallChunkSize) {
  for (const int64_t budget : {6, 7, 16, 63, 64, 65, 130}) {
    Load load = separated_load(static_cast<uint32_t>(budget));
    load.num_requests = 14;
    load.separation->options.max_batched_tokens = budget;
    EXPECT_EQ(run_once(load).prefill.failed, 0);
  }
}

// The MTP layer's rows and states come with the pages; grammars never leave the decoding engine.
TEST(Separation, DraftsAndGrammars) {
  for (const auto kind :
       {FakeDrafts::Kind::kRight, FakeDrafts::Kind::kInTurns, FakeDrafts::Kind::kAdversarial}) {
    Load load = separated_load(static_cast<uint32_t>(kind) + 40);
    load.drafts = {.most = 3, .kind = kind};
    const EngineStats stats = run_once(load);
    EXPECT_GT(stats.prefill.arrived, 30);
    EXPECT_GT(stats.speculation.draft_tokens, 100);
    if (kind == FakeDrafts::Kind::kRight) {
      EXPECT_GT(stats.speculation.accepted_tokens, stats.speculation.draft_tokens / 2);
    }
  }
}

TEST(Separation, LanesOnBothSides) {
  for (const int lanes : {2, 3}) {
    Load load = separated_load(static_cast<uint32_t>(lanes) + 50);
    load.model.num_lanes = lanes;
    load.model.num_pages = 20;
    load.separation->num_lanes = 4 - lanes + 1;
    load.num_requests = 100;
    load.abort_share = 0.1;
    load.options.preempt_every = 9;
    EXPECT_GT(run_once(load).prefill.arrived, 30);
  }
}

// 24 pages on one side or on both, with aborts: sequences that wait for their rows are preempted,
// prompts that are being sent too.
TEST(Separation, SmallPoolsAndAborts) {
  int64_t preemptions = 0, aborted = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    Load load = separated_load(100 + seed);
    load.model.num_pages = seed % 3 == 0 ? 200 : 24 - 2 * (seed % 5);
    load.separation->num_pages = seed % 3 == 1 ? 200 : 5 + 2 * (seed % 4);
    load.steps_in_flight = 1 + static_cast<int>(seed % 2);
    load.separation->steps_in_flight = 1 + static_cast<int>(seed / 3 % 2);
    load.separation->options.preempt_every = seed % 4 == 0 ? 7 : 0;
    load.options.preempt_every = seed % 4 == 2 ? 5 : 0;
    load.abort_share = 0.25;
    const EngineStats stats = run_once(load);
    preemptions += stats.preemptions;
    aborted += stats.aborted;
  }
  EXPECT_GT(preemptions, 50);
  EXPECT_GT(aborted, 100);
}

// Copies of pages that end late, and of which every 16th fails.
TEST(Separation, EverySixteenthCopyFails) {
  int64_t failed = 0;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Load load = separated_load(200 + seed);
    load.copies = {.late = seed % 2 == 0, .fail_every = seed % 3 == 1 ? 0 : 16};
    load.separation->copies = {.late = true, .fail_every = seed % 3 == 0 ? 0 : 16};
    load.abort_share = 0.1;
    const EngineStats stats = run_once(load);
    failed += stats.prefill.failed;
  }
  EXPECT_GT(failed, 20);
}

TEST(Separation, StepsThatFailOnThePrefillSideAreComputedAgain) {
  Load load = separated_load(7);
  load.separation->fail_steps_every = 9;
  const EngineStats stats = run_once(load);
  EXPECT_GT(stats.prefill.failed, 3);
  EXPECT_EQ(stats.failed, 0);
}

TEST(Separation, AWindowOfOnePage) {
  Load load = separated_load(8);
  load.separation->mailbox_bytes = 1;
  EXPECT_EQ(run_once(load).prefill.failed, 0);
  // Prompts are preempted while their pages wait for room.
  load.separation->options.preempt_every = 2;
  load.separation->num_pages = 12;
  EXPECT_EQ(run_once(load).prefill.failed, 0);
}

// Messages dropped, delayed, doubled, reordered, cut off and altered, 5% of each.
TEST(Separation, LossyMessagesGiveTheRightAnswerOrAnError) {
  PrefillStats sum;
  int64_t failed = 0;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    Load load = separated_load(300 + seed);
    load.separation->messages = {.share = 0.05, .seed = seed};
    load.model.num_pages = seed % 2 == 0 ? 24 : 200;
    load.options.prefill.patience = 50ms;
    load.options.prefill.max_attempts = 2;
    load.options.prefill.most_rows_here = seed % 3 == 0 ? 10'000 : 40;
    load.abort_share = 0.1;
    load.may_fail = true;
    const EngineStats stats = run_once(load);
    sum.failed += stats.prefill.failed;
    sum.computed_here += stats.prefill.computed_here;
    sum.refused += stats.prefill.refused;
    for (size_t i = 0; i < kNumPieceVerdicts; ++i) sum.pieces[i] += stats.prefill.pieces[i];
    failed += stats.failed;
  }
  EXPECT_GT(sum.failed, 30);
  EXPECT_GT(sum.computed_here, 5);
  EXPECT_GT(sum.refused, 0);
  EXPECT_EQ(failed, sum.refused) << "no other error";
  EXPECT_GT(sum.pieces[static_cast<size_t>(PieceVerdict::kAccepted)], 300);
  EXPECT_GT(sum.pieces[static_cast<size_t>(PieceVerdict::kStale)], 0);
  // How many come while their tickets are open depends on the machine.
  EXPECT_GT(sum.pieces[static_cast<size_t>(PieceVerdict::kRepeated)], 0);
  EXPECT_GT(sum.pieces[static_cast<size_t>(PieceVerdict::kWrongDigest)], 0);
}

// The same over 100,000 requests, with aborts in every state, copies that end late, of which every
// 16th fails, and steps of the prefill side that fail: a right answer or an error, nothing lost.
TEST(Separation, DISABLED_AHundredThousandRequests) {
  constexpr int kLoads = 200, kRequests = 500;
  PrefillStats sum;
  int64_t finished = 0, failed = 0, aborted = 0;
  for (uint32_t seed = 0; seed < kLoads && !HasFailure(); ++seed) {
    Load load = separated_load(10'000 + seed);
    load.num_requests = kRequests;
    load.max_prompt = 150;
    load.max_output = 12;
    load.model.num_pages = 24;
    load.separation->num_pages = 24;
    load.separation->messages = {.share = 0.05, .seed = seed};
    load.separation->fail_steps_every = seed % 4 == 0 ? 50 : 0;
    load.steps_in_flight = 1 + static_cast<int>(seed % 2);
    load.separation->steps_in_flight = 1 + static_cast<int>(seed / 2 % 2);
    load.copies = {.late = seed % 3 == 0, .fail_every = 16};
    load.separation->copies = {.late = seed % 3 == 1, .fail_every = 16};
    load.options.prefill.patience = 20ms;
    load.options.prefill.most_rows_here = seed % 2 == 0 ? 10'000 : 40;
    load.abort_share = 0.1;
    load.may_fail = true;
    const EngineStats stats = run_once(load);
    finished += stats.stopped + stats.length;
    failed += stats.failed;
    aborted += stats.aborted;
    sum.failed += stats.prefill.failed;
    sum.refused += stats.prefill.refused;
    sum.computed_here += stats.prefill.computed_here;
    sum.arrived += stats.prefill.arrived;
    for (size_t i = 0; i < kNumPieceVerdicts; ++i) sum.pieces[i] += stats.prefill.pieces[i];
  }
  EXPECT_EQ(failed, sum.refused) << "no other error";
  for (size_t i = 0; i < kNumPieceVerdicts; ++i) {
    const auto verdict = static_cast<PieceVerdict>(i);
    std::cout << name_of(verdict) << ": " << sum.pieces[i] << " pieces\n";
  }
  std::cout << kLoads * kRequests << " requests; choices: " << finished << " finished, " << aborted
            << " aborted, " << failed << " ended with an error; orders: " << sum.arrived
            << " arrived, " << sum.failed
            << " failed; prompts computed by the decoding side for that: " << sum.computed_here
            << '\n';
}

// Two engines and requests whose course can be counted.
struct Pair {
  explicit Pair(PrefillOptions prefill = {.least_rows = 0}) {
    const FakeModel model;
    prefill_engine = std::move(
        *Engine::create({.max_batched_tokens = 256}, std::make_unique<FakeRunner>(model), nullptr));
    EngineOptions options{.eos_ids = {kFakeEos}};
    options.prefill = std::move(prefill);
    options.prefill.mailbox = std::make_shared<PieceMailbox>(1 << 20);
    options.prefill.link = std::make_shared<LocalPrefill>(*prefill_engine, options.prefill.mailbox);
    engine =
        std::move(*Engine::create(options, std::make_unique<FakeRunner>(model), fake_tokenizer()));
  }

  Event answer(const Request& request) const {
    EventQueue queue;
    EXPECT_TRUE(engine->submit(request, queue.sink()));
    return last_event(queue);
  }
  // Pieces that have come so far, all accepted.
  int64_t pieces() const {
    const PrefillStats stats = engine->stats().prefill;
    int64_t all = 0;
    for (const int64_t count : stats.pieces) all += count;
    EXPECT_EQ(all, stats.pieces[0]);
    return all;
  }
  int64_t orders() const { return engine->stats().prefill.orders; }

  std::unique_ptr<Engine> prefill_engine, engine;
};

TEST(Separation, PagesThatTheDecodingSideHasAreNotSent) {
  const Pair pair;
  EXPECT_EQ(pair.answer(plain_request(200)).usage.cached_tokens, 0);
  EXPECT_EQ(pair.pieces(), 4) << "199 rows";
  EXPECT_EQ(pair.answer(plain_request(200)).usage.cached_tokens, 192);
  EXPECT_EQ(pair.pieces(), 5) << "the last page";
  EXPECT_EQ(pair.answer(plain_request(300)).usage.cached_tokens, 192);
  EXPECT_EQ(pair.pieces(), 7);
  EXPECT_EQ(pair.orders(), 3);
  EXPECT_EQ(pair.answer(plain_request(193)).usage.cached_tokens, 192);
  EXPECT_EQ(pair.orders(), 3) << "it has all but the last token";
  while (pair.prefill_engine->stats().prefill.pages_sent < 7) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(pair.prefill_engine->stats().prefill.pages_sent, 7);
  EXPECT_EQ(pair.prefill_engine->stats().generated_tokens, 0);
}

TEST(Separation, WhatIsComputedWhere) {
  const Pair pair;
  pair.answer(plain_request(1));
  EXPECT_EQ(pair.orders(), 0) << "the last token's row is the decoding side's";
  pair.answer(plain_request(2));
  EXPECT_EQ(pair.orders(), 1);
  EXPECT_EQ(pair.pieces(), 1);
  Request with_logprobs = plain_request(150);
  with_logprobs.sampling.prompt_logprobs = 0;
  pair.answer(with_logprobs);
  EXPECT_EQ(pair.orders(), 1) << "the logits of its prompt are wanted";
  const Pair other({.least_rows = 64});
  other.answer(plain_request(64));
  EXPECT_EQ(other.orders(), 0);
  Request longer = plain_request(65);
  longer.cache_salt = "another";
  other.answer(longer);
  EXPECT_EQ(other.orders(), 1);
}

// Short prompts, and long ones on an idle engine, are computed here; others end with kUnavailable.
TEST(Separation, WithoutThePrefillSide) {
  Pair pair({.least_rows = 0, .most_rows_here = 100});
  pair.prefill_engine->stop();
  EXPECT_EQ(pair.answer(plain_request(101)).finish, FinishReason::kLength) << "short";
  EXPECT_EQ(pair.answer(plain_request(500)).finish, FinishReason::kLength) << "idle";
  EXPECT_EQ(pair.engine->stats().prefill.computed_here, 2);
  EventQueue running;
  ASSERT_TRUE(pair.engine->submit(plain_request(10, 1500), running.sink()));
  running.next();
  Request other = plain_request(700);
  other.cache_salt = "another";
  const Event refused = pair.answer(other);
  EXPECT_EQ(refused.finish, FinishReason::kError);
  EXPECT_EQ(refused.error.code, Code::kUnavailable);
  EXPECT_EQ(refused.error.message, "the prompt cannot be computed: the engine is shutting down");
  EXPECT_EQ(pair.engine->stats().prefill.refused, 1);
  other.prompt_ids.resize(101);
  EXPECT_EQ(pair.answer(other).finish, FinishReason::kLength);
}

// Tokens that only the prefill side's cache had are reported as cached; none twice.
TEST(Separation, HitsOfThePrefillSideAreReported) {
  const Pair pair;
  EXPECT_EQ(pair.answer(plain_request(200)).usage.cached_tokens, 0);
  pair.engine->flush_prefix_cache();
  EXPECT_EQ(pair.answer(plain_request(200)).usage.cached_tokens, 192);
  EXPECT_EQ(pair.engine->stats().prefill.cached_tokens, 192);
  pair.prefill_engine->flush_prefix_cache();
  EXPECT_EQ(pair.answer(plain_request(300)).usage.cached_tokens, 192) << "this side has them";
  EXPECT_EQ(pair.engine->stats().prefill.cached_tokens, 192);
}

// Says that it has an order, and does nothing with it.
class HoldingLink : public PromptLink {
 public:
  Result<> order(PromptOrder) override { return {}; }
  void cancel(const TicketId&) override {}
  bool holds(const TicketId&) override { return ++asked, held.load(); }
  std::atomic<int> asked{0};
  std::atomic<bool> held{true};
};

// However long it waits in the other side's queue; patience is for what nobody holds.
TEST(Separation, AnOrderThatIsHeldDoesNotFail) {
  EngineOptions options{.eos_ids = {kFakeEos}};
  const auto link = std::make_shared<HoldingLink>();
  options.prefill = {.link = link,
                     .mailbox = std::make_shared<PieceMailbox>(1 << 20),
                     .least_rows = 0,
                     .max_attempts = 1,
                     .patience = 5ms};
  const auto engine = std::move(
      *Engine::create(options, std::make_unique<FakeRunner>(FakeModel{}), fake_tokenizer()));
  EventQueue queue;
  ASSERT_TRUE(engine->submit(plain_request(100), queue.sink()));
  while (link->asked < 5) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(engine->stats().prefill.failed, 0);
  EXPECT_EQ(engine->stats().steps, 0);
  EXPECT_GT(engine->progress().steps, 0) << "it does not hang";
  link->held = false;
  const Event last = last_event(queue);
  EXPECT_EQ(last.finish, FinishReason::kLength) << last.error.message;
  EXPECT_EQ(engine->stats().prefill.failed, 1);
  EXPECT_EQ(engine->stats().prefill.computed_here, 1);
}

class KeepingLink : public HoldingLink {
 public:
  Result<> order(PromptOrder order) override {
    const std::lock_guard lock(mutex);
    ticket = order.ticket;
    return {};
  }
  std::mutex mutex;
  std::optional<Ticket> ticket;  // the last order's
};

// The engine may have nothing else left meanwhile; the page is not handed out before.
TEST(Separation, APieceStillLandsWhenItsRequestHasBeenAborted) {
  const auto link = std::make_shared<KeepingLink>();
  const auto mailbox = std::make_shared<PieceMailbox>(1 << 20);
  EngineOptions options{.eos_ids = {kFakeEos}};
  options.prefill = {.link = link, .mailbox = mailbox, .least_rows = 0};
  auto runner = std::make_unique<FakeRunner>(FakeModel{});
  runner->copies.lets_rows_land = true;
  const auto engine = std::move(*Engine::create(options, std::move(runner), fake_tokenizer()));
  const auto wait_for_quarantined = [&](int64_t pages) {
    while (engine->stats().pages_quarantined != pages) std::this_thread::sleep_for(1ms);
  };
  EventQueue queue;
  const RequestId id = *engine->submit(plain_request(100), queue.sink());
  wait_for_quarantined(2);
  std::unique_lock lock(link->mutex);
  const Ticket ticket = link->ticket.value();
  lock.unlock();
  auto landing = mailbox->land({.ticket = ticket.id,
                                .page = ticket.first_page,
                                .num_bytes = ticket.page_bytes,
                                .form = ticket.form});
  ASSERT_NE(landing, nullptr);
  engine->abort(id);
  EXPECT_EQ(queue.next()->finish, FinishReason::kAbort);
  wait_for_quarantined(1);
  EXPECT_EQ(engine->stats().running + engine->stats().waiting, 0);
  std::this_thread::sleep_for(20ms);  // time for the engine to have looked, and to sleep
  landing = nullptr;                  // it is broken off
  wait_for_quarantined(0);
}

// Keeps what it is sent.
class KeepingExport : public PageExport {
 public:
  bool send(int64_t, std::shared_ptr<LentRows> rows, int64_t) override {
    const std::lock_guard lock(mutex);
    lent.push_back(rows);
    kept.push_back(lend(std::move(rows)));
    return true;
  }
  bool has_lent() override {
    const std::lock_guard lock(mutex);
    return std::any_of(lent.begin(), lent.end(), [](const auto& rows) { return rows->is_lent(); });
  }
  void recall() noexcept override {
    const std::lock_guard lock(mutex);
    for (const auto& rows : lent) rows->recall();
  }
  size_t count() {
    const std::lock_guard lock(mutex);
    return kept.size();
  }
  std::vector<std::byte> contents() {
    const std::lock_guard lock(mutex);
    std::vector<std::byte> all;
    for (const auto& rows : kept) {
      rows->read([&](std::span<const std::byte> page) {
        all.insert(all.end(), page.begin(), page.end());
      });
    }
    return all;
  }

  std::mutex mutex;
  std::vector<std::shared_ptr<LentRows>> lent, kept;
};

// A prompt's pages are its own while a sender reads them; when it ends before, they are copied.
TEST(Separation, LentPagesAreHeldOrCopied) {
  const auto engine = std::move(*Engine::create(
      {.prefix_caching = false}, std::make_unique<FakeRunner>(FakeModel{.num_pages = 6}), nullptr));
  const auto submit = [&](const std::shared_ptr<KeepingExport>& sent, int32_t first,
                          EventQueue& to) {
    PromptOrder order;
    order.ticket.num_pages = 4;
    for (int32_t i = 0; i < 250; ++i) order.tokens.push_back(first + i % 100);
    return *engine->submit(prompt_request(std::move(order), sent), to.sink());
  };
  const auto sent = std::make_shared<KeepingExport>();
  EventQueue queue;
  const RequestId id = submit(sent, 0, queue);
  while (sent->count() < 4) std::this_thread::sleep_for(1ms);
  const auto rows = sent->contents();
  EXPECT_EQ(engine->stats().running, 1) << "it waits until its pages are read";
  engine->abort(id);
  EXPECT_EQ(queue.next()->finish, FinishReason::kAbort);
  EXPECT_TRUE(sent->has_lent());
  const auto other = std::make_shared<KeepingExport>();
  EventQueue second;
  submit(other, 100, second);
  while (other->count() < 4) std::this_thread::sleep_for(1ms);
  EXPECT_NE(other->contents(), rows) << "it has other tokens";
  EXPECT_EQ(sent->contents(), rows) << "of six pages, so some were used again";
  {
    const std::lock_guard lock(other->mutex);
    other->kept.clear();
  }
  EXPECT_EQ(second.next()->finish, FinishReason::kStop);
}

TEST(Separation, OptionsAreChecked) {
  EngineOptions options;
  options.prefill.mailbox = std::make_shared<PieceMailbox>(1);
  const auto prefill = std::move(*Engine::create(
      {.kv_offload_bytes = 1 << 20}, std::make_unique<FakeRunner>(FakeModel{}), nullptr));
  options.prefill.link = std::make_shared<LocalPrefill>(*prefill, options.prefill.mailbox);
  PromptOrder order;
  order.ticket.num_pages = 1;
  order.tokens = {1};
  EXPECT_EQ(options.prefill.link->order(order).error().message,
            "this engine cannot send pages to another one");
  options.kv_offload_bytes = 1 << 20;
  const auto refused = Engine::create(options, std::make_unique<FakeRunner>(FakeModel{}), nullptr);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().message,
            "kv_offload_bytes is 1048576 and kv_offload_dir '': not where another engine computes "
            "the prompts");
}

}  // namespace
}  // namespace fathom
