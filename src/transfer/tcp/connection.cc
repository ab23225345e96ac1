#include "transfer/tcp/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <cerrno>
#include <utility>

#include "comm/socket.h"

namespace fathom {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

// Maximum bytes of rows per sendmsg() call: a recall of the rows waits for the call.
constexpr size_t kMostAtOnce = 512 << 10;
// Maximum bytes of one connection before others have their turn.
constexpr size_t kMostOfATurn = 8 << 20;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

std::string peer_of(asio::ip::tcp::socket& socket) {
  const auto endpoint = peer_endpoint(socket.native_handle());
  return endpoint ? to_string(*endpoint) : "?";
}

}  // namespace

TransferConnection::TransferConnection(asio::ip::tcp::socket socket,
                                       std::shared_ptr<FrameHandler> handler)
    : socket_(std::move(socket)), handler_(std::move(handler)), last_received_(Clock::now()) {
  error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  socket_.set_option(asio::socket_base::keep_alive(true), ignored);
  peer_ = peer_of(socket_);
}

void TransferConnection::read_header() {
  asio::async_read(socket_, asio::buffer(header_),
                   [self = shared_from_this()](const error_code& failure, size_t) {
                     if (failure) return self->fail(failure);
                     self->on_header();
                   });
}

void TransferConnection::on_header() {
  if (closed_) return;
  last_received_ = Clock::now();
  receiving_since_ = last_received_;
  if (closing_) return close("it was refused");
  if (lane_) return close("a frame came where none may");
  const auto header = read_frame_header(header_);
  if (!header) return close(header.error().message);
  const auto handler = handler_;
  const auto most = handler->most_bytes(*this, header->type);
  const auto type = static_cast<uint32_t>(header->type);
  if (!most) return close(fmt::format("a frame of type {} came where none may", type));
  if (header->bytes > *most) {
    return close(
        fmt::format("a frame of type {} has {} bytes, at most {}", type, header->bytes, *most));
  }
  if (header->type == FrameType::kPiece) return read_piece(header->bytes);
  payload_.resize(header->bytes);
  asio::async_read(
      socket_, asio::buffer(payload_),
      [self = shared_from_this(), kind = header->type](const error_code& failure, size_t) {
        if (failure) return self->fail(failure);
        if (self->closed_) return;
        self->last_received_ = Clock::now();
        self->receiving_since_.reset();
        const auto current = self->handler_;  // it may set another
        const auto done = current->on_frame(*self, kind, self->payload_);
        if (!done) return self->close(done.error().message);
        if (!self->closed_) self->read_header();
      });
}

void TransferConnection::read_piece(uint64_t bytes) {
  if (bytes < kPieceHeaderBytes) {
    return close(
        fmt::format("a piece has {} bytes, its header alone has {}", bytes, kPieceHeaderBytes));
  }
  asio::async_read(
      socket_, asio::buffer(piece_header_),
      [self = shared_from_this(), rows = bytes - kPieceHeaderBytes](const error_code& failure,
                                                                    size_t) {
        if (failure) return self->fail(failure);
        if (self->closed_) return;
        const auto header = read_piece_header(self->piece_header_);
        if (!header) return self->close(header.error().message);
        if (header->num_bytes < 0 || static_cast<uint64_t>(header->num_bytes) != rows) {
          return self->close(fmt::format("a piece has {} bytes of rows, its header says {}", rows,
                                         header->num_bytes));
        }
        self->begin_piece(*header);
        self->rows_read_ = 0;
        self->read_rows();
      });
}

// The header's size of the rows is theirs.
void TransferConnection::begin_piece(const PieceHeader& header) {
  piece_ = {.header = header, .rows = {}};
  landing_ = handler_->land(*this, header);
  if (!landing_) piece_.rows = handler_->buffer(static_cast<size_t>(header.num_bytes));
}

std::span<std::byte> TransferConnection::piece_rows() {
  return landing_ ? landing_->rows() : std::span(piece_.rows);
}

