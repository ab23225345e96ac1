#include "comm/control_channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/wire.h"

namespace fathom {
namespace {

// Maximum bytes queued for a peer that does not read, or received from it and not yet read.
constexpr size_t kMaxWaiting = 256 << 20;
// How long a process that ends waits for others to read its last message.
constexpr auto kParting = std::chrono::seconds(1);

}  // namespace

ControlChannel::ControlChannel(WorldLayout layout, std::map<int, FramedConnection>&& connections,
                               AbortWord& abort_word, HeartbeatOptions options)
    : layout_(std::move(layout)), abort_word_(abort_word), options_(options), bell_(abort_word) {
  const auto now = Clock::now();
  for (auto& [node, connection] : connections) {
    connection.trust();
    peers_.push_back(Peer{node, std::move(connection), now});
  }
  thread_ = std::thread([this] { run(); });
}

ControlChannel::~ControlChannel() {
  {
    const std::lock_guard lock(mutex_);
    parting_ = true;
    if (!abort_word_.aborted()) {
      for (Peer& peer : peers_) {
        if (!peer.closed) peer.connection.queue(MessageType::kGoodbye);
      }
    }
  }
  bell_.ring();
  thread_.join();
}

ControlChannel::Peer& ControlChannel::peer_of(int node) {
  const auto peer =
      std::find_if(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.node == node; });
  FATHOM_CHECK(peer != peers_.end(), "node {} has no connection to node {}", layout_.node_rank,
               node);
  return *peer;
}

void ControlChannel::send(int node, std::span<const std::byte> message) {
  const std::lock_guard lock(mutex_);
  if (abort_word_.aborted()) {
    throw_abort(abort_word_,
                fmt::format("node {} was sending to node {}", layout_.node_rank, node));
  }
  Peer& peer = peer_of(node);
  if (peer.left || peer.closed) {
    const Status status{Code::kUnavailable, layout_.describe_node(node) + " has left"};
    abort_word_.abort(-1, status);
    throw CommError(status, -1);
  }
  peer.connection.queue(MessageType::kMessage, message);
  if (!peer.connection.flush()) lose(peer, "its connection broke");
  if (peer.connection.queued_bytes() > kMaxWaiting) lose(peer, "it reads nothing");
  // The thread waits for room in the socket.
  if (peer.connection.queued_bytes() > 0) bell_.ring();
}

std::optional<std::vector<std::byte>> ControlChannel::receive(int node) {
  std::unique_lock lock(mutex_);
  Peer& peer = peer_of(node);
  news_.wait(lock, [&] { return !peer.received.empty() || peer.left || abort_word_.aborted(); });
  if (abort_word_.aborted()) {
    throw_abort(abort_word_, fmt::format("node {} was waiting for a message of node {}",
                                         layout_.node_rank, node));
  }
  if (!peer.received.empty()) {
    auto message = std::move(peer.received.front());
    peer.received.pop_front();
    peer.received_bytes -= message.size();
    return message;
  }
  return std::nullopt;
}

void ControlChannel::wait_until_told(std::chrono::nanoseconds limit) {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, limit, [&] {
    return told_ && std::all_of(peers_.begin(), peers_.end(),
                                [&](const Peer& peer) { return has_parted(peer); });
  });
}

void ControlChannel::lose(Peer& peer, std::string why) {
  peer.closed = true;
  if (!peer.left && !parting_) {
    // A node of one rank is that rank.
    const int rank = layout_.ranks_of_node[peer.node] == 1 ? layout_.first_rank(peer.node) : -1;
    abort_word_.abort(rank, Status{Code::kUnavailable,
                                   fmt::format("{}: {}", layout_.describe_node(peer.node), why)});
  }
  news_.notify_all();
}

