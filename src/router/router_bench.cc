// What the router adds: 1,000 requests a second, each a stream of 0.25 s, so that 256 are open at a
// time, against a replica that computes nothing. The router is a process on a CPU of its own;
// replica and client share another. The same load goes to the replica directly, in turns.
#include <benchmark/benchmark.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/streambuf.hpp>
#include <boost/asio/write.hpp>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <istream>
#include <memory>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "base/pin_thread.h"
#include "router/router.h"
#include "server/client/http_client.h"

namespace fathom::router {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr int kClientCpu = 0, kRouterCpu = 1;
constexpr int kRequests = 4000;
constexpr std::chrono::microseconds kInterval{1000};
constexpr int kEvents = 8;
constexpr std::chrono::milliseconds kGap{32};  // between two events: a stream takes 256 ms

std::string chunk(const std::string& text) {
  return fmt::format("{:x}\r\n{}\r\n", text.size(), text);
}

// One connection of the replica, for any number of requests.
class NullExchange : public std::enable_shared_from_this<NullExchange> {
 public:
  explicit NullExchange(tcp::socket socket)
      : socket_(std::move(socket)), timer_(socket_.get_executor()) {
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
  }

  void read() {
    asio::async_read_until(socket_, buffer_, "\r\n\r\n",
                           [self = shared_from_this()](const error_code& failure, size_t size) {
                             if (!failure) self->on_head(size);
                           });
  }

 private:
  void on_head(size_t size) {
    std::string head(size, '\0');
    std::istream(&buffer_).read(head.data(), static_cast<std::streamsize>(size));
    const size_t at = head.find("Content-Length: ");
    const size_t body = at == std::string::npos ? 0 : std::stoul(head.substr(at + 16));
    const size_t missing = body - std::min(body, buffer_.size());
    asio::async_read(socket_, buffer_, asio::transfer_exactly(missing),
                     [self = shared_from_this(), body, post = head.starts_with("POST")](
                         const error_code& failure, size_t) {
                       if (failure) return;
                       self->buffer_.consume(body);
                       self->reply(post);
                     });
  }
  void reply(bool streams) {
    if (!streams) return write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", true);
    events_ = kEvents;
    text_ =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    next_event();
  }
  void next_event() {
    text_ += chunk("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"}}]}\n\n");
    if (--events_ == 0) {
      text_ += chunk("data: [DONE]\n\n") + "0\r\n\r\n";
      return write(std::exchange(text_, {}), true);
    }
    write(std::exchange(text_, {}), false);
    timer_.expires_after(kGap);
    timer_.async_wait([self = shared_from_this()](const error_code& ended) {
      if (!ended) self->next_event();
    });
  }
  void write(std::string text, bool is_last) {
    const auto kept = std::make_shared<std::string>(std::move(text));
    asio::async_write(
        socket_, asio::buffer(*kept),
        [self = shared_from_this(), kept, is_last](const error_code& failure, size_t) {
          if (!failure && is_last) self->read();
        });
  }

  tcp::socket socket_;
  asio::steady_timer timer_;
  asio::streambuf buffer_;
  std::string text_;
  int events_ = 0;
};

void accept(tcp::acceptor& acceptor) {
  acceptor.async_accept([&acceptor](const error_code& failure, tcp::socket socket) {
    if (!failure) std::make_shared<NullExchange>(std::move(socket))->read();
    accept(acceptor);
  });
}

// A process that writes its port and serves until its parent ends.
class Child {
 public:
  Child(int cpu, const std::function<void(const std::function<void(int)>&)>& serve) {
    int ends[2];
    FATHOM_CHECK(pipe(ends) == 0, "no pipe");
    pid_ = fork();
    FATHOM_CHECK(pid_ >= 0, "no process");
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      pin_thread(cpu);
      serve([&](int port) { FATHOM_CHECK(write(ends[1], &port, sizeof port) > 0, "no parent"); });
      _exit(0);
    }
    close(ends[1]);
    FATHOM_CHECK(::read(ends[0], &port_, sizeof port_) == sizeof port_, "a child has ended");
    close(ends[0]);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  int port() const { return port_; }

 private:
  pid_t pid_ = -1;
  int port_ = 0;
};

