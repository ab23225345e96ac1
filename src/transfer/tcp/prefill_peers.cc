#include "transfer/tcp/prefill_peers.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "base/random.h"
#include "cache/latent_layout.h"
#include "transfer/tcp/io_run.h"
#include "transfer/tcp/peer_session.h"

namespace fathom {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{100};
// With so many tokens more on order than another peer, one does not get what its cache has.
constexpr int64_t kMostImbalance = 16384;

// Hash of the salt and of the text's first page.
uint64_t beginning_of(const PromptOrder& order) {
  uint64_t hash = 0;
  for (const char c : order.cache_salt) hash = mix64(hash ^ static_cast<uint8_t>(c));
  const size_t count = std::min(order.tokens.size(), static_cast<size_t>(kPageSize));
  for (size_t i = 0; i < count; ++i) hash = mix64(hash ^ static_cast<uint32_t>(order.tokens[i]));
  return hash;
}

}  // namespace

struct PrefillPeers::Parts : PeerSessionOwner {
  struct Peer {
    std::shared_ptr<PeerSession> session;  // I/O thread
    std::chrono::nanoseconds retry{};
    std::string told;  // the last failure that was logged
    bool without_lanes = false;
    // Guarded by the mutex.
    bool is_tried = false;
    std::string refusal;
    std::shared_ptr<PeerSession> ready;  // null: not
    std::string engine;                  // its id
    Clock::time_point paused_until;
    int64_t tokens = 0;  // of orders that it holds
  };
  struct Order {
    size_t peer = 0;
    const PeerSession* session = nullptr;
    int64_t tokens = 0;
    bool is_held = true;  // not sent completely, nor given up
  };

  Parts(const PrefillPeersOptions& the_options, std::shared_ptr<PieceMailbox> the_mailbox)
      : options(the_options), mailbox(std::move(the_mailbox)), peers(options.peers.size()) {}

  void begin(size_t number);
  void retry(size_t number);
  void tick();
  void stop();
  Peer* choose(const PromptOrder& order);
  bool is_usable(const Peer& peer, Clock::time_point now) const {
    return peer.ready != nullptr && now >= peer.paused_until;
  }
  bool has_usable() const;
  bool has_order(const PeerSession& session, const TicketId& id) const;
  void release(Order& order);

  void on_ready(PeerSession& session) override;
  void on_lost(PeerSession& session, const std::string& why, bool is_refused) override;
  void on_done(PeerSession& session, const TicketId& id) override;
  void on_failed(PeerSession& session, FailedOrder failed) override;
  std::unique_ptr<Landing> land(PeerSession& session, const PieceHeader& header) override;
  void count_piece(int64_t size, bool by_lane) override;
  void count_stalled_piece() override { ++stalled; }
  std::vector<std::byte> buffer(size_t size) override { return mailbox->buffer(size); }
  bool on_piece(PeerSession& session, PagePiece& piece, bool by_lane) override;

  std::string name_of(size_t peer) const { return to_string(options.peers[peer]); }

  const PrefillPeersOptions options;
  const std::shared_ptr<PieceMailbox> mailbox;
  asio::io_context context{1};
  asio::executor_work_guard<asio::io_context::executor_type> work{context.get_executor()};
  asio::steady_timer timer{context};
  std::vector<std::unique_ptr<asio::steady_timer>> retries;
  bool stopping = false;  // I/O thread
  mutable std::mutex mutex;
  std::condition_variable tried;
  std::vector<Peer> peers;
  std::unordered_map<TicketId, Order, TicketIdHash> orders;
  std::atomic<int64_t> sessions_lost{0}, refused{0}, pieces{0}, lane_pieces{0}, bytes{0},
      foreign{0}, stalled{0};
  std::thread thread;
};

void PrefillPeers::Parts::begin(size_t number) {
  if (stopping) return;
  Peer& peer = peers[number];
  peer.session = std::make_shared<PeerSession>(context, options, number,
                                               options.needs_lane || !peer.without_lanes, *this);
  peer.session->start();
}

void PrefillPeers::Parts::retry(size_t number) {
  Peer& peer = peers[number];
  peer.retry =
      peer.retry.count() == 0 ? options.retry_first : std::min(2 * peer.retry, options.retry_most);
  asio::steady_timer& wait = *retries[number];
  wait.expires_after(peer.retry);
  wait.async_wait([this, number](const error_code& ended) {
    if (!ended) begin(number);
  });
}

void PrefillPeers::Parts::tick() {
  timer.expires_after(kTick);
  timer.async_wait([this](const error_code& ended) {
    if (ended || stopping) return;
    const auto now = Clock::now();
    for (Peer& peer : peers) {
      const auto session = peer.session;  // it may be lost
      if (session) session->tick(now);
    }
    tick();
  });
}

