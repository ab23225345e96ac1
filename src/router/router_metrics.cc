#include "router/router_metrics.h"

#include <algorithm>
#include <functional>

#include "router/replica_call.h"

namespace fathom::router {
namespace {

constexpr double kDispatchBounds[] = {.00005, .0001, .0002, .0005, .001, .002, .005,
                                      .01,    .02,   .05,   .1,    .5,   1};
constexpr double kReplyBounds[] = {.001, .005, .01, .02, .05, .1, .25, .5, 1,
                                   2.5,  5,    10,  20,  40,  80, 160, 640};

using Figure = std::function<double(const Replica&)>;

class Page {
 public:
  Page(const ReplicaSet& replicas, std::string& out) : replicas_(replicas), out_(out) {}

  void family(std::string_view name, std::string_view type, std::string_view help) {
    name_ = name;
    append_family(out_, name, type, help);
  }
  void sample(const Replica& replica, std::string_view labels, double value) {
    out_ += fmt::format("{}{{replica=\"{}\"{}}} {}\n", name_, escaped_label(replica.url), labels,
                        value);
  }
  void per_replica(std::string_view name, std::string_view type, std::string_view help,
                   const Figure& figure) {
    family(name, type, help);
    for (const auto& replica : replicas_.all()) sample(*replica, "", figure(*replica));
  }

 private:
  const ReplicaSet& replicas_;
  std::string& out_;
  std::string_view name_;
};

}  // namespace

RouterMetrics::RouterMetrics() : dispatch(kDispatchBounds), reply(kReplyBounds) {}

std::string RouterMetrics::text(const ReplicaSet& replicas, int64_t active,
                                const http::ServerStats& http) const {
  std::string out;
  Page page(replicas, out);
  page.family("fathom_router_replies_total", "counter", "Replies of a replica by class of status.");
  for (const auto& replica : replicas.all()) {
    for (int status = 2; status <= 5; ++status) {
      page.sample(*replica, fmt::format(",class=\"{}xx\"", status),
                  static_cast<double>(replica->replies[status]));
    }
  }
  page.family("fathom_router_choices_total", "counter",
              "Requests given to a replica, by the reason of the choice.");
  for (const auto& replica : replicas.all()) {
    for (int i = 0; i <= kNumReasons; ++i) {
      const std::string_view reason = i == kNumReasons ? "retry" : name_of(static_cast<Reason>(i));
      page.sample(*replica, fmt::format(",reason=\"{}\"", reason),
                  static_cast<double>(replica->reasons[i]));
    }
  }
  page.family("fathom_router_failures_total", "counter",
              "Requests that a replica did not answer to the end, by what went wrong.");
  for (const auto& replica : replicas.all()) {
    for (int i = 0; i < 5; ++i) {
      page.sample(*replica, fmt::format(",failure=\"{}\"", name_of(static_cast<CallFailure>(i))),
                  static_cast<double>(replica->failures[i]));
    }
  }
  page.per_replica("fathom_router_broken_streams_total", "counter",
                   "Replies that were cut within, after the client had got a part.",
                   [](const Replica& r) { return static_cast<double>(r.broken_streams); });
  page.per_replica("fathom_router_replica_ready", "gauge", "Whether the replica says it is ready.",
                   [](const Replica& r) { return r.ready(); });
  page.per_replica("fathom_router_replica_draining", "gauge",
                   "Whether the replica gets no more requests.",
                   [](const Replica& r) { return r.draining; });
  page.per_replica("fathom_router_breaker_state", "gauge",
                   "Circuit breaker: 0 closed, 1 open, 2 half open.",
                   [](const Replica& r) { return static_cast<double>(r.breaker.state()); });
  page.per_replica("fathom_router_breaker_opened_total", "counter",
                   "Times that the circuit breaker opened.",
                   [](const Replica& r) { return static_cast<double>(r.breaker.times_opened()); });
  page.per_replica("fathom_router_outstanding_requests", "gauge",
                   "Requests of this router at the replica.",
                   [](const Replica& r) { return static_cast<double>(r.outstanding); });
  page.per_replica("fathom_router_replica_running", "gauge",
                   "Running requests that the replica reported.",
                   [](const Replica& r) { return static_cast<double>(r.polled().running); });
  page.per_replica("fathom_router_replica_waiting", "gauge",
                   "Waiting requests that the replica reported.",
                   [](const Replica& r) { return static_cast<double>(r.polled().waiting); });
  page.per_replica("fathom_router_replica_cache_use", "gauge",
                   "Share of its KV cache in use that the replica reported, 0 to 1.",
                   [](const Replica& r) { return r.polled().cache_use; });

  const auto metric = [&](std::string_view name, std::string_view type, std::string_view help,
                          int64_t value) { append_metric(out, name, type, help, "", value); };
  metric("fathom_router_requests_active", "gauge", "Requests that are being passed on.", active);
  metric("fathom_router_refused_total", "counter", "Requests for which no replica was available.",
         refused);
  metric("fathom_router_client_disconnects_total", "counter",
         "Clients that disconnected before the end of their reply.", disconnects);
  metric("fathom_router_prompt_bytes_total", "counter", "Bytes of prompts that were compared.",
         prompt_bytes);
  metric("fathom_router_prefix_bytes_total", "counter",
         "Bytes of prompts that the chosen replica had seen.", prefix_bytes);
  metric("fathom_router_tree_bytes", "gauge", "Memory of the prefix tree.",
         replicas.tree().bytes());
  metric("fathom_router_tree_nodes", "gauge", "Nodes of the prefix tree.", replicas.tree().nodes());
  metric("fathom_router_tree_evictions_total", "counter", "Nodes evicted from the prefix tree.",
         replicas.tree().evictions());
  append_family(out, "fathom_router_dispatch_seconds", "histogram",
                "Seconds from a request's last byte to its first replica.");
  dispatch.write("fathom_router_dispatch_seconds", "", out);
  append_family(out, "fathom_router_reply_seconds", "histogram",
                "Seconds from a request's last byte to the head of its reply.");
  reply.write("fathom_router_reply_seconds", "", out);
  metric("fathom_http_connections", "gauge", "Open connections of clients.", http.connections);
  metric("fathom_http_requests_in_flight", "gauge", "Requests whose response is not complete.",
         http.requests_in_flight);
  append_build_metrics(out);
  append_process_metrics(out);
  return out;
}

}  // namespace fathom::router
