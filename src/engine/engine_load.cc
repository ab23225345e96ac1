#include "engine/engine_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "engine/event_queue.h"
#include "engine/fake_grammar.h"
#include "engine/local_prefill.h"
#include "engine/lossy_link.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

std::shared_ptr<const Tokenizer> tokenizer() {
  static const auto shared = fake_tokenizer();
  return shared;
}

// Holds the engine in its first step until the load has arrived.
class ArrivalGate {
 public:
  void pass() {
    reached_ = true;
    reached_.notify_all();
    arrived_.wait(false);
  }
  void wait_for_engine() { reached_.wait(false); }
  void open() {
    arrived_ = true;
    arrived_.notify_all();
  }

 private:
  std::atomic<bool> reached_ = false, arrived_ = false;
};

template <typename T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

struct Submitted {
  Request request;
  std::unique_ptr<AnswerCollector> collector;
  RequestId id = 0;
  bool aborted = false;
};

// What the engine counts of drafts is what its events carry: a run's first token is no draft, and
// drafts behind the end of a completion are in no event.
void check_counters(const SpeculationStats& stats, const std::vector<Submitted>& all) {
  int64_t accepted = 0;
  Usage usage;
  for (const Submitted& submitted : all) {
    accepted += submitted.collector->accepted_drafts;
    for (const Usage& of_choice : submitted.collector->usages) {
      usage.draft_tokens += of_choice.draft_tokens;
      usage.accepted_tokens += of_choice.accepted_tokens;
    }
  }
  EXPECT_EQ(stats.accepted_tokens, accepted);
  EXPECT_EQ(stats.accepted_tokens, usage.accepted_tokens);
  EXPECT_EQ(stats.draft_tokens, usage.draft_tokens);
  EXPECT_EQ(
      std::accumulate(stats.accepted_per_pos.begin(), stats.accepted_per_pos.end(), int64_t{0}),
      accepted);
  EXPECT_LE(stats.accepted_per_pos.front(), stats.drafts);
}

void check_answers(const Load& load, const std::vector<Submitted>& all) {
  for (size_t r = 0; r < all.size(); ++r) {
    const Submitted& submitted = all[r];
    EXPECT_TRUE(submitted.collector->last) << "request " << r;
    for (int index = 0; index < submitted.request.sampling.n; ++index) {
      const std::string what = fmt::format("request {} choice {}", r, index);
      const Answer& actual = submitted.collector->answers[static_cast<size_t>(index)];
      Answer expected = serial_answer(load.model, *tokenizer(), submitted.request, index);
      const bool was_stranded = load.may_fail && actual.finish == FinishReason::kError;
      if (was_stranded) {
        EXPECT_EQ(actual.error.find("the prompt cannot be computed"), 0u) << actual.error;
      }
      if (was_stranded || (submitted.aborted && actual.finish == FinishReason::kAbort)) {
        // The output before the abort is a prefix of the full output.
        ASSERT_LE(actual.ids.size(), expected.ids.size()) << what;
        expected.ids.resize(actual.ids.size());
        EXPECT_EQ(actual.ids, expected.ids) << what;
        EXPECT_EQ(expected.text.substr(0, actual.text.size()), actual.text) << what;
        continue;
      }
      expect_equal(actual, expected, what);
    }
  }
}

std::unique_ptr<FakeRunner> prefill_runner(const Load& load) {
  const Separation& how = *load.separation;
  auto runner = std::make_unique<FakeRunner>(FakeModel{.vocab_size = load.model.vocab_size,
                                                       .max_model_len = load.model.max_model_len,
                                                       .num_pages = how.num_pages,
                                                       .num_lanes = how.num_lanes},
                                             how.steps_in_flight);
  runner->copies = how.copies;
  runner->drafts = load.drafts;
  if (how.fail_steps_every > 0) {
    runner->before_finish = [every = how.fail_steps_every, steps = 0]() mutable -> Result<> {
      if (++steps % every != 0) return {};
      return error(Code::kResourceExhausted, "a planted fault");
    };
  }
  if (how.step_time.count() > 0) {
    runner->before_step = [time = how.step_time](const ForwardBatch&) {
      std::this_thread::sleep_for(time);
      return Result<>();
    };
  }
  runner->max_rows =
      how.one_process ? load.options.max_batched_tokens : how.options.max_batched_tokens;
  return runner;
}

