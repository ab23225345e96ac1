// Joining: who is let in, who is refused and with which words.
#include "comm/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "comm/join_records.h"
#include "comm/node_threads.h"
#include "comm/wire.h"

namespace fathom {
namespace {

using std::chrono::milliseconds;

struct Joined {
  std::string error;  // empty: it joined
};

// Joins on a thread for each of the options.
std::vector<Joined> join_all(const std::vector<JoinOptions>& all) {
  std::vector<Joined> joined(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] {
      AbortWord abort_word;
      const auto world = join(all[i], abort_word);
      if (!world) joined[i].error = world.error().message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return joined;
}

std::string join_error(const JoinOptions& options) {
  AbortWord abort_word;
  const auto world = join(options, abort_word);
  return world ? "" : world.error().message;
}

TEST(Join, RefusesADifferentFactOnBothSides) {
  struct Case {
    std::map<std::string, std::string> facts;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{{"version", "1.1"}, {"model", "abc"}}, "node 1 has version '1.1', node 0 has '1.0'"},
      {{{"version", "1.0"}, {"model", "abd"}}, "node 1 has model 'abd', node 0 has 'abc'"},
      {{{"version", "1.0"}}, "node 1 has model nothing, node 0 has 'abc'"},
      {{{"version", "1.0"}, {"model", "abc"}, {"tp", "8\n"}},
       "node 1 has tp '8?', node 0 has nothing"},
  };
  for (const Case& c : cases) {
    const TestListener listener;
    auto leader = test_join_options(listener, 2, 0, 1), node = test_join_options(listener, 2, 1, 1);
    node.facts = c.facts;
    const auto joined = join_all({leader, node});
    EXPECT_EQ(joined[0].error, c.message);
    EXPECT_EQ(joined[1].error, c.message);
  }
}

TEST(Join, RefusesAnotherNumberOfNodes) {
  const TestListener listener;
  const auto joined =
      join_all({test_join_options(listener, 3, 0, 1), test_join_options(listener, 2, 1, 1)});
  EXPECT_EQ(joined[0].error, "node 1 has nnodes 2, node 0 has 3");
  EXPECT_EQ(joined[1].error, "node 1 has nnodes 2, node 0 has 3");
}

std::chrono::steady_clock::time_point soon() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(5);
}

// A node that this test plays by hand: it dials node 0 and says its hello.
FramedConnection say_hello(const TestListener& listener, const NodeHello& hello) {
  FramedConnection connection(std::move(*connect_to(*parse_endpoint(listener.address), soon())));
  connection.queue(MessageType::kHello, encode(hello));
  EXPECT_TRUE(connection.flush());
  return connection;
}

// What node 0 answers.
std::string answer_to(FramedConnection& connection) {
  const auto deadline = soon();
  while (std::chrono::steady_clock::now() < deadline) {
    const bool open = connection.fill();
    auto message = connection.next();
    if (!message) return message.error().message;
    if (*message) {
      const auto welcome = decode_welcome(**message);
      return welcome ? "welcome" : welcome.error().message;
    }
    if (!open) return "closed";
    std::this_thread::sleep_for(milliseconds(1));
  }
  return "no answer";
}

std::string knock(const TestListener& listener, const NodeHello& hello) {
  FramedConnection connection = say_hello(listener, hello);
  return answer_to(connection);
}

NodeHello hello_of(int nnodes, int node_rank) {
  return {kProtocol, nnodes, node_rank, 1, 9, "m", {{"version", "1.0"}, {"model", "abc"}}};
}

// Node 0 on a thread; ended by its abort word.
class LeaderThread {
 public:
  explicit LeaderThread(const JoinOptions& options) {
    thread_ = std::thread([this, options] {
      const auto world = join(options, abort_word_);
      if (!world) error_ = world.error().message;
    });
  }
  std::string abort() {
    abort_word_.abort(0, Status{Code::kInternal, "the test ends"});
    return wait();
  }
  std::string wait() {
    thread_.join();
    return error_;
  }

