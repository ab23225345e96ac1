#include "router/replica_poll.h"

#include <utility>

#include "router/request_head.h"
#include "server/http/host.h"

namespace fathom::router {
namespace {

constexpr size_t kMostPageBytes = 8 << 20;

}  // namespace

ReplicaPoll::ReplicaPoll(std::shared_ptr<ConnectionPool> pool, std::string api_key,
                         std::function<void(const PollResult&)> then)
    : pool_(std::move(pool)), api_key_(std::move(api_key)), then_(std::move(then)) {}

ReplicaPoll::~ReplicaPoll() {
  if (call_ != nullptr) call_->cancel();
}

void ReplicaPoll::start() { ask("/ready"); }

void ReplicaPoll::ask(std::string path) {
  path_ = std::move(path);
  page_.clear();
  http::Request request;
  request.id = "router-poll";
  request.method = "GET";
  request.path = path_;
  const client::Endpoint& endpoint = pool_->endpoint();
  call_ = std::make_shared<ReplicaCall>(
      pool_, CallLimits{},
      request_head(request, http::address_text(endpoint.host, endpoint.port), api_key_),
      std::make_shared<const std::string>(), *this);
  call_->start();
}

void ReplicaPoll::on_body(std::string_view bytes) {
  if (page_.size() < kMostPageBytes) page_.append(bytes);
}

void ReplicaPoll::on_end() {
  const auto self = shared_from_this();
  result_.answered = true;
  if (path_ == "/ready" && status_ == 404) return ask("/health");
  if (path_ != "/metrics") {
    result_.ready = status_ == 200;
    if (result_.ready) return ask("/metrics");
  } else if (status_ == 200) {
    result_.load = parse_load(page_);
  }
  end();
}

void ReplicaPoll::on_failure(CallFailure, std::string_view) {
  const auto self = shared_from_this();
  end();
}

void ReplicaPoll::give_up() {
  const auto self = shared_from_this();
  if (call_ != nullptr) call_->cancel();
  end();
}

void ReplicaPoll::end() {
  if (const auto then = std::exchange(then_, nullptr)) then(result_);
}

}  // namespace fathom::router
