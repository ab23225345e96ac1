// Test client that sends exactly the given bytes and returns what came back. Tests and benchmarks
// only.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

namespace fathom::http {

struct RawResponse {
  int status = 0;  // 0: no response
  std::string head, body;
  bool complete = false;  // the whole body was received

  // Returns the value of a field; "" if it is absent.
  std::string field(std::string_view name) const {
    const size_t at = head.find("\r\n" + std::string(name) + ": ");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 4;
    return head.substr(begin, head.find("\r\n", begin) - begin);
  }
};

class RawClient {
 public:
  explicit RawClient(int port, int receive_buffer = 0)
      : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) {
      setsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  RawClient(RawClient&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), connected_(other.connected_) {}
  ~RawClient() { close(); }

  bool connected() const { return connected_; }
  int descriptor() const { return descriptor_; }

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;  // the server closed; the test checks its response
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
  }
  void end_sending() { shutdown(descriptor_, SHUT_WR); }
  void close() {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  }
  // Closes with RST, so that the server sees ECONNRESET.
  void reset() {
    const linger hard{.l_onoff = 1, .l_linger = 0};
    setsockopt(descriptor_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    close();
  }

  // Receives more input; false at the end of the stream, after a reset, or at the time limit.
  bool receive(std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    pollfd ready{.fd = descriptor_, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, static_cast<int>(limit.count())) != 1) return false;
    char bytes[65536];
    const ssize_t count = recv(descriptor_, bytes, sizeof(bytes), 0);
    if (count < 0) was_reset_ = true;
    if (count == 0) ended_ = true;
    if (count <= 0) return false;
    input_.append(bytes, static_cast<size_t>(count));
    return true;
  }
  bool ended() const { return ended_; }          // the server closed with FIN
  bool was_reset() const { return was_reset_; }  // the server closed with RST

  // Returns the input up to the end of `text`; "" if `text` does not come.
  std::string read_until(std::string_view text) {
    size_t at;
    while ((at = input_.find(text)) == std::string::npos) {
      if (!receive()) return "";
    }
    return take(at + text.size());
  }
  // Returns all input until the server closes.
  std::string read_to_end() {
    while (receive()) {
    }
    return take(input_.size());
  }
  // Returns what has come by now.
  std::string read_available() {
    while (receive(std::chrono::milliseconds(0))) {
    }
    return take(input_.size());
  }
  // Returns whether the connection stays open and no input is pending or comes for `limit`.
  bool silent_for(std::chrono::milliseconds limit) {
    return input_.empty() && !receive(limit) && !ended_ && !was_reset_;
  }

  RawResponse read_response(bool to_head = false) {
    RawResponse response;
    response.head = read_until("\r\n\r\n");
    if (response.head.empty()) return response;
    response.status = std::atoi(response.head.c_str() + 9);
    if (to_head || response.status == 204 || response.status == 100) {
      response.complete = true;
    } else if (response.field("Transfer-Encoding") == "chunked") {
      read_chunks(response);
    } else if (const std::string length = response.field("Content-Length"); !length.empty()) {
      const size_t wanted = std::strtoul(length.c_str(), nullptr, 10);
      while (input_.size() < wanted && receive()) {
      }
      response.complete = input_.size() >= wanted;
      response.body = take(std::min(wanted, input_.size()));
    } else {
      response.body = read_to_end();
      response.complete = ended_;
    }
    return response;
  }
  // Returns the next chunk's bytes; "" for the last chunk and if there is none.
  std::string read_chunk() {
    const std::string line = read_until("\r\n");
    if (line.empty()) return "";
    const size_t size = std::strtoul(line.c_str(), nullptr, 16);
    while (input_.size() < size + 2 && receive()) {
    }
    if (input_.size() < size + 2 || input_.substr(size, 2) != "\r\n") return "";
    std::string chunk = take(size);
    take(2);
    last_chunk_ = size == 0;
    return chunk;
  }

 private:
  std::string take(size_t count) {
    std::string taken = input_.substr(0, count);
    input_.erase(0, count);
    return taken;
  }
  void read_chunks(RawResponse& response) {
    last_chunk_ = false;
    for (std::string chunk; !(chunk = read_chunk()).empty();) response.body += chunk;
    response.complete = last_chunk_;
  }

  int descriptor_;
  bool connected_ = false, ended_ = false, was_reset_ = false, last_chunk_ = false;
  std::string input_;
};

}  // namespace fathom::http