 private:
  AbortWord abort_word_;
  std::string error_;
  std::thread thread_;
};

TEST(Join, RefusesWhoHasNoPlaceAndGoesOn) {
  const TestListener listener;
  LeaderThread leader(test_join_options(listener, 2, 0, 1));
  EXPECT_EQ(knock(listener, hello_of(2, 2)), "node rank 2 is not below the number of nodes, 2");
  EXPECT_EQ(knock(listener, hello_of(2, -1)), "node rank -1 is not below the number of nodes, 2");
  EXPECT_EQ(knock(listener, hello_of(2, 0)), "node rank 0 leads and is here already");
  EXPECT_EQ(leader.abort(), "the test ends");
}

TEST(Join, RefusesANodeThatCameTwice) {
  const TestListener listener;
  LeaderThread leader(test_join_options(listener, 3, 0, 1));
  {
    FramedConnection first = say_hello(listener, hello_of(3, 1));
    EXPECT_EQ(knock(listener, hello_of(3, 1)), "node rank 1 has come already, from 127.0.0.1");
  }
  // The first has gone: its place is free as soon as node 0 has noticed.
  std::string errors[3];
  std::vector<std::thread> nodes;
  for (const int node : {1, 2}) {
    nodes.emplace_back([&, node] {
      do {
        errors[node] = join_error(test_join_options(listener, 3, node, 1));
      } while (errors[node].find("has come already") != std::string::npos);
    });
  }
  for (std::thread& node : nodes) node.join();
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(errors[2], "");
  EXPECT_EQ(leader.wait(), "");
}

TEST(Join, OthersLearnOfARefusalToo) {
  const TestListener listener;
  FramedConnection other = say_hello(listener, hello_of(3, 1));
  auto bad = test_join_options(listener, 3, 2, 1);
  bad.facts["model"] = "xyz";
  const auto joined = join_all({test_join_options(listener, 3, 0, 1), bad});
  EXPECT_EQ(joined[0].error, "node 2 has model 'xyz', node 0 has 'abc'");
  EXPECT_EQ(joined[1].error, joined[0].error);
  EXPECT_EQ(answer_to(other), joined[0].error);
}

TEST(Join, RefusesItsOwnBadOptions) {
  JoinOptions options;
  options.nnodes = 2;
  options.node_rank = 2;
  EXPECT_EQ(join_error(options), "node rank 2 is not below the number of nodes, 2");
  options.node_rank = -1;
  EXPECT_EQ(join_error(options), "node rank -1 is not below the number of nodes, 2");
  options.nnodes = 0;
  EXPECT_EQ(join_error(options), "the number of nodes is 0; it is 1 or more");
  options = {.nnodes = 2, .num_ranks = 0};
  EXPECT_EQ(join_error(options), "a node has 0 ranks; it needs 1");
  for (const int node : {0, 1}) {
    options = {.nnodes = 2, .node_rank = node, .address = "localhost"};
    EXPECT_EQ(join_error(options), "'localhost' is not HOST:PORT: it has no port");
  }
}

TEST(Join, RefusesAPortInUse) {
  const TestListener listener;
  auto options = test_join_options(listener, 2, 0, 1);
  options.listener = -1;
  EXPECT_EQ(join_error(options), "port " + std::to_string(parse_endpoint(listener.address)->port) +
                                     " of 127.0.0.1 is in use by another process");
}

TEST(Join, ALeaderThatDoesNotAnswerIsNamed) {
  std::string address;
  {
    const TestListener closed;
    address = closed.address;
  }
  JoinOptions options;
  options.nnodes = 2;
  options.node_rank = 1;
  options.address = address;
  options.limit = milliseconds(200);
  EXPECT_EQ(join_error(options), "gave up after 0.2 s: waiting for node 0 to answer at " + address +
                                     ": Connection refused");
  // One that takes the connection and says nothing.
  const TestListener silent;
  options.address = silent.address;
  EXPECT_EQ(join_error(options), "gave up after 0.2 s: waiting for node 0 at " + silent.address +
                                     " to call all nodes together");
  options.address = "no-such-host.invalid:5000";
  EXPECT_NE(join_error(options).find("host 'no-such-host.invalid' is not known"),
            std::string::npos);
}

TEST(Join, ANodeThatDoesNotComeIsNamed) {
  const TestListener listener;
  auto leader = test_join_options(listener, 4, 0, 1);
  leader.limit = milliseconds(1500);
  auto node = std::async(std::launch::async, join_error, test_join_options(listener, 4, 2, 1));
  // Node 0's limit begins when node 2's connection is pending. A node that connects after node 0
  // has given up stays in the listener's backlog until its own limit of 300 s.
  pollfd called{listener.fd.get(), POLLIN, 0};
  ASSERT_EQ(poll(&called, 1, -1), 1);
  const std::string message =
      "gave up after 1.5 s: waiting for nodes 1, 3 of 4 at " + listener.address;
  EXPECT_EQ(join_error(leader), message);
  EXPECT_EQ(node.get(), message);
}

TEST(Join, StrangersDisturbNobody) {
  const TestListener listener;
  const auto dial = [&] {
    return std::move(*connect_to(*parse_endpoint(listener.address), soon()));
  };
  const Fd silent = dial();
  const Fd http = dial();
  const std::string request = "GET / HTTP/1.1\r\n\r\n";
  send(http.get(), request.data(), request.size(), MSG_NOSIGNAL);
  { const Fd gone = dial(); }
  FramedConnection confused(dial());
  confused.queue(MessageType::kGoodbye);
  confused.flush();
  FramedConnection cut(dial());
  const auto hello = encode(hello_of(2, 1));
  cut.queue(MessageType::kHello, std::span(hello).first(hello.size() - 3));
  cut.flush();
  const auto joined =
      join_all({test_join_options(listener, 2, 0, 1), test_join_options(listener, 2, 1, 2)});
  EXPECT_EQ(joined[0].error, "");
  EXPECT_EQ(joined[1].error, "");
}

TEST(Join, TakesNamesAndIpv6) {
  for (const std::string host : {"localhost", "::1"}) {
    const TestListener listener(host);
    if (!listener.fd) continue;  // a machine without IPv6
    const auto joined =
        join_all({test_join_options(listener, 2, 0, 1), test_join_options(listener, 2, 1, 1)});
    EXPECT_EQ(joined[0].error, "") << listener.address;
    EXPECT_EQ(joined[1].error, "") << listener.address;
  }
}

TEST(Join, OpensTheAddressItself) {
  // A port that was free a moment ago; if somebody has taken it, the next one.
  for (int attempt = 0; attempt < 20; ++attempt) {
    JoinOptions leader, node;
    {
      const TestListener free;
      leader = test_join_options(free, 2, 0, 1);
      node = test_join_options(free, 2, 1, 1);
    }
    leader.listener = -1;
    const auto joined = join_all({leader, node});
    if (joined[0].error.find("in use") != std::string::npos) continue;
    EXPECT_EQ(joined[0].error, "");
    EXPECT_EQ(joined[1].error, "");
    return;
  }
  FAIL() << "no port is free";
}

TEST(Join, AnAbortEndsTheWait) {
  const TestListener listener;
  for (const int node : {0, 1}) {
    AbortWord abort_word;
    std::thread aborting([&] {
      std::this_thread::sleep_for(milliseconds(20));
      abort_word.abort(-1, Status{Code::kUnavailable, "a signal"});
    });
    const auto world = join(test_join_options(listener, 2, node, 1), abort_word);
    EXPECT_FALSE(world);
    EXPECT_EQ(world.error().message, "a signal");
    aborting.join();
  }
}

TEST(RankConnections, RefuseWhoDoesNotKnowTheToken) {
  const TestListener listener;
  const WorldToken token{1, 2};
  const WorldLayout layout0{0, {1, 1}}, layout1{1, {1, 1}};
  const std::vector<Endpoint> endpoints = {*parse_endpoint(listener.address), {}};
  const auto wanted = [] { return Result<>(); };
  const Fd unused = std::move(*listen_on({"127.0.0.1", 0}));
  Result<RankConnections> accepted = RankConnections();
  std::thread acceptor([&] {
    accepted = connect_ranks(layout0, listener.fd.get(), endpoints, token, soon(), wanted);
  });
  for (const WorldToken wrong : {WorldToken{1, 3}, WorldToken{0, 2}, WorldToken{0, 0}}) {
    const auto refused = connect_ranks(layout1, unused.get(), endpoints, wrong, soon(), wanted);
    EXPECT_FALSE(refused);
    if (refused) continue;
    EXPECT_NE(refused.error().message.find("it was refused: it is of another run of this world"),
              std::string::npos)
        << refused.error().message;
  }
  const auto right = connect_ranks(layout1, unused.get(), endpoints, token, soon(), wanted);
  EXPECT_TRUE(right);
  acceptor.join();
  ASSERT_TRUE(accepted);
  EXPECT_EQ(accepted->size(), 1);
}

TEST(Endpoints, AreRead) {
  EXPECT_EQ(*parse_endpoint("host-0.svc:5000"), (Endpoint{"host-0.svc", 5000}));
  EXPECT_EQ(*parse_endpoint("10.0.0.1:1"), (Endpoint{"10.0.0.1", 1}));
  EXPECT_EQ(*parse_endpoint("[fe80::1]:65535"), (Endpoint{"fe80::1", 65535}));
  EXPECT_EQ(to_string(Endpoint{"::1", 5}), "[::1]:5");
  EXPECT_EQ(to_string(Endpoint{"a", 5}), "a:5");
  for (const char* bad : {"", "host", ":5000", "host:", "host:0", "host:65536", "host:5x",
                          "host:-1", "::1:5000", "[]:5000", "host:99999999999"}) {
    EXPECT_FALSE(parse_endpoint(bad)) << bad;
  }
}

TEST(Records, CutShortAreRefused) {
  const auto hello = encode(hello_of(3, 1));
  ASSERT_TRUE(decode_hello({MessageType::kHello, hello}));
  for (size_t size = 0; size < hello.size(); ++size) {
    EXPECT_FALSE(decode_hello({MessageType::kHello, {hello.begin(), hello.begin() + size}}));
  }
  const auto welcome = encode(NodeWelcome{{1, 2}, {1, 2}, {0, 0}, {{"", 5}, {"host", 6}}});
  const auto read = decode_welcome({MessageType::kWelcome, welcome});
  ASSERT_TRUE(read);
  EXPECT_EQ(read->token.low, 2);
  EXPECT_EQ(read->ranks_of_node, (std::vector<int>{1, 2}));
  EXPECT_EQ(read->machine_of_node, (std::vector<int>{0, 0}));
  EXPECT_EQ(read->endpoints[1], (Endpoint{"host", 6}));
  for (size_t size = 0; size < welcome.size(); ++size) {
    EXPECT_FALSE(
        decode_welcome({MessageType::kWelcome, {welcome.begin(), welcome.begin() + size}}));
  }
}

}  // namespace
}  // namespace fathom
