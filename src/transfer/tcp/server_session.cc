#include "transfer/tcp/server_session.h"

#include <boost/asio/post.hpp>
#include <utility>

#include "base/check.h"
#include "base/log.h"

namespace fathom {

namespace asio = boost::asio;

void ServerSession::start() {
  last_heartbeat_ = std::chrono::steady_clock::now();
  link_ = core_->make_link(shared_from_this());
  control_->set_handler(shared_from_this());
  control_->send(welcome_frame({.session = id_, .engine = core_->options.engine}));
}

void ServerSession::add_stream(const std::shared_ptr<TransferConnection>& connection) {
  Stream& stream = streams_.emplace_back();
  stream.connection = connection;
  Welcome welcome{.session = id_, .engine = core_->options.engine};
  if (core_->options.make_lane && !core_->lane_failed) {
    auto lane = core_->options.make_lane(core_->options.page_bytes, id_);
    if (lane) {
      stream.lane = std::move(*lane);
      const auto address = stream.lane->address();
      welcome.lane.assign(address.begin(), address.end());
    } else {
      log_warning("transfer: pieces go by TCP: {}", lane.error().message);
      core_->lane_failed = true;
    }
  }
  connection->set_handler(shared_from_this());
  connection->send(welcome_frame(welcome));
}

ServerSession::Stream& ServerSession::stream_of(const TransferConnection& connection) {
  for (Stream& stream : streams_) {
    if (stream.connection.get() == &connection) return stream;
  }
  FATHOM_CHECK(false, "a connection of another session");
}

// What the other end has chosen for a data connection: the lane that it was offered, or none.
Result<> ServerSession::on_lane(TransferConnection& from, Payload address) {
  Stream& stream = stream_of(from);
  auto lane = std::move(stream.lane);
  if (address.empty()) {
    if (core_->options.needs_lane) {
      core_->count(ConnectionRefusal::kFacts);
      from.send(refused_frame(
          "--transfer-backend is 'ucx' on the prefill side, the decode side takes pages by TCP"));
      from.close_when_sent();
      return {};
    }
  } else {
    if (!lane) return invalid("a lane was chosen where none was offered");
    if (auto connected = lane->connect(address); !connected) {
      core_->lane_failed = !core_->options.needs_lane;
      return connected;
    }
    from.use_lane(std::move(lane));
  }
  stream.is_open = true;
  send_waiting();
  return {};
}

void ServerSession::tick(TransferConnection::Time now) {
  if (now - control_->last_received() > core_->options.silence_limit) {
    return close("nothing came for too long");
  }
  const auto is_stalled = [&](const TransferConnection& connection) {
    const auto since = connection.sending_since();
    return since && now - *since > core_->options.stall_limit;
  };
  bool stalled = is_stalled(*control_);
  for (const auto& stream : streams_) stalled |= is_stalled(*stream.connection);
  if (stalled) return close("the other end does not read");
  if (now - last_heartbeat_ < core_->options.heartbeat || control_->is_sending()) return;
  last_heartbeat_ = now;
  control_->send(heartbeat_frame());
}

void ServerSession::close(const std::string& why) { control_->close(why); }

// The engine's thread.
bool ServerSession::put(const PieceHeader& header, std::shared_ptr<LentRows> rows) {
  constexpr size_t kHeadBytes = kFrameHeaderBytes + kPieceHeaderBytes;
  const auto bytes = static_cast<int64_t>(kHeadBytes + rows->size());
  const std::lock_guard lock(mutex_);
  if (closed_ || (bytes_ > 0 && bytes > core_->options.window_bytes - bytes_)) return false;
  Frame head(kHeadBytes);
  const std::span<std::byte> all(head);
  write_frame_header({FrameType::kPiece, kPieceHeaderBytes + rows->size()},
                     all.first<kFrameHeaderBytes>());
  write_piece_header(header, all.subspan<kFrameHeaderBytes, kPieceHeaderBytes>());
  waiting_.push_back({.head = std::move(head), .rows = std::move(rows)});
  bytes_ += bytes;
  if (!std::exchange(is_posted_, true)) {
    asio::post(*core_->context, [self = shared_from_this()] {
      {
        const std::lock_guard posted(self->mutex_);
        self->is_posted_ = false;
      }
      self->send_waiting();
    });
  }
  return true;
}

void ServerSession::send_waiting() {
  for (const auto& stream : streams_) {
    if (!stream.is_open || stream.connection->is_sending()) continue;
    Piece piece;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty() || closed_) return;
      piece = std::move(waiting_.front());
      waiting_.pop_front();
    }
    stream.connection->send(std::move(piece.head), std::move(piece.rows));
  }
}

