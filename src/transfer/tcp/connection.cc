#include "transfer/tcp/connection.h"

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "comm/socket.h"

namespace fathom {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

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
  if (closing_) return close("it was refused");
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
        self->piece_ = {.header = *header, .rows = self->handler_->buffer(rows)};
        asio::async_read(self->socket_, asio::buffer(self->piece_.rows),
                         [self](const error_code& broken, size_t) {
                           if (broken) return self->fail(broken);
                           if (self->closed_) return;
                           self->last_received_ = Clock::now();
                           self->deliver_piece();
                         });
      });
}

void TransferConnection::deliver_piece() {
  const auto handler = handler_;
  holds_piece_ = !handler->on_piece(*this, piece_);
  if (!holds_piece_ && !closed_) read_header();
}

void TransferConnection::resume() {
  if (holds_piece_ && !closed_) deliver_piece();
}

void TransferConnection::send(Frame frame) {
  if (closed_ || closing_) return;
  out_.push_back(std::move(frame));
  if (out_.size() == 1) write_next();
}

void TransferConnection::write_next() {
  sending_since_ = Clock::now();
  asio::async_write(socket_, asio::buffer(out_.front()),
                    [self = shared_from_this()](const error_code& failure, size_t) {
                      if (failure) return self->fail(failure);
                      if (self->closed_) return;
                      Frame sent = std::move(self->out_.front());
                      self->out_.pop_front();
                      if (!self->out_.empty()) {
                        self->write_next();
                      } else if (self->closing_) {
                        // The other end closes when it has read why.
                        error_code ignored;
                        self->socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
                      }
                      const auto handler = self->handler_;
                      handler->on_sent(*self, std::move(sent));
                    });
}

std::optional<TransferConnection::Time> TransferConnection::sending_since() const {
  return out_.empty() ? std::nullopt : std::optional(sending_since_);
}

void TransferConnection::fail(const error_code& failure) {
  close(failure == asio::error::eof ? "the other end has closed it" : failure.message());
}

void TransferConnection::close_when_sent() { closing_ = true; }

void TransferConnection::close(std::string why) {
  if (std::exchange(closed_, true)) return;
  error_code ignored;
  socket_.close(ignored);
  asio::post(socket_.get_executor(), [self = shared_from_this(), why = std::move(why)] {
    const auto handler = std::exchange(self->handler_, nullptr);
    handler->on_closed(*self, why);
  });
}

}  // namespace fathom