void serve_nothing(const std::function<void(int)>& listening) {
  asio::io_context context(1);
  tcp::acceptor acceptor(context, {asio::ip::make_address("127.0.0.1"), 0});
  accept(acceptor);
  listening(acceptor.local_endpoint().port());
  context.run();
}

void route_to(int replica, const std::function<void(int)>& listening) {
  set_log_level(LogLevel::kError);
  RouterOptions options;
  options.http.port = 0;
  options.http.worker_threads = 1;
  options.http.write_delay = std::chrono::milliseconds(0);
  options.http.access_log = options.log_requests = false;
  options.replicas = {{.host = "127.0.0.1", .port = replica}};
  auto created = Router::create(std::move(options));
  FATHOM_CHECK(created.has_value(), "{}", created.error().message);
  FATHOM_CHECK((*created)->listen().has_value(), "the router cannot listen");
  (*created)->start();
  listening((*created)->port());
  for (;;) pause();
}

struct Times {
  std::vector<double> first, last;  // ms after the request was sent
};

// The times of kRequests requests, sent at their times whatever becomes of the earlier ones.
class LoadRun {
 public:
  explicit LoadRun(int port)
      : client_(std::move(*client::HttpClient::create({.host = "127.0.0.1", .port = port}))) {}

  Times run() {
    const auto begin = Clock::now();
    for (int i = 0; i < kRequests; ++i) {
      std::this_thread::sleep_until(begin + i * kInterval);
      send(i);
    }
    std::unique_lock lock(mutex_);
    all_.wait(lock, [&] { return ended_ == kRequests; });
    FATHOM_CHECK(failed_ == 0, "{} requests failed", failed_);
    return std::move(times_);
  }
  bool is_ready() {
    const auto reply = client_->ask({.path = "/ready"});
    return reply && reply->status == 200;
  }

 private:
  struct Handler : client::ReplyHandler {
    Handler(LoadRun& the_run, Clock::time_point the_begin) : run(the_run), begin(the_begin) {}
    double now() const {
      return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    }
    void on_event(std::string_view) override {
      if (first == 0) first = now();
    }
    void on_end(Result<client::ClientReply> reply) override {
      const std::lock_guard lock(run.mutex_);
      run.failed_ += !reply || reply->status != 200;
      run.times_.first.push_back(first);
      run.times_.last.push_back(now());
      ++run.ended_;
      run.all_.notify_all();
    }
    LoadRun& run;
    Clock::time_point begin;
    double first = 0;
  };

  void send(int number) {
    client_->send({.method = "POST",
                   .path = "/v1/chat/completions",
                   .body = fmt::format(
                       R"({{"stream":true,"messages":[{{"role":"user","content":"{} {}"}}]}})",
                       number, std::string(1000, 'x'))},
                  std::make_shared<Handler>(*this, Clock::now()));
  }

  std::mutex mutex_;
  std::condition_variable all_;
  int ended_ = 0, failed_ = 0;
  Times times_;
  std::unique_ptr<client::HttpClient> client_;
};

double percentile(std::vector<double>& times, double percent) {
  std::sort(times.begin(), times.end());
  return times[static_cast<size_t>(static_cast<double>(times.size() - 1) * percent / 100)];
}

// What the router adds, in milliseconds: a percentile through it less that of the direct load.
void BM_Overhead(benchmark::State& state) {
  const Child replica(kClientCpu, serve_nothing);
  const Child router(kRouterCpu,
                     [&](const auto& listening) { route_to(replica.port(), listening); });
  pin_thread(kClientCpu);
  while (!LoadRun(router.port()).is_ready()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (auto _ : state) {
    Times direct = LoadRun(replica.port()).run(), routed = LoadRun(router.port()).run();
    for (const double percent : {50.0, 99.0}) {
      const auto name = [&](const char* what) { return fmt::format("{}_p{}_ms", what, percent); };
      const double first = percentile(direct.first, percent);
      const double last = percentile(direct.last, percent);
      state.counters[name("direct_first")] = first;
      state.counters[name("added_first")] = percentile(routed.first, percent) - first;
      state.counters[name("added_last")] = percentile(routed.last, percent) - last;
    }
  }
}
BENCHMARK(BM_Overhead)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(1)->Repetitions(3);

}  // namespace
}  // namespace fathom::router
