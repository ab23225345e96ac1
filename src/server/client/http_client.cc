#include "server/client/http_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <future>
#include <thread>
#include <unordered_set>

#include "server/client/sse_parser.h"

namespace fathom::client {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;

// One request and its response. Used on the I/O thread only; alive while an operation is pending.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(asio::io_context& context, std::unordered_set<Exchange*>& all, const Endpoint& endpoint,
           ClientRequest request, std::shared_ptr<ReplyHandler> handler)
      : socket_(context), timer_(context), all_(all), handler_(std::move(handler)) {
    all_.insert(this);
    message_.method_string(request.method);
    message_.target(request.path);
    message_.version(11);
    message_.set(http::field::host, fmt::format("{}:{}", endpoint.host, endpoint.port));
    message_.set(http::field::connection, "close");
    if (!request.api_key.empty()) {
      message_.set(http::field::authorization, "Bearer " + request.api_key);
    }
    if (!request.body.empty()) message_.set(http::field::content_type, "application/json");
    message_.body() = std::move(request.body);
    message_.prepare_payload();
    parser_.body_limit(boost::none);
  }
  ~Exchange() { all_.erase(this); }

  void start(const tcp::endpoint& address,
             std::optional<std::chrono::steady_clock::time_point> deadline) {
    if (deadline) {
      timer_.expires_at(*deadline);
      timer_.async_wait([self = shared_from_this()](const error_code& failure) {
        if (!failure) self->end(error(Code::kDeadlineExceeded, "the time limit has passed"));
      });
    }
    socket_.async_connect(address, [self = shared_from_this()](const error_code& failure) {
      if (failure) return self->fail("connecting", failure);
      self->write();
    });
  }

  // Closes the connection without calling the handler.
  void drop() {
    handler_.reset();
    close();
  }

 private:
  void write() {
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    http::async_write(socket_, message_,
                      [self = shared_from_this()](const error_code& failure, size_t) {
                        // A server that refuses may close before it has read everything; its
                        // response has the reason.
                        if (!failure || failure == asio::error::broken_pipe ||
                            failure == asio::error::connection_reset) {
                          return self->read();
                        }
                        self->fail("sending", failure);
                      });
  }

  // Returns after each element, which is the parser's default: an "eager" parser would hold back an
  // event until the next one has come.
  void read() {
    http::async_read_some(
        socket_, buffer_, parser_,
        [self = shared_from_this()](const error_code& failure, size_t) { self->on_read(failure); });
  }

  void on_read(const error_code& failure) {
    if (handler_ == nullptr) return;
    if (failure) return fail("reading", failure);
    if (streams_events()) {
      events_.feed(parser_.get().body(), [this](std::string_view data) {
        if (handler_ != nullptr) handler_->on_event(data);
      });
      parser_.get().body().clear();
    }
    if (!parser_.is_done()) return read();
    end(ClientReply{static_cast<int>(parser_.get().result_int()), std::move(parser_.get().body())});
  }

  bool streams_events() {
    return parser_.is_header_done() && parser_.get().result_int() == 200 &&
           parser_.get()[http::field::content_type].starts_with("text/event-stream");
  }

  void fail(std::string_view doing, const error_code& failure) {
    end(error(Code::kUnavailable, "{}: {}", doing,
              failure == http::error::end_of_stream || failure == http::error::partial_message
                  ? "the server closed the connection before the end"
                  : failure.message()));
  }

  void end(Result<ClientReply> reply) {
    if (handler_ == nullptr) return;  // on_end() was already called
    std::exchange(handler_, nullptr)->on_end(std::move(reply));
    close();
  }

  void close() {
    error_code ignored;
    timer_.cancel();
    socket_.close(ignored);
  }

  tcp::socket socket_;
  asio::steady_timer timer_;
  std::unordered_set<Exchange*>& all_;
  std::shared_ptr<ReplyHandler> handler_;  // null after on_end()
  http::request<http::string_body> message_;
  http::response_parser<http::string_body> parser_;
  beast::flat_buffer buffer_;
  SseParser events_;
};

