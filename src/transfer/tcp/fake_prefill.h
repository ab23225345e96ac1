// For tests over loopback: a transfer server without an engine, whose links the test has, and a
// decode side.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cache/latent_layout.h"
#include "transfer/piece_wire.h"
#include "transfer/tcp/prefill_peers.h"
#include "transfer/tcp/transfer_server.h"
#include "transfer/ucx/ucx_lane.h"

namespace fathom {

using namespace std::chrono_literals;

inline constexpr int64_t kPageBytes = 4096;
inline const Facts kSharedFacts = {{"model files", "m"}, {"--kv-cache-dtype", "bf16"}};
inline constexpr char kSecret[] = "a secret of sixteen";

// How pieces go in this test.
enum class By { kTcp, kUcx };
inline By by = By::kTcp;

inline std::string name_of_by(const testing::TestParamInfo<By>& info) {
  return info.param == By::kTcp ? "tcp" : "ucx";
}

class OverEach : public testing::TestWithParam<By> {
 protected:
  void SetUp() override {
    by = GetParam();
    if (by == By::kTcp) return;
    if (const auto usable = check_ucx(); !usable) GTEST_SKIP() << usable.error().message;
  }
};
// Waits for what other threads do, however long they take.
inline void wait_for(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + 2min;
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end);
    std::this_thread::sleep_for(1ms);
  }
}

// Takes orders and does with them what the test says.
class ScriptedLink : public PromptLink {
 public:
  explicit ScriptedLink(std::shared_ptr<PieceReceiver> the_receiver)
      : receiver(std::move(the_receiver)) {}

  Result<> order(PromptOrder order) override {
    const std::lock_guard lock(mutex);
    if (refusal) return tl::unexpected(*refusal);
    orders.push_back(std::move(order));
    return {};
  }
  void cancel(const TicketId& id) override {
    const std::lock_guard lock(mutex);
    cancelled.push_back(id);
  }
  bool holds(const TicketId&) override { return true; }

  size_t num_orders() {
    const std::lock_guard lock(mutex);
    return orders.size();
  }
  size_t num_cancelled() {
    const std::lock_guard lock(mutex);
    return cancelled.size();
  }

  const std::shared_ptr<PieceReceiver> receiver;
  std::mutex mutex;
  std::vector<PromptOrder> orders;
  std::vector<TicketId> cancelled;
  std::optional<Status> refusal;
};

inline std::vector<std::byte> rows_of(int64_t page) {
  return std::vector<std::byte>(kPageBytes, static_cast<std::byte>(page));
}

inline std::shared_ptr<LentRows> lent(const std::vector<std::byte>& rows) {
  return lend(std::make_shared<LentRows>(rows));
}

// A server whose sessions' links the test has.
struct Server {
  explicit Server(TransferServerOptions options = {}) {
    options.listen = {.host = "127.0.0.1", .port = options.listen.port};
    options.secret = kSecret;
    options.facts = kSharedFacts;
    options.form = 7;
    if (options.page_bytes == 0) options.page_bytes = kPageBytes;
    options.max_tokens = 1000;
    if (by == By::kUcx && !options.make_lane) options.make_lane = make_ucx_lane;
    auto created = TransferServer::create(options, [this](std::shared_ptr<PieceReceiver> receiver) {
      const std::lock_guard lock(mutex);
      auto link = std::make_shared<ScriptedLink>(std::move(receiver));
      if (refusal) link->refusal = refusal;
      links.push_back(link);
      return link;
    });
    EXPECT_TRUE(created.has_value()) << created.error().message;
    server = std::move(*created);
  }
  std::shared_ptr<ScriptedLink> link(size_t number = 0) {
    wait_for([&] {
      const std::lock_guard lock(mutex);
      return links.size() > number;
    });
    const std::lock_guard lock(mutex);
    return links[number];
  }
  int64_t refused(ConnectionRefusal reason) const {
    return server->stats().refused[static_cast<size_t>(reason)];
  }

  std::mutex mutex;
  std::vector<std::shared_ptr<ScriptedLink>> links;
  std::optional<Status> refusal;
  std::unique_ptr<TransferServer> server;
};

struct Decode {
  explicit Decode(std::vector<Endpoint> peers, PrefillPeersOptions options = {},
                  int64_t window = 1 << 20)
      : mailbox(std::make_shared<PieceMailbox>(window)) {
    options.peers = std::move(peers);
    if (options.secret.empty()) options.secret = kSecret;
    if (options.facts.empty()) options.facts = kSharedFacts;
    if (options.page_bytes == 0) options.page_bytes = kPageBytes;
    options.retry_most = 200ms;
    if (by == By::kUcx && !options.make_lane) options.make_lane = make_ucx_lane;
    links = std::make_unique<PrefillPeers>(options, mailbox);
  }
  void wait_ready(int64_t count = 1) {
    wait_for([&] { return links->stats().ready == count; });
  }
  static PromptOrder order_of(uint64_t number, int64_t tokens = 130) {
    PromptOrder order;
    order.ticket = {.id = {1, 2, number},
                    .request = number,
                    .num_pages = (tokens + kPageSize - 1) / kPageSize,
                    .page_bytes = kPageBytes,
                    .form = 7};
    for (int64_t i = 0; i < tokens; ++i) order.tokens.push_back(static_cast<int32_t>(i));
    return order;
  }
  // What has come since the last call, after at least so much has.
  void collect(size_t num_pieces, size_t num_failures = 0) {
    wait_for([&] {
      mailbox->take(news);
      for (const PagePiece& piece : news.pieces) pieces.push_back(piece);
      for (const FailedOrder& failed : news.failures) failures.push_back(failed);
      return pieces.size() >= num_pieces && failures.size() >= num_failures;
    });
  }

  std::shared_ptr<PieceMailbox> mailbox;
  std::unique_ptr<PrefillPeers> links;
  PieceMailbox::News news;
  std::vector<PagePiece> pieces;
  std::vector<FailedOrder> failures;
};

}  // namespace fathom
