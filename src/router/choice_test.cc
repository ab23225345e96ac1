// The choice of a replica and the circuit breaker, without sockets and clocks.
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <map>

#include "router/circuit_breaker.h"
#include "router/policy.h"
#include "router/replica_set.h"

namespace fathom::router {
namespace {

using std::chrono::seconds;
const Time kStart{};

TEST(Policy, PrefixBeforeLoadAboveTheThresholdOnly) {
  PolicyOptions options;
  const Candidate candidates[] = {{.name = "a", .load = 0},
                                  {.name = "b", .load = 5, .prefix_bytes = 40}};
  const Choice near = choose(options, candidates, 100, "", 0, 1);
  EXPECT_EQ(near.index, 1);
  EXPECT_EQ(near.reason, Reason::kPrefix);
  const Choice far = choose(options, candidates, 200, "", 0, 1);
  EXPECT_EQ(far.index, 0);
  EXPECT_EQ(far.reason, Reason::kLoad);
}

TEST(Policy, ImbalanceNeedsBothThresholdsAndOverridesPrefixAndSession) {
  const PolicyOptions options{.balance_abs = 10, .balance_rel = 2};
  const auto reason = [&](int64_t idle, int64_t busy) {
    const Candidate candidates[] = {{.name = "a", .load = busy, .prefix_bytes = 9},
                                    {.name = "b", .load = idle}};
    return choose(options, candidates, 10, "", 0, 1).reason;
  };
  EXPECT_EQ(reason(0, 10), Reason::kPrefix);  // not more than 10 apart
  EXPECT_EQ(reason(0, 11), Reason::kImbalance);
  EXPECT_EQ(reason(20, 31), Reason::kPrefix);  // not more than twice as many
  EXPECT_EQ(reason(20, 41), Reason::kImbalance);
  const Candidate candidates[] = {{.name = "a", .load = 50}, {.name = "b"}};
  for (const char* session : {"1", "2", "3", "4"}) {
    EXPECT_EQ(choose(options, candidates, 0, session, 0, 1).index, 1);
  }
}

TEST(Policy, SessionsStayWhenAReplicaGoes) {
  const PolicyOptions options;
  const Candidate all[] = {{.name = "a"}, {.name = "b"}, {.name = "c"}};
  const Candidate two[] = {{.name = "a"}, {.name = "b"}};
  std::map<size_t, int> counts;
  for (int i = 0; i < 3000; ++i) {
    const std::string session = std::to_string(i);
    const Choice before = choose(options, all, 0, session, 0, 1);
    EXPECT_EQ(before.reason, Reason::kSession);
    ++counts[before.index];
    const Choice after = choose(options, two, 0, session, 0, 1);
    if (before.index < 2) {
      EXPECT_EQ(after.index, before.index);
    }
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(counts[i], 1000, 150);
}

TEST(Policy, PowerOfTwoTakesTheLessLoadedAndNeverTheWorst) {
  const PolicyOptions options{.policy = Policy::kPowerOfTwo};
  const Candidate candidates[] = {{.name = "a", .load = 9},
                                  {.name = "b", .load = 1},
                                  {.name = "c", .load = 1, .cache_use = 0.5}};
  std::map<size_t, int> counts;
  for (uint64_t i = 0; i < 300; ++i) {
    ++counts[choose(options, candidates, 0, "", 0, i * 0x9E3779B97F4A7C15).index];
  }
  EXPECT_EQ(counts[0], 0);
  EXPECT_GT(counts[1], counts[2]);
  EXPECT_GT(counts[2], 0);
}

TEST(Policy, RoundRobinTakesTurns) {
  const PolicyOptions options{.policy = Policy::kRoundRobin};
  const Candidate candidates[] = {{.name = "a", .prefix_bytes = 9}, {.name = "b"}, {.name = "c"}};
  for (int64_t turn = 0; turn < 6; ++turn) {
    EXPECT_EQ(choose(options, candidates, 10, "", turn, 1).index, turn % 3);
  }
}

TEST(CircuitBreaker, OpensAfterFailuresInARowAndTriesOneRequest) {
  CircuitBreaker breaker({.failure_threshold = 3, .success_threshold = 2, .open_for = seconds(30)});
  for (int i = 0; i < 2; ++i) breaker.failed(breaker.begin(), kStart);
  breaker.succeeded(breaker.begin());  // ends the row
  for (int i = 0; i < 2; ++i) breaker.failed(breaker.begin(), kStart);
  EXPECT_TRUE(breaker.admits(kStart));
  const auto late = breaker.begin();
  breaker.failed(breaker.begin(), kStart);
  EXPECT_FALSE(breaker.admits(kStart + seconds(29)));
  EXPECT_EQ(breaker.times_opened(), 1);
  ASSERT_TRUE(breaker.admits(kStart + seconds(30)));
  const auto trial = breaker.begin();
  EXPECT_FALSE(breaker.admits(kStart + seconds(30)));  // one at a time
  breaker.failed(late, kStart + seconds(30));          // of before: says nothing
  EXPECT_EQ(breaker.state(), CircuitBreaker::State::kHalfOpen);
  breaker.succeeded(trial);
  ASSERT_TRUE(breaker.admits(kStart + seconds(31)));
  breaker.succeeded(breaker.begin());
  EXPECT_EQ(breaker.state(), CircuitBreaker::State::kClosed);
}

TEST(CircuitBreaker, AFailedTrialOpensItAgainAndAForgottenOneMakesRoom) {
  CircuitBreaker breaker({.failure_threshold = 1, .open_for = seconds(10)});
  breaker.failed(breaker.begin(), kStart);
  ASSERT_TRUE(breaker.admits(kStart + seconds(10)));
  breaker.forgotten(breaker.begin());
  ASSERT_TRUE(breaker.admits(kStart + seconds(10)));
  breaker.failed(breaker.begin(), kStart + seconds(10));
  EXPECT_FALSE(breaker.admits(kStart + seconds(19)));
  breaker.try_now();
  EXPECT_TRUE(breaker.admits(kStart + seconds(19)));
}

class Replicas : public testing::Test {
 protected:
  std::shared_ptr<Replica> add(int port) {
    auto replica = set_.add({"127.0.0.1", port}).value();
    replica->poll_succeeded(true, {});
    return replica;
  }
  int64_t pick(std::string_view prompt, const std::vector<int64_t>& tried = {}) {
    const auto pick = set_.pick(prompt, "", tried, kStart);
    if (!pick) return 0;
    --pick->replica->outstanding;
    return pick->replica->number;
  }
  boost::asio::io_context context_;
  ReplicaSet set_{context_, {}};
};

TEST_F(Replicas, APromptGoesWhereItsBeginningWent) {
  add(1), add(2), add(3);
  const int64_t first = pick("a long system prompt and a question");
  for (int i = 0; i < 20; ++i) EXPECT_EQ(pick("a long system prompt and another"), first);
  EXPECT_NE(pick("a long system prompt and another", {first}), first);
  EXPECT_EQ(pick("x", {1, 2, 3}), 0);
}

TEST_F(Replicas, DrainingUnreadyAndOpenOnesGetNothing) {
  const auto a = add(1), b = add(2), c = add(3);
  const auto d = set_.add({"127.0.0.1", 4}).value();  // not polled yet
  EXPECT_TRUE(set_.drain({"127.0.0.1", 1}));
  b->poll_succeeded(false, {});
  EXPECT_EQ(pick("x"), c->number);
  for (int i = 0; i < 5; ++i) c->breaker.failed(c->breaker.begin(), kStart);
  EXPECT_EQ(pick("x"), 0);
  EXPECT_FALSE(set_.has_other({}, kStart));
  EXPECT_TRUE(set_.add({"127.0.0.1", 1}));  // back from draining
  EXPECT_EQ(pick("x"), a->number);
  EXPECT_TRUE(set_.remove({"127.0.0.1", 1}));
  EXPECT_FALSE(set_.drain({"127.0.0.1", 1}));
  EXPECT_EQ(pick("x"), 0);
}

// It is back before a poll has missed it.
TEST_F(Replicas, AReplicaThatRequestsFoundGoneIsTriedAtOnce) {
  for (const CallFailure failure : {CallFailure::kNotConnected, CallFailure::kLost}) {
    const auto a = add(1);
    for (int i = 0; i < 5; ++i) a->call_failed(failure, a->breaker.begin(), kStart);
    EXPECT_EQ(pick("x"), 0);
    EXPECT_TRUE(a->poll_succeeded(true, {})) << "its cache may be gone";
    EXPECT_EQ(pick("x"), a->number);
    EXPECT_FALSE(a->poll_succeeded(true, {}));
    EXPECT_TRUE(set_.remove({"127.0.0.1", 1}));
  }
  const auto b = add(2);
  for (int i = 0; i < 5; ++i) {
    b->call_failed(CallFailure::kBroken, b->breaker.begin(), kStart);
  }
  EXPECT_FALSE(b->poll_succeeded(true, {}));
  EXPECT_EQ(pick("x"), 0) << "it is there, and its replies break";
}

TEST_F(Replicas, AReplicaThatComesBackIsTriedAtOnce) {
  const auto a = add(1);
  for (int i = 0; i < 5; ++i) a->breaker.failed(a->breaker.begin(), kStart);
  for (int i = 0; i < 2; ++i) a->poll_failed(3);
  EXPECT_TRUE(a->ready());
  a->poll_failed(3);
  EXPECT_FALSE(a->ready());
  EXPECT_TRUE(a->poll_succeeded(true, {}));
  EXPECT_EQ(pick("x"), a->number);
}

TEST_F(Replicas, LoadCountsRequestsOfOthers) {
  const auto a = add(1);
  a->outstanding = 3;
  a->poll_succeeded(true, ReplicaLoad{.running = 4, .waiting = 2});
  EXPECT_EQ(a->load(), 6);
  a->outstanding = 5;
  EXPECT_EQ(a->load(), 8);
}

}  // namespace
}  // namespace fathom::router