// The engine that computes a load's prompts, and the way to it.
struct PrefillSide {
  PrefillSide(const Load& load, PrefillOptions& options) {
    const Separation& how = *load.separation;
    auto runner = prefill_runner(load);
    EngineOptions own = how.options;
    own.max_queued_tokens = 1 << 20;
    engine = std::move(*Engine::create(own, std::move(runner), nullptr));
    options.mailbox = std::make_shared<PieceMailbox>(how.mailbox_bytes);
    if (how.messages.share > 0) {
      options.link = std::make_shared<LossyLink>(*engine, options.mailbox, how.messages.share,
                                                 how.messages.seed);
    } else {
      options.link = std::make_shared<LocalPrefill>(*engine, options.mailbox);
    }
  }

  void expect_nothing_lost() const {
    EXPECT_TRUE(engine->drain(60s));
    const EngineStats stats = engine->stats();
    EXPECT_EQ(stats.pages_used + stats.pages_quarantined, 0);
    EXPECT_EQ(stats.running + stats.waiting + stats.queued_requests, 0);
  }

  std::unique_ptr<Engine> engine;
};

Result<std::unique_ptr<Engine>> make_engine(const Load& load, std::unique_ptr<Runner> runner) {
  if (!load.separation || !load.separation->one_process) {
    return Engine::create(load.options, std::move(runner), tokenizer());
  }
  const Separation& how = *load.separation;
  SitesOptions sites{.prefill_lanes = {},
                     .decode_lanes = {},
                     .window_bytes = how.mailbox_bytes,
                     .with_digests = how.with_digests,
                     .roles = how.roles};
  for (int lane = 0; lane < how.num_lanes; ++lane) sites.prefill_lanes.push_back(lane);
  for (int lane = 0; lane < load.model.num_lanes; ++lane) {
    sites.decode_lanes.push_back(how.num_lanes + lane);
  }
  return Engine::create_separated(load.options,
                                  {.prefill = prefill_runner(load), .decode = std::move(runner)},
                                  sites, tokenizer());
}

}  // namespace

Request random_request(std::mt19937& random, const Load& load) {
  Request request;
  for (size_t i = 1 + random() % load.max_prompt; i > 0; --i) {
    request.prompt_ids.push_back(static_cast<int32_t>(random() % 290));
  }
  if (std::uniform_real_distribution<>()(random) < load.shared_share) {
    // A random part of one of three prefixes.
    const auto text = static_cast<int32_t>(random() % 3);
    const size_t shared = random() % (request.prompt_ids.size() + 1);
    for (size_t i = 0; i < shared; ++i) {
      request.prompt_ids[i] = (static_cast<int32_t>(i) * 7 + text) % 290;
    }
    if (random() % 4 == 0) request.cache_salt = "tenant";
  }
  request.priority = one_of(random, {0, 0, 0, -1, 2});
  SamplingParams& params = request.sampling;
  params.temperature = one_of(random, {0.0, 0.5, 1.0, 1.5});
  params.top_p = one_of(random, {1.0, 1.0, 0.8});
  params.top_k = one_of<int64_t>(random, {0, -1, 5, 50});
  params.min_p = one_of(random, {0.0, 0.0, 0.05});
  params.repetition_penalty = one_of(random, {1.0, 1.0, 1.2});
  params.presence_penalty = one_of(random, {0.0, 0.0, 0.5});
  params.frequency_penalty = one_of(random, {0.0, 0.0, -0.3});
  if (random() % 4 == 0) params.logit_bias = {{'a', 2.0f}, {kFakeEos, -3.0f}};
  params.seed = random();
  params.max_tokens = 1 + random() % load.max_output;
  if (random() % 3 == 0) params.min_tokens = static_cast<int64_t>(random() % *params.max_tokens);
  if (random() % 2 == 0) {
    params.stop = {"STOP", "abca"};
    if (random() % 2 == 0) params.stop = {"bcab", "\xC3\xA9", " a a", "TOP"};
  }
  if (random() % 3 == 0) params.stop_token_ids = {258};
  params.ignore_eos = random() % 2 == 0;
  params.include_stop_in_output = random() % 2 == 0;
  params.skip_special_tokens = random() % 2 == 0;
  params.n = one_of(random, {1, 1, 1, 2, 4});
  params.logprobs = one_of(random, {-1, -1, 0, 3});
  params.prompt_logprobs = one_of(random, {-1, -1, -1, 0, 2});
  if (load.drafts.most == 0) return request;
  if (load.drafts.kind == FakeDrafts::Kind::kRepeating) {
    // 'a' wins until the penalties of a few of them, drafts among them, have made it unlikely.
    params.logit_bias = {{'a', 6.0f}};
    params.presence_penalty = one_of(random, {0.0, 0.5});
    params.frequency_penalty = one_of(random, {0.4, 1.0, 2.0});
  }
  if (random() % 3 == 0) request.max_drafts = static_cast<int64_t>(random() % (kMaxDrafts + 1));
  if (random() % 3 == 0) request.grammar = fake_grammar(static_cast<int32_t>(random() % 4));
  if (request.grammar && random() % 2 == 0) request.grammar_begins_after = 'b';
  return request;
}