// Straight to where they belong, as much at once as there is.
void TransferConnection::read_rows() {
  const std::span<std::byte> rows = piece_rows();
  for (size_t turn = 0; rows_read_ < rows.size() && turn < kMostOfATurn;) {
    const auto rest = rows.subspan(rows_read_);
    const ssize_t got = ::recv(socket_.native_handle(), rest.data(), rest.size(), MSG_DONTWAIT);
    if (got == 0) return fail(asio::error::eof);
    if (got < 0 && !would_block()) return fail_with_errno();
    if (got < 0) break;
    rows_read_ += static_cast<size_t>(got);
    turn += static_cast<size_t>(got);
  }
  if (rows_read_ == rows.size()) {
    last_received_ = Clock::now();
    return deliver_piece();
  }
  socket_.async_wait(asio::ip::tcp::socket::wait_read,
                     [self = shared_from_this()](const error_code& failure) {
                       if (failure) return self->fail(failure);
                       if (!self->closed_) self->read_rows();
                     });
}

void TransferConnection::deliver_piece() {
  receiving_since_.reset();
  const auto handler = handler_;
  if (const auto landing = std::exchange(landing_, nullptr)) {
    landing->finish();
    handler->on_landed(*this, piece_.header.num_bytes);
  } else {
    holds_piece_ = !handler->on_piece(*this, piece_);
  }
  if (holds_piece_ || closed_) return;
  if (lane_) {
    schedule_lane();
  } else {
    read_header();
  }
}

void TransferConnection::resume() {
  if (holds_piece_ && !closed_) deliver_piece();
}

void TransferConnection::send(Frame frame, std::shared_ptr<LentRows> rows) {
  if (closed_ || closing_) return;
  if (lane_ && rows) return send_by_lane(frame, *rows);
  out_.push_back({.frame = std::move(frame), .rows = std::move(rows)});
  if (out_.size() == 1) sending_since_ = Clock::now();
  if (std::exchange(is_writing_, true)) return;
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->write(); });
}

// Returns what sendmsg() does. Header and rows go in one call, the rows from where they lie.
ssize_t TransferConnection::Outgoing::send_some(int socket) {
  const auto send = [&](std::span<const std::byte> all) -> ssize_t {
    if (rows && all.size() != rows->size()) {
      errno = ENOMEM;  // they were recalled, and there was no memory for them
      return -1;
    }
    const auto head = std::span(frame).subspan(std::min(sent, frame.size()));
    auto tail = all.subspan(sent - (frame.size() - head.size()));
    tail = tail.first(std::min(tail.size(), kMostAtOnce));
    std::array<iovec, 2> parts = {
        {{head.data(), head.size()}, {const_cast<std::byte*>(tail.data()), tail.size()}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  };
  return rows ? rows->read(send) : send({});
}

// Sends what the socket takes; is_writing_ is set.
void TransferConnection::write() {
  for (size_t turn = 0; !closed_ && !out_.empty() && turn < kMostOfATurn;) {
    Outgoing& first = out_.front();
    const ssize_t sent = first.send_some(socket_.native_handle());
    if (sent < 0 && !would_block()) return fail_with_errno();
    if (sent < 0) break;
    first.sent += static_cast<size_t>(sent);
    turn += static_cast<size_t>(sent);
    if (first.sent == first.size()) finish_frame();
  }
  if (closed_ || out_.empty()) {
    is_writing_ = false;
    return;
  }
  socket_.async_wait(asio::ip::tcp::socket::wait_write,
                     [self = shared_from_this()](const error_code& failure) {
                       if (failure) return self->fail(failure);
                       self->write();
                     });
}

void TransferConnection::finish_frame() {
  const auto bytes = static_cast<int64_t>(out_.front().size());
  out_.pop_front();
  sending_since_ = Clock::now();
  if (out_.empty() && closing_) {
    // The other end closes when it has read why.
    error_code ignored;
    socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  }
  const auto handler = handler_;
  handler->on_sent(*this, bytes);
}

std::optional<TransferConnection::Time> TransferConnection::sending_since() const {
  return is_sending() ? std::optional(sending_since_) : std::nullopt;
}

void TransferConnection::fail(const error_code& failure) {
  close(failure == asio::error::eof ? "the other end has closed it" : failure.message());
}

void TransferConnection::fail_with_errno() {
  fail(error_code(errno, boost::system::system_category()));
}

void TransferConnection::use_lane(std::unique_ptr<PieceLane> lane) {
  lane_ = std::move(lane);
  lane_events_.emplace(socket_.get_executor());
  Fd events(dup(lane_->event_fd()));  // the lane closes its own
  error_code failure(events ? 0 : errno, boost::system::system_category());
  if (events) lane_events_->assign(events.get(), failure);
  if (failure) return fail_lane({Code::kUnavailable, failure.message()});
  events.release();
  schedule_lane();
}

void TransferConnection::send_by_lane(const Frame& frame, LentRows& rows) {
  lane_bytes_ = static_cast<int64_t>(frame.size() + rows.size());
  sending_since_ = Clock::now();
  const auto header = std::span(frame).subspan(kFrameHeaderBytes).first<kPieceHeaderBytes>();
  const auto sent = rows.read([&](std::span<const std::byte> all) -> Result<> {
    if (all.size() != rows.size()) {
      return error(Code::kResourceExhausted, "no memory for rows that were recalled");
    }
    return lane_->send(header, all);
  });
  if (!sent) return fail_lane(sent.error());
  schedule_lane();
}

void TransferConnection::schedule_lane() {
  if (std::exchange(lane_scheduled_, true)) return;
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->lane_scheduled_ = false;
    self->run_lane();
  });
}

