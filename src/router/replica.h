// What the router knows of one replica. Used on the router's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "router/circuit_breaker.h"
#include "router/connection_pool.h"
#include "router/replica_call.h"
#include "router/replica_load.h"

namespace fathom::router {

class Replica {
 public:
  Replica(boost::asio::io_context& context, const client::Endpoint& endpoint, int64_t number,
          const BreakerOptions& breaker);

  const std::string url;  // "http://127.0.0.1:8001"
  const int64_t number;   // never given twice
  const std::shared_ptr<ConnectionPool> connections;
  CircuitBreaker breaker;

  // Gets requests unless it is draining, not ready, or its breaker is open.
  bool admits(Time now) { return ready_ && !draining && breaker.admits(now); }

  // A request that the replica did not answer to the end.
  void call_failed(CallFailure failure, CircuitBreaker::Pass pass, Time now);
  // Outcome of a poll. Returns true if the replica is back after it could not be reached, by a poll
  // or by a request: its cache may be gone.
  bool poll_succeeded(bool ready, std::optional<ReplicaLoad> load);
  void poll_failed(int64_t threshold);
  bool ready() const { return ready_; }
  const ReplicaLoad& polled() const { return polled_; }

  // Requests that run or wait there: those of this router, and those of others when it was asked.
  int64_t load() const { return outstanding + others_; }

  bool draining = false;
  int64_t outstanding = 0;  // requests of this router

  // Counters for the metrics.
  int64_t replies[6] = {};   // by class of status
  int64_t failures[5] = {};  // index: CallFailure
  int64_t reasons[8] = {};   // choices by Reason; the last: a retry
  int64_t broken_streams = 0;

 private:
  bool ready_ = false;        // before the first poll nothing is known
  int64_t polls_failed_ = 0;  // in a row
  bool was_gone_ = false;     // a request has found it so since it answered a poll
  ReplicaLoad polled_;
  int64_t others_ = 0;
};

}  // namespace fathom::router
