// The engine over several nodes, whose ranks are fake runners: nodes are threads that are joined
// over loopback.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>
#include <thread>

#include "comm/node_threads.h"
#include "engine/engine.h"
#include "engine/fake_runner.h"
#include "engine/follower.h"
#include "engine/serial_oracle.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

// The lanes of one node: leaves out those that the node has no ranks of, and waits at random before
// each step, as ranks wait for one another.
class OwnLanes : public Runner {
 public:
  OwnLanes(const FakeModel& model, NodeLanes lanes, int seed)
      : fake(model), lanes_(std::move(lanes)), random_(static_cast<uint32_t>(seed)) {}

  int64_t vocab_size() const override { return fake.vocab_size(); }
  int64_t max_model_len() const override { return fake.max_model_len(); }
  int64_t num_pages() const override { return fake.num_pages(); }
  int num_lanes() const override { return fake.num_lanes(); }
  bool can_copy_pages(int from, int to) const override { return fake.can_copy_pages(from, to); }
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override {
    fake.copy_page(from_lane, from, to_lane, to);
  }
  int64_t max_drafts() const override { return fake.max_drafts(); }
  Result<std::span<const SampledToken>> draft_step(std::span<const ForwardBatch> lanes,
                                                   std::span<const std::vector<int32_t>> states,
                                                   std::span<const SampleRow> rows) override {
    if (before_step) FATHOM_RETURN_IF_ERROR(before_step());
    take_own(lanes);
    states_.assign(states.begin(), states.end());
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      if (lanes_.has[lane] == 0) states_[lane].clear();
    }
    return fake.draft_step(own_, states_, rows);
  }
  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override {
    if (before_step) FATHOM_RETURN_IF_ERROR(before_step());
    take_own(lanes);
    has_rows_ = std::any_of(own_.begin(), own_.end(),
                            [](const ForwardBatch& batch) { return batch.num_rows() > 0; });
    return has_rows_ ? fake.begin(own_, rows) : Result<>();
  }
  Result<std::span<const SampledToken>> finish() override {
    if (!has_rows_) return std::span<const SampledToken>();
    return fake.finish();
  }

  FakeRunner fake;
  std::function<Result<>()> before_step;

 private:
  void take_own(std::span<const ForwardBatch> lanes) {
    if (random_() % 64 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    ForwardBatch none;
    none.query_start = {0};
    own_.assign(lanes.size(), none);
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      if (lanes_.has[lane] != 0) own_[lane] = lanes[lane];
    }
  }

  const NodeLanes lanes_;
  std::mt19937 random_;
  std::vector<ForwardBatch> own_;
  std::vector<std::vector<int32_t>> states_;
  bool has_rows_ = false;
};

// Nodes whose ranks are a lane each. Node 0's runner is for the test's engine, the others follow on
// threads.
class Nodes {
 public:
  using BeforeStep = std::function<Result<>(int node)>;

  // `before_step` is called by followers; an error it returns fails the step.
  Nodes(const FakeModel& model, std::vector<int> ranks, BeforeStep before_step = {},
        const FakeDrafts& drafts = {})
      : placement{.dp = static_cast<int>(model.num_lanes)},
        ends(ranks.size()),
        ranks_of_node_(std::move(ranks)),
        before_step_(std::move(before_step)),
        drafts_(drafts) {
    for (int node = 1; node < static_cast<int>(ends.size()); ++node) {
      threads_.emplace_back(
          [this, model, node] { ends[static_cast<size_t>(node)] = follow(model, node); });
    }
    auto own = join_node(0);
    world = own->world.get();
    auto runner =
        std::make_unique<OwnLanes>(model, lanes_of_node(world->layout(), 0, placement), 0);
    runner->fake.drafts = drafts_;
    leader = std::make_unique<LeadingRunner>(std::move(own), std::move(runner), placement);
  }
  ~Nodes() { join(); }

