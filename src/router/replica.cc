#include "router/replica.h"

#include <algorithm>
#include <utility>

#include "server/http/host.h"

namespace fathom::router {

Replica::Replica(boost::asio::io_context& context, const client::Endpoint& endpoint,
                 int64_t its_number, const BreakerOptions& options)
    : url("http://" + http::address_text(endpoint.host, endpoint.port)),
      number(its_number),
      connections(std::make_shared<ConnectionPool>(context, endpoint)),
      breaker(options) {}

void Replica::call_failed(CallFailure failure, CircuitBreaker::Pass pass, Time now) {
  ++failures[static_cast<size_t>(failure)];
  breaker.failed(pass, now);
  was_gone_ |= failure == CallFailure::kNotConnected || failure == CallFailure::kLost;
}

// One that was killed and has started again between two polls has failed none of them.
bool Replica::poll_succeeded(bool ready, std::optional<ReplicaLoad> load) {
  const bool is_back = std::exchange(was_gone_, false) || polls_failed_ > 0;
  polls_failed_ = 0;
  ready_ = ready;
  if (is_back) breaker.try_now();
  if (load) {
    polled_ = *load;
    others_ = std::max<int64_t>(0, load->running + load->waiting - outstanding);
  }
  return is_back;
}

void Replica::poll_failed(int64_t threshold) {
  if (++polls_failed_ < threshold) return;
  ready_ = false;
  connections->drop_idle();
}

}  // namespace fathom::router
