// One I/O thread with its connections. What belongs to a connection happens on its loop's thread.
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
  explicit IoLoop(ServerState& state);  // outlives the loop
  ~IoLoop();
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;

  // Any thread.
  boost::asio::io_context& context() { return context_; }
  // `resume` is called on the loop's thread at its start, and again whenever a handler has thrown:
  // it (re)starts what goes on by itself and may have been broken off.
  void start(std::function<void()> resume);
  // A connection that was accepted.
  void adopt(boost::asio::ip::tcp::socket socket, ConnectionCount count);
  // Cuts all connections, ends the thread and waits for it.
  void stop();

  // The I/O thread's.
  ServerState& state() { return state_; }
  const std::shared_ptr<Outbox>& outbox() { return outbox_; }
  std::span<char> scratch() { return scratch_; }  // to read into, until the next call
  void remove(Connection& connection);

 private:
  void add(boost::asio::ip::tcp::socket socket, ConnectionCount count);
  void flush();  // what is on the outbox
  void schedule_check();
  void check();  // time limits

  ServerState& state_;
  boost::asio::io_context context_{1};  // one thread runs it
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  boost::asio::steady_timer flush_timer_, check_timer_;
  std::shared_ptr<Outbox> outbox_;
  std::vector<std::shared_ptr<Exchange>> flushing_;
  std::vector<std::shared_ptr<Connection>> connections_;  // each knows its place
  std::vector<char> scratch_;
  std::thread thread_;
};

}  // namespace fathom::http