  // After the leader's runner has ended.
  void join() {
    leader.reset();
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

  const Placement placement;
  std::unique_ptr<LeadingRunner> leader;
  World* world = nullptr;      // of the leader
  std::vector<Result<>> ends;  // of the followers, by node, after join()

 private:
  std::unique_ptr<NodeWorld> join_node(int node) {
    auto nodes = std::make_unique<NodeWorld>();
    auto joined = fathom::join(test_join_options(listener_, static_cast<int>(ranks_of_node_.size()),
                                                 node, ranks_of_node_[static_cast<size_t>(node)]),
                               nodes->abort_word);
    FATHOM_CHECK(joined.has_value(), "{}", joined.error().message);
    nodes->world = std::move(*joined);
    return nodes;
  }
  Result<> follow(const FakeModel& model, int node) {
    const auto own = join_node(node);
    OwnLanes runner(model, lanes_of_node(own->world->layout(), node, placement), node);
    runner.fake.drafts = drafts_;
    if (before_step_) runner.before_step = [this, node] { return before_step_(node); };
    return follow_steps(*own, runner, placement, 256);
  }

  const std::vector<int> ranks_of_node_;
  const BeforeStep before_step_;
  const FakeDrafts drafts_;
  const TestListener listener_;
  std::vector<std::thread> threads_;
};

Request random_request(std::mt19937& random) {
  Request request;
  // Prompts begin alike, by up to three pages.
  const auto shared = static_cast<int32_t>(random() % 3);
  request.prompt_ids.assign(random() % 200, shared);
  for (uint32_t i = 1 + random() % 30; i > 0; --i) {
    request.prompt_ids.push_back(static_cast<int32_t>(random() % 290));
  }
  request.sampling.max_tokens = 1 + random() % 40;
  request.sampling.seed = random();
  request.sampling.temperature = random() % 3 == 0 ? 0 : 1;
  request.sampling.logprobs = static_cast<int>(random() % 4) - 1;
  if (random() % 3 == 0) request.sampling.frequency_penalty = 0.5;
  if (random() % 4 == 0) request.sampling.n = 2;
  if (random() % 5 == 0) request.sampling.prompt_logprobs = 1;
  return request;
}

EngineOptions small_steps() {
  return {.max_num_seqs = 6,
          .max_batched_tokens = 256,
          .max_queued_requests = 1 << 20,
          .max_queued_tokens = 1 << 30,
          .max_queue_time = 0ns,
          .max_total_time = 0ns,
          .eos_ids = {kFakeEos}};
}

struct Waiting {
  Request request;
  AnswerCollector collector;
};

// Measures how long a step takes, which no wait in it exceeds.
class Stopwatch : public Runner {
 public:
  Stopwatch(std::unique_ptr<Runner> runner, std::chrono::nanoseconds& longest)
      : runner_(std::move(runner)), longest_(longest) {}

  int64_t vocab_size() const override { return runner_->vocab_size(); }
  int64_t max_model_len() const override { return runner_->max_model_len(); }
  int64_t num_pages() const override { return runner_->num_pages(); }
  int num_lanes() const override { return runner_->num_lanes(); }
  bool is_lost() override { return runner_->is_lost(); }
  Status loss() const override { return runner_->loss(); }
  bool can_copy_pages(int from, int to) const override { return runner_->can_copy_pages(from, to); }
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override {
    runner_->copy_page(from_lane, from, to_lane, to);
  }
  int64_t max_drafts() const override { return runner_->max_drafts(); }
  Result<std::span<const int32_t>> draft(std::span<const ForwardBatch> lanes,
                                         std::span<const SampleRow> rows) override {
    return runner_->draft(lanes, rows);
  }
  Result<> begin(std::span<const ForwardBatch> lanes, std::span<const SampleRow> rows) override {
    began_ = std::chrono::steady_clock::now();
    return runner_->begin(lanes, rows);
  }
  Result<std::span<const SampledToken>> finish() override {
    auto tokens = runner_->finish();
    longest_ = std::max(longest_, std::chrono::steady_clock::now() - began_);
    return tokens;
  }