void PrefillPeers::Parts::stop() {
  stopping = true;
  timer.cancel();
  for (const auto& wait : retries) wait->cancel();
  for (Peer& peer : peers) {
    if (const auto session = std::exchange(peer.session, nullptr)) session->abandon();
  }
  {
    const std::lock_guard lock(mutex);
    for (Peer& peer : peers) peer.ready = nullptr;
  }
  work.reset();
}

// The mutex is held.
bool PrefillPeers::Parts::has_usable() const {
  const auto now = Clock::now();
  return std::any_of(peers.begin(), peers.end(),
                     [&](const Peer& peer) { return is_usable(peer, now); });
}

// The one that the order prefers, or by the largest hash of peer and text: when a peer comes or
// goes, other peers' texts stay where they are. The mutex is held.
PrefillPeers::Parts::Peer* PrefillPeers::Parts::choose(const PromptOrder& order) {
  const auto now = Clock::now();
  const uint64_t beginning = beginning_of(order);
  Peer *preferred = nullptr, *least = nullptr;
  uint64_t most = 0;
  for (size_t number = 0; number < peers.size(); ++number) {
    Peer& peer = peers[number];
    if (!is_usable(peer, now)) continue;
    if (!order.prefer.empty() && (order.prefer == peer.engine || order.prefer == name_of(number))) {
      return &peer;
    }
    const uint64_t weight = mix64(beginning ^ mix64(number + 1));
    if (preferred == nullptr || weight > most) preferred = &peer, most = weight;
    if (least == nullptr || peer.tokens < least->tokens) least = &peer;
  }
  return preferred != nullptr && preferred->tokens - least->tokens > kMostImbalance ? least
                                                                                    : preferred;
}

// The mutex is held.
void PrefillPeers::Parts::release(Order& order) {
  if (!std::exchange(order.is_held, false)) return;
  peers[order.peer].tokens -= order.tokens;
}

void PrefillPeers::Parts::on_ready(PeerSession& session) {
  Peer& peer = peers[session.peer()];
  peer.retry = {};
  peer.told.clear();
  log_info("transfer: the prefill side at {} computes prompts", name_of(session.peer()));
  const std::lock_guard lock(mutex);
  peer.ready = peer.session;
  peer.engine = engine_id_text(session.engine());
  peer.paused_until = {};
  peer.refusal.clear();
  peer.is_tried = true;
  tried.notify_all();
}

void PrefillPeers::Parts::on_lost(PeerSession& session, const std::string& why, bool is_refused) {
  const size_t number = session.peer();
  Peer& peer = peers[number];
  std::vector<FailedOrder> failures;
  bool is_loss = false;
  {
    const std::lock_guard lock(mutex);
    is_loss = std::exchange(peer.ready, nullptr) != nullptr;
    peer.is_tried = true;
    if (is_refused) peer.refusal = why;
    const Code code = has_usable() ? Code::kInternal : Code::kUnavailable;
    for (auto& [id, order] : orders) {
      if (order.session != &session) continue;
      order.session = nullptr;
      release(order);
      failures.push_back(
          {id, {code, fmt::format("the prefill side at {} is lost: {}", name_of(number), why)}});
    }
    tried.notify_all();
  }
  for (FailedOrder& failed : failures) mailbox->fail(std::move(failed));
  sessions_lost += is_loss;
  refused += is_refused;
  if (why != peer.told) {
    log_warning("transfer: the prefill side at {} {}: {}", name_of(number),
                is_refused ? "refuses this side"
                : is_loss  ? "is lost"
                           : "cannot be reached",
                why);
    peer.told = why;
  }
  peer.without_lanes |= session.lanes_are_useless();
  peer.session = nullptr;
  if (!stopping) retry(number);
}

void PrefillPeers::Parts::on_done(PeerSession& session, const TicketId& id) {
  const std::lock_guard lock(mutex);
  const auto order = orders.find(id);
  if (order != orders.end() && order->second.session == &session) release(order->second);
}

// A failure of the prompt's computation is worth another attempt; one that another attempt at the
// same place would repeat is not.
void PrefillPeers::Parts::on_failed(PeerSession& session, FailedOrder failed) {
  {
    const std::lock_guard lock(mutex);
    const auto order = orders.find(failed.ticket);
    if (order == orders.end() || order->second.session != &session) return;
    release(order->second);
    const Code code = failed.why.code;
    if (code == Code::kResourceExhausted || code == Code::kUnavailable) {
      peers[session.peer()].paused_until = Clock::now() + options.pause;
      failed.why.code = has_usable() ? Code::kInternal : Code::kUnavailable;
    } else if (code != Code::kInternal) {
      failed.why.code = Code::kUnavailable;
    }
  }
  failed.why.message =
      fmt::format("the prefill side at {}: {}", name_of(session.peer()), failed.why.message);
  mailbox->fail(std::move(failed));
}

bool PrefillPeers::Parts::has_order(const PeerSession& session, const TicketId& id) const {
  const std::lock_guard lock(mutex);
  const auto order = orders.find(id);
  return order != orders.end() && order->second.session == &session;
}