EngineStats run_once(Load load) {
  load.options.max_queued_tokens = 1 << 20;
  std::mt19937 random(load.seed);
  std::optional<PrefillSide> prefill;  // outlives the engine
  if (load.separation && !load.separation->one_process) {
    prefill.emplace(load, load.options.prefill);
  }
  std::vector<Submitted> all(static_cast<size_t>(load.num_requests));
  ArrivalGate gate;  // outlives the engine
  auto runner = std::make_unique<FakeRunner>(load.model, load.steps_in_flight);
  runner->copies = load.copies;
  runner->drafts = load.drafts;
  if (load.arrives_at_once) {
    runner->before_step = [&gate](const ForwardBatch&) {
      gate.pass();
      return Result<>();
    };
  }
  runner->max_rows = load.options.max_batched_tokens;
  runner->max_logit_rows =
      load.options.max_num_seqs * (1 + load.drafts.most) + load.options.max_prompt_logit_rows;
  auto created = make_engine(load, std::move(runner));
  EXPECT_TRUE(created.has_value()) << created.error().message;
  Engine& engine = **created;
  for (Submitted& submitted : all) {
    submitted.request = random_request(random, load);
    submitted.collector = std::make_unique<AnswerCollector>(submitted.request.sampling.n);
    AnswerCollector* collector = submitted.collector.get();
    const auto id = engine.submit(submitted.request,
                                  [collector](const Event& event) { collector->add(event); });
    EXPECT_TRUE(id.has_value()) << id.error().message;
    submitted.id = *id;
    // Requests arrive in bursts and singly. Some are aborted at once, others while they run.
    if (load.arrives_at_once) {
      gate.wait_for_engine();
    } else if (random() % 3 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
    if (std::uniform_real_distribution<>()(random) < load.abort_share) {
      Submitted& victim = all[random() % static_cast<size_t>(&submitted - all.data() + 1)];
      victim.aborted = true;
      engine.abort(victim.id);
      if (random() % 4 == 0) engine.abort(victim.id);
    }
  }
  gate.open();
  EXPECT_TRUE(engine.drain(60s));
  EngineStats stats = engine.stats();
  EXPECT_EQ(stats.pages_used + stats.pages_quarantined, 0);
  EXPECT_EQ(stats.running + stats.waiting + stats.queued_requests + stats.queued_tokens, 0);
  engine.stop();
  if (prefill) prefill->expect_nothing_lost();
  check_answers(load, all);
  check_counters(stats.speculation, all);
  return stats;
}

}  // namespace fathom