 private:
  const std::unique_ptr<Runner> runner_;
  std::chrono::nanoseconds& longest_;
  std::chrono::steady_clock::time_point began_;
};

// Random arrivals, aborts and idle lanes until the engine has run so many steps; completed answers
// are those of one process.
void run_steps(const std::vector<int>& ranks_of_node, int64_t steps,
               const FakeDrafts& drafts = {}) {
  FakeModel model{.num_pages = 24, .num_lanes = 0};
  for (const int ranks : ranks_of_node) model.num_lanes += ranks;
  Nodes nodes(model, ranks_of_node, {}, drafts);
  EngineOptions options = small_steps();
  options.max_drafts = drafts.most;
  options.adapts_drafts = false;
  const auto tokenizer = fake_tokenizer();
  std::mt19937 random(static_cast<uint32_t>(model.num_lanes));
  int64_t compared = 0, accepted = 0, drafted = 0;
  std::chrono::nanoseconds longest{0};  // the engine's thread's, until it has ended
  {
    auto engine = std::move(*Engine::create(
        options, std::make_unique<Stopwatch>(std::move(nodes.leader), longest), tokenizer));
    while (engine->stats().steps < steps) {
      std::deque<Waiting> waiting;
      std::vector<RequestId> ids;
      std::atomic<int> open = 0;
      for (uint32_t count = 1 + random() % 12; count > 0; --count) {
        Request request = random_request(random);
        Waiting& one = waiting.emplace_back(
            Waiting{request, AnswerCollector(static_cast<int>(request.sampling.n))});
        ++open;
        const auto id = engine->submit(std::move(request), [&one, &open](const Event& event) {
          one.collector.add(event);
          if (event.last) --open;
        });
        ASSERT_TRUE(id) << id.error().message;
        ids.push_back(*id);
        if (random() % 8 == 0) std::this_thread::sleep_for(random() % 2000 * 1us);
        if (random() % 10 == 0) engine->abort(ids[random() % ids.size()]);
      }
      while (open > 0) std::this_thread::sleep_for(100us);
      ASSERT_FALSE(engine->is_dead()) << engine->has_room().error().message;
      // Few are computed again: the reference is slow.
      const Waiting& one = waiting[random() % waiting.size()];
      for (size_t i = 0; i < one.collector.answers.size(); ++i) {
        const Answer& answer = one.collector.answers[i];
        if (answer.finish == FinishReason::kAbort) continue;
        ASSERT_TRUE(answer.finish && *answer.finish != FinishReason::kError);
        expect_equal(answer, serial_answer(model, *tokenizer, one.request, static_cast<int>(i)),
                     "");
        ++compared;
      }
      if (testing::Test::HasFailure()) break;
    }
    engine->stop();
    accepted = engine->stats().speculation.accepted_tokens;
    drafted = engine->stats().speculation.draft_tokens;
  }
  nodes.join();
  for (const Result<>& end : nodes.ends) EXPECT_TRUE(end) << end.error().message;
  EXPECT_GT(compared, 0);
  EXPECT_EQ(drafted > 0, drafts.most > 0);
  // If one of two lanes were always wrong, only half of the drafts would be accepted. Right drafts
  // after a sequence's end, and those that penalties of earlier drafts would change, are not
  // accepted.
  if (drafts.kind == FakeDrafts::Kind::kRight) {
    EXPECT_GE(accepted, drafted * 3 / 4);
  }
  std::printf("the longest of %lld steps took %.3f s\n", static_cast<long long>(steps),
              std::chrono::duration<double>(longest).count());
  // Steps take less than a millisecond; the limit is for machines that are busy otherwise.
  EXPECT_LT(longest, 20s);
}

TEST(Nodes, StepsOnTwoGiveTheAnswersOfOne) { run_steps({1, 1}, 3000); }
TEST(Nodes, StepsOnThreeGiveTheAnswersOfOne) { run_steps({1, 1, 1}, 1000); }
// Lanes of one node copy pages among themselves.
TEST(Nodes, StepsOnNodesOfSeveralLanesGiveTheAnswersOfOne) { run_steps({1, 3}, 2000); }
// The same with drafts, which lanes of other nodes sample.
TEST(Nodes, DraftsOfAllLanesAreRight) { run_steps({1, 1}, 400, {.most = 3}); }
TEST(Nodes, DraftsThatAreRightInTurnsChangeNoAnswer) {
  run_steps({1, 3}, 400, {.most = 3, .kind = FakeDrafts::Kind::kInTurns});
}
// Run by name as a test of its own.
TEST(Nodes, DISABLED_AMillionStepsOnTwo) { run_steps({1, 2}, 1'000'000); }

Request long_request() {
  Request request;
  request.prompt_ids = {1, 2, 3};
  request.sampling.max_tokens = 1000;
  request.sampling.ignore_eos = true;
  request.sampling.seed = 1;
  return request;
}

TEST(Nodes, AFollowerThatFailsEndsAllWithItsWords) {
  int64_t left = 20;
  Nodes nodes({.num_lanes = 3}, {1, 1, 1}, [&](int node) -> Result<> {
    if (node == 1 && --left == 0) return error(Code::kInternal, "a fault");
    return {};
  });
  auto engine = std::move(*Engine::create(small_steps(), std::move(nodes.leader), nullptr));
  std::vector<AnswerCollector> collectors(3, AnswerCollector(1));
  std::vector<std::string> errors(3);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(engine->submit(long_request(), [&, i](const Event& event) {
      collectors[i].add(event);
      if (event.finish) errors[i] = event.error.message;
    }));
  }
  ASSERT_TRUE(engine->wait_until_dead(60s));
  engine->stop();  // it is dead before its last statistics are there
  for (const LaneStats& lane : engine->stats().lanes) EXPECT_EQ(lane.pages_used, 0);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(collectors[i].answers[0].finish, FinishReason::kError);
    EXPECT_NE(errors[i].find("rank 1 failed: a fault"), std::string::npos) << errors[i];
  }
  engine.reset();
  nodes.join();
  EXPECT_NE(nodes.ends[2].error().message.find("rank 1 failed: a fault"), std::string::npos)
      << nodes.ends[2].error().message;
}