std::unique_ptr<Landing> PrefillPeers::Parts::land(PeerSession& session,
                                                   const PieceHeader& header) {
  return has_order(session, header.ticket) ? mailbox->land(header) : nullptr;
}

void PrefillPeers::Parts::count_piece(int64_t size, bool by_lane) {
  ++pieces;
  lane_pieces += by_lane;
  bytes += size;
}

bool PrefillPeers::Parts::on_piece(PeerSession& session, PagePiece& piece, bool by_lane) {
  const auto size = std::ssize(piece.rows);
  if (!has_order(session, piece.header.ticket)) {
    ++foreign;
    return true;
  }
  if (!mailbox->put(piece)) return false;
  count_piece(size, by_lane);
  return true;
}

PrefillPeers::PrefillPeers(const PrefillPeersOptions& options,
                           std::shared_ptr<PieceMailbox> mailbox)
    : parts_(std::make_unique<Parts>(options, std::move(mailbox))) {
  Parts& parts = *parts_;
  for (size_t number = 0; number < parts.peers.size(); ++number) {
    parts.retries.push_back(std::make_unique<asio::steady_timer>(parts.context));
    parts.begin(number);
  }
  parts.tick();
  parts.mailbox->watch_room([&parts] {
    asio::post(parts.context, [&parts] {
      for (const auto& peer : parts.peers) {
        if (peer.session) peer.session->resume();
      }
    });
  });
  parts.mailbox->watch_breaks([&parts] {
    asio::post(parts.context, [&parts] {
      for (const auto& peer : parts.peers) {
        const auto session = peer.session;  // it may be lost
        if (session) session->break_landings();
      }
    });
  });
  parts.thread = std::thread([&parts] { run_io(parts.context); });
}

PrefillPeers::~PrefillPeers() {
  parts_->mailbox->watch_room(nullptr);
  parts_->mailbox->watch_breaks(nullptr);
  asio::post(parts_->context, [parts = parts_.get()] { parts->stop(); });
  parts_->thread.join();
}

Result<> PrefillPeers::wait_until_tried(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(parts_->mutex);
  const auto& peers = parts_->peers;
  parts_->tried.wait_for(lock, timeout, [&] {
    return std::all_of(peers.begin(), peers.end(),
                       [](const Parts::Peer& peer) { return peer.is_tried; });
  });
  for (size_t number = 0; number < peers.size(); ++number) {
    if (peers[number].refusal.empty()) continue;
    return invalid("--prefill {} refuses this side: {}", parts_->name_of(number),
                   peers[number].refusal);
  }
  return {};
}

Result<> PrefillPeers::order(PromptOrder order) {
  const TicketId id = order.ticket.id;
  Frame frame = order_frame(order);
  const std::lock_guard lock(parts_->mutex);
  Parts::Peer* const peer = parts_->choose(order);
  if (peer == nullptr) return error(Code::kUnavailable, "no prefill side takes orders");
  const auto number = static_cast<size_t>(peer - parts_->peers.data());
  const std::shared_ptr<PeerSession> session = peer->ready;
  parts_->orders.emplace(
      id,
      Parts::Order{.peer = number, .session = session.get(), .tokens = std::ssize(order.tokens)});
  peer->tokens += std::ssize(order.tokens);
  asio::post(parts_->context,
             [session, frame = std::move(frame)]() mutable { session->send(std::move(frame)); });
  return {};
}

void PrefillPeers::cancel(const TicketId& id) {
  const std::lock_guard lock(parts_->mutex);
  const auto it = parts_->orders.find(id);
  if (it == parts_->orders.end()) return;
  const bool was_held = it->second.is_held;
  const auto session = parts_->peers[it->second.peer].ready;
  const bool is_there = session != nullptr && session.get() == it->second.session;
  parts_->release(it->second);
  parts_->orders.erase(it);
  if (!was_held || !is_there) return;
  asio::post(parts_->context, [session, id] { session->send(cancel_frame(id)); });
}

bool PrefillPeers::holds(const TicketId& id) {
  const std::lock_guard lock(parts_->mutex);
  const auto it = parts_->orders.find(id);
  return it != parts_->orders.end() && it->second.is_held;
}

PrefillPeersStats PrefillPeers::stats() const {
  PrefillPeersStats stats{.sessions_lost = parts_->sessions_lost,
                          .refused = parts_->refused,
                          .pieces_received = parts_->pieces,
                          .bytes_received = parts_->bytes,
                          .lane_pieces_received = parts_->lane_pieces,
                          .foreign_pieces = parts_->foreign,
                          .stalled_pieces = parts_->stalled};
  const std::lock_guard lock(parts_->mutex);
  stats.peers = std::ssize(parts_->peers);
  for (const auto& peer : parts_->peers) stats.ready += peer.ready != nullptr;
  for (const auto& [id, order] : parts_->orders) stats.orders += order.is_held;
  return stats;
}

}  // namespace fathom
