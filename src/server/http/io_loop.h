// One I/O thread and its connections. A connection is used on its loop's thread only.
#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "server/http/exchange.h"
#include "server/http/server_state.h"

namespace fathom::http {

class IoLoop {
 public:
  // `state` outlives the loop.
  explicit IoLoop(ServerState& state);
  ~IoLoop();
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;

  // Called from any thread.
  boost::asio::io_context& context() { return context_; }
  // Starts the thread. `resume` is called on it first, and again whenever a handler has thrown: it
  // restarts repeating work that the exception may have ended.
  void start(std::function<void()> resume);
  // Takes ownership of an accepted connection.
  void adopt(boost::asio::ip::tcp::socket socket, ConnectionCount count);
  // Sends what the exchanges hold by now, as far as clients take it, then calls `then` on the I/O
  // thread; never if stop() comes first.
  void flush(std::function<void()> then);
  // Sends what there is, closes all connections, ends the thread and joins it.
  void stop();

  // Called on the I/O thread.
  ServerState& state() { return state_; }
  const std::shared_ptr<Outbox>& outbox() { return outbox_; }
  std::span<char> scratch() { return scratch_; }  // read buffer, valid until the next call
  void remove(Connection& connection);

 private:
  void add(boost::asio::ip::tcp::socket socket, ConnectionCount count);
  void flush();  // drains the outbox
  // The same where nothing comes after it that could try again.
  void flush_or_leave() noexcept;
  void schedule_check();
  // Applies time limits to some connections.
  void check_some();

  ServerState& state_;
  boost::asio::io_context context_{1};  // run by one thread
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  boost::asio::steady_timer flush_timer_, check_timer_;
  std::shared_ptr<Outbox> outbox_;
  std::vector<std::shared_ptr<Exchange>> flushing_;
  std::vector<std::shared_ptr<Connection>> connections_;  // each knows its index
  size_t unchecked_ = 0;                                  // the first so many, in this round
  std::vector<char> scratch_;
  std::thread thread_;
};

}  // namespace fathom::http
