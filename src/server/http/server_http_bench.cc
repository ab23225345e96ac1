// Cost of the transport: streamed events of 256 clients in tokens/s, one request in us, memory of
// idle connections. Server and clients share this machine's cores.
#include <benchmark/benchmark.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>

#include <atomic>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"
#include "server/http/raw_client.h"
#include "server/http/server.h"
#include "server/http/sse.h"

namespace fathom::http {
namespace {

using Clock = std::chrono::steady_clock;

// Typical chunk of a chat completion for one token.
constexpr std::string_view kEvent =
    R"({"id":"chatcmpl-0123456789abcdef0123","object":"chat.completion.chunk","created":1700000000,)"
    R"("model":"fathom-tiny","choices":[{"index":0,"delta":{"content":" token"},)"
    R"("finish_reason":null}]})";

struct BenchServer {
  std::mutex mutex;
  std::vector<std::shared_ptr<Responder>> responders;
  std::unique_ptr<Server> server;

  explicit BenchServer(int64_t max_connections = 4096) {
    RouteTable routes;
    routes.add(Method::kGet, "/stream", Access::kPublic,
               [this](Request, std::shared_ptr<Responder> responder) {
                 const std::lock_guard lock(mutex);
                 responders.push_back(std::move(responder));
               });
    for (const RunOn where : {RunOn::kIoThread, RunOn::kWorker}) {
      routes.add(
          Method::kGet, where == RunOn::kWorker ? "/worker" : "/io", Access::kPublic,
          [](Request, std::shared_ptr<Responder> responder) { responder->send({.body = "{}"}); },
          {.run_on = where});
    }
    ServerOptions options;
    options.port = 0;
    options.access_log = false;
    options.max_connections = max_connections;
    server = std::move(*Server::create(std::move(options), std::move(routes)));
    FATHOM_CHECK(server->listen(), "no port");
    server->start();
  }
};

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Reads all clients' sockets in one thread until the server closes them.
void drain(const std::vector<RawClient>& clients, std::atomic<int64_t>& bytes, double& cpu) {
  const double start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
  const int poll = epoll_create1(0);
  for (const RawClient& client : clients) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = client.descriptor()}};
    epoll_ctl(poll, EPOLL_CTL_ADD, client.descriptor(), &event);
  }
  std::vector<char> buffer(1 << 16);
  epoll_event events[256];
  for (size_t open = clients.size(); open > 0;) {
    const int count = epoll_wait(poll, events, 256, -1);
    for (int i = 0; i < count; ++i) {
      const ssize_t got = recv(events[i].data.fd, buffer.data(), buffer.size(), 0);
      if (got > 0) {
        bytes += got;
      } else {
        epoll_ctl(poll, EPOLL_CTL_DEL, events[i].data.fd, nullptr);
        --open;
      }
    }
  }
  close(poll);
  cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID) - start;
}

// One thread writes a token to each of 256 streams per step, as an engine does. Argument: steps/s,
// or 0 for as many as the bounded queues accept. The counters report CPU time per token of the
// writing thread, the rest of the server and the clients.
void sse_tokens(benchmark::State& state) {
  constexpr int kStreams = 256;
  const int64_t rate = state.range(0), steps = rate > 0 ? rate * 3 : 2000;
  for (auto _ : state) {
    BenchServer bench;
    std::vector<RawClient> clients;
    for (int i = 0; i < kStreams; ++i) {
      clients.emplace_back(bench.server->port());
      clients.back().send("GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    }
    while (std::lock_guard(bench.mutex), bench.responders.size() < kStreams) usleep(100);
    std::vector<SseStream> streams;
    for (auto& responder : bench.responders) streams.emplace_back(responder);
    std::atomic<int64_t> received{0};
    double reader_cpu = 0;
    std::thread reader([&] { drain(clients, received, reader_cpu); });

    const auto start = Clock::now();
    const double process_start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    const double writer_start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    for (int64_t step = 0; step < steps; ++step) {
      for (SseStream& stream : streams) stream.data(kEvent);
      if (rate > 0) {
        std::this_thread::sleep_until(start + std::chrono::microseconds(1'000'000 * step / rate));
      } else {  // bounds how far a client lags behind
        const int64_t sent = (step + 1) * kStreams * std::ssize(kEvent);
        while (sent - received > int64_t{64} * kStreams * std::ssize(kEvent)) usleep(200);
      }
    }
    const double writer_cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID) - writer_start;
    for (SseStream& stream : streams) stream.done();
    reader.join();
    const double wall = std::chrono::duration<double>(Clock::now() - start).count();
    const double all_cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - process_start;
    const auto tokens = static_cast<double>(steps * kStreams);
    state.SetIterationTime(wall);
    state.counters["tokens/s"] = tokens / wall;
    state.counters["writer_us/token"] = writer_cpu / tokens * 1e6;
    state.counters["io_us/token"] = (all_cpu - reader_cpu - writer_cpu) / tokens * 1e6;
    state.counters["client_us/token"] = reader_cpu / tokens * 1e6;
  }
}
BENCHMARK(sse_tokens)->Arg(200)->Arg(0)->Iterations(1)->UseManualTime()->Unit(benchmark::kSecond);

void one_request(benchmark::State& state, std::string_view path) {
  BenchServer bench;
  RawClient client(bench.server->port());
  const std::string text = "GET " + std::string(path) + " HTTP/1.1\r\nHost: x\r\n\r\n";
  for (auto _ : state) {
    client.send(text);
    FATHOM_CHECK(client.read_response().status == 200, "no answer");
  }
}
BENCHMARK_CAPTURE(one_request, on_io_thread, "/io")->Unit(benchmark::kMicrosecond)->UseRealTime();
BENCHMARK_CAPTURE(one_request, on_worker, "/worker")->Unit(benchmark::kMicrosecond)->UseRealTime();

int64_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") {
      int64_t kib = 0;
      status >> kib;
      return kib;
    }
  }
  return 0;
}

// Connections that had one response and are idle. The clients' side costs one descriptor each.
void idle_connections(benchmark::State& state) {
  constexpr int kConnections = 2000;
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  for (auto _ : state) {
    BenchServer bench(10'000);
    std::vector<RawClient> clients;
    clients.reserve(kConnections);
    const int64_t before = resident_kib();
    for (int i = 0; i < kConnections; ++i) {
      clients.emplace_back(bench.server->port());
      clients.back().send("GET /io HTTP/1.1\r\nHost: x\r\n\r\n");
      FATHOM_CHECK(clients.back().read_response().status == 200, "no answer");
    }
    const auto kib = static_cast<double>(resident_kib() - before);
    state.counters["KiB/connection"] = kib / kConnections;
    state.counters["MiB_for_10000"] = kib / kConnections * 10'000 / 1024;
  }
}
BENCHMARK(idle_connections)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fathom::http