TEST(Nodes, AnIdleEngineLearnsThatANodeIsLost) {
  Nodes nodes({.num_lanes = 2}, {1, 1});
  AbortWord& word = nodes.world->abort_word();
  auto engine = std::move(*Engine::create(small_steps(), std::move(nodes.leader), nullptr));
  EXPECT_FALSE(engine->is_dead());
  word.abort(1, Status{Code::kUnavailable, "node 1 (rank 1): gone"});
  ASSERT_TRUE(engine->wait_until_dead(60s));
  const auto refused = engine->submit(long_request(), [](const Event&) {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message,
            "the engine is dead: rank 1 failed: node 1 (rank 1): gone (node 0 was between steps, "
            "after step 0)");
}

TEST(Nodes, AStepThatIsSentTwiceIsFound) {
  Nodes nodes({.num_lanes = 2}, {1, 1});
  ForwardBatch none;
  none.query_start = {0};
  const std::vector<ForwardBatch> lanes(2, none);
  WireWriter writer;
  const std::vector<uint8_t> has_lane = {0, 1};
  write_step({.id = {nodes.world->epoch(), 1}, .lanes = lanes, .has_lane = has_lane}, writer);
  nodes.world->send(1, writer.bytes());
  nodes.world->send(1, writer.bytes());
  for (int i = 0; i < 60'000 && !nodes.leader->is_lost(); ++i) std::this_thread::sleep_for(1ms);
  nodes.join();
  ASSERT_FALSE(nodes.ends[1]);
  EXPECT_NE(nodes.ends[1].error().message.find("step 1 of epoch"), std::string::npos)
      << nodes.ends[1].error().message;
}

TEST(Nodes, AnotherTableOfExpertsIsFoundInItsStep) {
  Nodes nodes({.num_lanes = 2}, {1, 1});
  ForwardBatch none;
  none.query_start = {0};
  const std::vector<ForwardBatch> lanes(2, none);
  const std::vector<uint8_t> has_lane = {0, 1};
  WireWriter writer;
  write_step({.id = {nodes.world->epoch(), 1}, .experts = 5, .lanes = lanes, .has_lane = has_lane},
             writer);
  nodes.world->send(1, writer.bytes());
  for (int i = 0; i < 60'000 && !nodes.leader->is_lost(); ++i) std::this_thread::sleep_for(1ms);
  nodes.join();
  ASSERT_FALSE(nodes.ends[1]);
  EXPECT_EQ(nodes.ends[1].error().message,
            "the experts of step 1 are placed by table 0000000000000000 here, by 0000000000000005 "
            "on node 0");
}

TEST(Nodes, AStepThatIsTooLongIsRefusedAndTheNextOneRuns) {
  Nodes nodes({.num_lanes = 2}, {1, 1});
  ForwardBatch none, batch;
  none.query_start = {0};
  batch.token_ids = {5};
  batch.positions = batch.context_lens = {0};
  batch.query_start = {0, 1};
  batch.prompt_lens = {1};
  batch.block_tables = {0};
  batch.max_pages = 1;
  batch.logit_rows = {0};
  const std::vector<ForwardBatch> lanes = {none, batch};
  const SampleOptions options{.temperature = 0, .seed = 1};
  const std::vector<uint32_t> mask((64 << 20) / sizeof(uint32_t));
  SampleRow row{.options = &options, .allowed = mask};
  const auto begun = nodes.leader->begin(lanes, {&row, 1});
  ASSERT_FALSE(begun);
  EXPECT_EQ(begun.error().code, Code::kResourceExhausted);
  EXPECT_FALSE(nodes.leader->is_lost());
  row.allowed = {};
  ASSERT_TRUE(nodes.leader->begin(lanes, {&row, 1}));
  const auto tokens = nodes.leader->finish();
  ASSERT_TRUE(tokens) << tokens.error().message;
  EXPECT_EQ(tokens->size(), 1);
  EXPECT_GE(tokens->front().id, 0);
}

}  // namespace
}  // namespace fathom