// Passes the reply of ask() to the waiting thread.
class Waiter : public ReplyHandler {
 public:
  void on_event(std::string_view) override {}
  void on_end(Result<ClientReply> reply) override { promise_.set_value(std::move(reply)); }
  Result<ClientReply> wait() { return promise_.get_future().get(); }

 private:
  std::promise<Result<ClientReply>> promise_;
};

}  // namespace

struct HttpClient::Parts {
  Endpoint endpoint;
  tcp::endpoint address;
  // Used by the I/O thread; outlives the handlers that the context holds.
  std::unordered_set<Exchange*> exchanges;
  asio::io_context context{1};
  asio::executor_work_guard<asio::io_context::executor_type> work{context.get_executor()};
  std::thread thread;
};

Result<Endpoint> parse_base_url(std::string_view url) {
  const auto refuse = [url](std::string_view why) {
    return invalid("base URL is \"{}\", {}", url, why);
  };
  std::string_view rest = url;
  if (!rest.starts_with("http://")) return refuse("expected http://HOST:PORT (no TLS)");
  rest.remove_prefix(7);
  if (rest.ends_with('/')) rest.remove_suffix(1);
  if (rest.find('/') != std::string_view::npos) return refuse("expected no path behind the port");
  Endpoint endpoint{.host = std::string(rest), .port = 80};
  // The port's colon comes after the brackets of an IPv6 address.
  const size_t colon = rest.rfind(':');
  if (colon != std::string_view::npos && rest.find(']', colon) == std::string_view::npos) {
    const std::string_view port = rest.substr(colon + 1);
    const auto read = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
    if (read.ec != std::errc() || read.ptr != port.data() + port.size() || endpoint.port < 1 ||
        endpoint.port > 65535) {
      return refuse("the port must be 1 to 65535");
    }
    endpoint.host = rest.substr(0, colon);
  }
  if (endpoint.host.empty()) return refuse("it names no host");
  return endpoint;
}

Result<std::unique_ptr<HttpClient>> HttpClient::create(const Endpoint& endpoint) {
  auto parts = std::make_unique<Parts>();
  parts->endpoint = endpoint;
  std::string host = endpoint.host;
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  error_code failure;
  tcp::resolver resolver(parts->context);
  const auto found = resolver.resolve(host, std::to_string(endpoint.port), failure);
  if (failure || found.empty()) {
    return error(Code::kUnavailable, "host {}: {}", endpoint.host,
                 failure ? failure.message() : "has no address");
  }
  parts->address = found.begin()->endpoint();
  parts->thread = std::thread([&context = parts->context] { context.run(); });
  return std::unique_ptr<HttpClient>(new HttpClient(std::move(parts)));
}

HttpClient::HttpClient(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

HttpClient::~HttpClient() {
  asio::post(parts_->context, [parts = parts_.get()] {
    for (Exchange* exchange : parts->exchanges) exchange->drop();
    parts->context.stop();
  });
  parts_->thread.join();
}

void HttpClient::send(ClientRequest request, std::shared_ptr<ReplyHandler> handler) {
  std::optional<std::chrono::steady_clock::time_point> deadline;
  if (request.time_limit) deadline = std::chrono::steady_clock::now() + *request.time_limit;
  asio::post(parts_->context, [parts = parts_.get(), deadline, request = std::move(request),
                               handler = std::move(handler)]() mutable {
    std::make_shared<Exchange>(parts->context, parts->exchanges, parts->endpoint,
                               std::move(request), std::move(handler))
        ->start(parts->address, deadline);
  });
}

Result<ClientReply> HttpClient::ask(ClientRequest request) {
  const auto waiter = std::make_shared<Waiter>();
  send(std::move(request), waiter);
  return waiter->wait();
}

}  // namespace fathom::client