void TransferConnection::run_lane() {
  // Others have their turn after so many pieces.
  constexpr int kMostPieces = 8;
  for (int pieces = 0; pieces < kMostPieces;) {
    if (closed_) return;
    const auto has_more = lane_->progress();
    if (!has_more) return fail_lane(has_more.error());
    if (step_lane()) {
      ++pieces;
    } else if (!*has_more) {
      break;
    }
    if (pieces == kMostPieces) return schedule_lane();
  }
  if (closed_ || std::exchange(lane_waits_, true)) return;
  lane_events_->async_wait(asio::posix::stream_descriptor::wait_read,
                           [self = shared_from_this()](const error_code& failure) {
                             self->lane_waits_ = false;
                             if (!failure) self->run_lane();
                           });
}

// Whether something was done behind which the lane may have something to do.
bool TransferConnection::step_lane() {
  bool has_done = false;
  if (lane_bytes_ > 0 && !lane_->is_sending()) {
    const int64_t bytes = std::exchange(lane_bytes_, 0);
    const auto handler = handler_;
    handler->on_sent(*this, bytes);
    has_done = true;
  }
  if (!closed_ && lane_->has_received()) {
    lane_receives_ = false;
    last_received_ = Clock::now();
    deliver_piece();
    has_done = true;
  }
  return (!closed_ && take_offer()) || has_done;
}

bool TransferConnection::take_offer() {
  if (holds_piece_ || lane_receives_) return false;
  const auto offer = lane_->offer();
  if (!offer) return false;
  const auto handler = handler_;
  const auto most = handler->most_bytes(*this, FrameType::kPiece);
  const auto header = read_piece_header(offer->header);
  if (!most || !header) {
    close(most ? header.error().message : "a piece came where none may");
    return false;
  }
  if (header->num_bytes < 0 || static_cast<uint64_t>(header->num_bytes) != offer->bytes ||
      kPieceHeaderBytes + offer->bytes > *most) {
    close(fmt::format("a piece has {} bytes of rows, its header says {}, at most {}", offer->bytes,
                      header->num_bytes, *most - kPieceHeaderBytes));
    return false;
  }
  begin_piece(*header);
  receiving_since_ = Clock::now();
  lane_receives_ = true;
  const auto begun = lane_->receive(piece_rows());
  if (!begun) fail_lane(begun.error());
  return begun.has_value();
}

void TransferConnection::fail_lane(const Status& why) {
  lane_has_failed_ = true;
  close(why.message);
}

void TransferConnection::close_when_sent() { closing_ = true; }

void TransferConnection::close(std::string why) {
  if (std::exchange(closed_, true)) return;
  error_code ignored;
  socket_.close(ignored);
  if (lane_events_) lane_events_->close(ignored);
  asio::post(socket_.get_executor(), [self = shared_from_this(), why = std::move(why)] {
    self->out_.clear();  // what is lent goes back
    self->lane_ = nullptr;
    self->landing_ = nullptr;  // nothing is written any more
    const auto handler = std::exchange(self->handler_, nullptr);
    handler->on_closed(*self, why);
  });
}

}  // namespace fathom