void ControlChannel::take(Peer& peer, ControlMessage message) {
  switch (message.type) {
    case MessageType::kHeartbeat:
      return;
    case MessageType::kMessage:
      peer.received_bytes += message.payload.size();
      peer.received.push_back(std::move(message.payload));
      if (peer.received_bytes > kMaxWaiting) lose(peer, "it sends more than is read");
      news_.notify_all();
      return;
    case MessageType::kAbort: {
      WireReader reader(message.payload);
      const auto rank = static_cast<int32_t>(reader.u32());
      const uint32_t code = reader.u32();
      std::string text = reader.text();
      if (!reader.ended() || code > static_cast<uint32_t>(Code::kUnavailable)) {
        lose(peer, "it sent an abort that cannot be read");
        return;
      }
      peer.connection.queue(MessageType::kFarewell);
      abort_word_.abort(rank, Status{static_cast<Code>(code), std::move(text)});
      return;
    }
    case MessageType::kGoodbye:
      peer.left = true;
      peer.connection.queue(MessageType::kFarewell);
      news_.notify_all();
      return;
    case MessageType::kFarewell:
      peer.farewelled = true;
      news_.notify_all();
      return;
    default:
      lose(peer, fmt::format("it sent a message of type {}", static_cast<uint32_t>(message.type)));
  }
}

void ControlChannel::read(Peer& peer) {
  const uint64_t before = peer.connection.total_received();
  const bool open = peer.connection.fill();
  // A part of a long message is a sign of life too.
  if (peer.connection.total_received() != before) peer.last_heard = Clock::now();
  while (!peer.closed) {
    auto message = peer.connection.next();
    if (!message) return lose(peer, message.error().message);
    if (!*message) break;
    take(peer, std::move(**message));
  }
  if (!open && !peer.closed) lose(peer, "it ended without a goodbye");
}

void ControlChannel::tell_abort() {
  told_ = true;
  const AbortWord::Reason& reason = abort_word_.reason();
  WireWriter writer;
  writer.u32(static_cast<uint32_t>(reason.rank));
  writer.u32(static_cast<uint32_t>(reason.status.code));
  writer.text(reason.status.message.substr(0, FramedConnection::kMaxJoinPayload / 2));
  for (Peer& peer : peers_) {
    if (!peer.closed && !peer.left) {
      peer.connection.queue(MessageType::kAbort, writer.bytes());
    }
  }
  news_.notify_all();
}

bool ControlChannel::has_parted(const Peer& peer) const {
  return peer.closed || (peer.connection.queued_bytes() == 0 && (peer.farewelled || peer.left));
}

void ControlChannel::run() {
  Clock::time_point next_beat = Clock::now(), part_until = Clock::time_point::max();
  std::vector<pollfd> polled;
  std::unique_lock lock(mutex_);
  while (true) {
    // What came is read before anyone's silence is judged: it was this process, perhaps, that
    // stood still.
    for (Peer& peer : peers_) {
      if (!peer.closed) read(peer);
    }
    const Clock::time_point now = Clock::now();
    for (Peer& peer : peers_) {
      if (!peer.closed && !peer.left && now - peer.last_heard > options_.silence) {
        lose(peer, fmt::format("no heartbeat for {:.3g} s",
                               std::chrono::duration<double>(options_.silence).count()));
      }
    }
    if (abort_word_.aborted() && !told_) tell_abort();
    if (now >= next_beat) {
      next_beat = now + options_.interval;
      for (Peer& peer : peers_) {
        // One that reads nothing needs no second one.
        if (!peer.closed && !peer.left && peer.connection.queued_bytes() == 0) {
          peer.connection.queue(MessageType::kHeartbeat);
        }
      }
    }
    if (parting_) {
      if (part_until == Clock::time_point::max()) part_until = now + kParting;
      const bool parted = std::all_of(peers_.begin(), peers_.end(),
                                      [&](const Peer& peer) { return has_parted(peer); });
      if (parted || now >= part_until) return;
    }

    polled.assign(1, {bell_.fd(), POLLIN, 0});
    for (Peer& peer : peers_) {
      if (peer.closed) continue;
      if (!peer.connection.flush()) {
        // What it has sent before, a goodbye perhaps, can still be read.
        read(peer);
        if (!peer.closed) lose(peer, "its connection broke");
        continue;
      }
      const bool sends = peer.connection.queued_bytes() > 0;
      polled.push_back(
          {peer.connection.fd(), static_cast<short>(sends ? POLLIN | POLLOUT : POLLIN), 0});
    }
    auto until = std::min(next_beat, part_until);
    // The moment at which a silence is long enough.
    for (const Peer& peer : peers_) {
      if (!peer.closed && !peer.left) until = std::min(until, peer.last_heard + options_.silence);
    }
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    lock.unlock();
    poll(polled.data(), polled.size(),
         static_cast<int>(std::clamp<int64_t>(wait.count(), 0, 1000)));
    bell_.quiet();
    lock.lock();
  }
}

}  // namespace fathom