void ServerSession::on_sent(TransferConnection& connection, int64_t bytes) {
  if (&connection == control_.get()) return;
  if (stream_of(connection).is_open) {  // its welcome was no piece
    ++core_->pieces_sent;
    if (connection.has_lane()) ++core_->lane_pieces_sent;
    core_->bytes_sent += bytes;
    const std::lock_guard lock(mutex_);
    bytes_ -= bytes;
  }
  send_waiting();
}

// From here on the order's pieces may still be on their way on other connections.
void ServerSession::done(const TicketId& id) { end_order(id, done_frame(id)); }

void ServerSession::fail(FailedOrder failed) { end_order(failed.ticket, failed_frame(failed)); }

void ServerSession::end_order(const TicketId& id, Frame news) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  asio::post(*core_->context, [self = shared_from_this(), id, news = std::move(news)]() mutable {
    if (self->orders_.erase(id) > 0) self->control_->send(std::move(news));
  });
}

std::optional<uint64_t> ServerSession::most_bytes(const TransferConnection& from, FrameType type) {
  if (&from != control_.get()) {
    if (type != FrameType::kLane || stream_of(from).is_open) return std::nullopt;
    return kMaxLaneAddressBytes;
  }
  switch (type) {
    case FrameType::kOrder:
      return kMaxOrderBytes + static_cast<uint64_t>(core_->options.max_tokens) * sizeof(int32_t);
    case FrameType::kCancel:
      return kTicketIdBytes;
    case FrameType::kHeartbeat:
      return 0;
    default:
      return std::nullopt;
  }
}

Result<> ServerSession::on_frame(TransferConnection& from, FrameType type, Payload payload) {
  if (type == FrameType::kHeartbeat) return {};
  if (type == FrameType::kLane) return on_lane(from, payload);
  if (type == FrameType::kOrder) return on_order(payload);
  FATHOM_TRY(const TicketId id, read_ticket_id(payload));
  on_cancel(id);
  return {};
}

Result<> ServerSession::on_order(Payload payload) {
  FATHOM_TRY(PromptOrder order, read_order(payload));
  const Ticket ticket = order.ticket;
  const TransferServerOptions& options = core_->options;
  if (ticket.form != options.form || ticket.page_bytes != options.page_bytes) {
    return invalid("an order for pages of {} bytes in form {:016x}, they have {} in {:016x}",
                   ticket.page_bytes, ticket.form, options.page_bytes, options.form);
  }
  if (std::ssize(orders_) >= options.max_orders) {
    return error(Code::kResourceExhausted, "{} orders at once, at most {}", orders_.size() + 1,
                 options.max_orders);
  }
  if (!orders_.insert(ticket.id).second) {
    return invalid("ticket {} is ordered twice", ticket.id.number);
  }
  ++core_->orders;
  const auto taken = link_->order(std::move(order));
  if (!taken && orders_.erase(ticket.id) > 0) {
    control_->send(failed_frame({ticket.id, taken.error()}));
  }
  return {};
}

void ServerSession::on_cancel(const TicketId& id) {
  if (orders_.erase(id) > 0) link_->cancel(id);
}

// Any connection that ends takes the session with it: the other end begins anew.
void ServerSession::on_closed(TransferConnection& connection, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    waiting_.clear();
  }
  const auto self = shared_from_this();
  log_info("transfer: the session of the decode side at {} has ended: {}", connection.peer(), why);
  control_->close(why);
  for (const auto& stream : streams_) stream.connection->close(why);
  for (const TicketId& id : orders_) link_->cancel(id);
  orders_.clear();
  link_ = nullptr;  // it holds this
  core_->sessions.erase(id_);
  core_->num_sessions = std::ssize(core_->sessions);
}

}  // namespace fathom
