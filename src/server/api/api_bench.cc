// Host overhead: the complete server (HTTP, JSON, tokenizer, engine, sampling, SSE) over a runner
// that computes nothing. Measures tokens/s of 256 streams, the latency of a long chat from its
// first byte to its response, and the memory of idle connections. Server and clients share this
// machine's cores.
#include <benchmark/benchmark.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include <fstream>

#include "base/check.h"
#include "base/log.h"
#include "base/random.h"
#include "engine/logits_runner.h"
#include "server/api/api_server.h"
#include "server/http/raw_client.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kVocabSize = 8192;
constexpr int64_t kMaxModelLen = 16'384;
constexpr size_t kStreams = 256;
constexpr int kIdleConnections = 10'000;

// A device that returns random tokens at once: each row has its maximum at another logit.
class NullRunner : public LogitsRunner {
 public:
  NullRunner() : logits_(kMostRows * kVocabSize), chosen_(kMostRows) {}
  int64_t vocab_size() const override { return kVocabSize; }
  int64_t max_model_len() const override { return kMaxModelLen; }
  int64_t num_pages() const override { return 1 << 16; }
  Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) override {
    const ForwardBatch& batch = lanes.front();
    ++step_;
    for (size_t row = 0; row < batch.logit_rows.size(); ++row) {
      logits_[row * kVocabSize + chosen_[row]] = 0;
      chosen_[row] = random_bits(1, step_, row) % kVocabSize;
      logits_[row * kVocabSize + chosen_[row]] = 1;
    }
    return ConstTensorView(logits_.data(), {std::ssize(batch.logit_rows), kVocabSize});
  }

 private:
  static constexpr size_t kMostRows = kStreams + 64;  // decode rows, and those of prompts
  uint64_t step_ = 0;
  std::vector<float> logits_;
  std::vector<size_t> chosen_;
};

std::unique_ptr<ApiServer> start_server() {
  set_log_level(LogLevel::kWarning);
  auto backend = std::make_unique<Backend>();
  ServedModel& served = backend->served;
  auto tokenizer = Tokenizer::load(FATHOM_SOURCE_DIR "/models/fathom-tiny");
  FATHOM_CHECK(tokenizer, "no bundled tokenizer");
  served.names = {"null"};
  served.tokenizer = std::move(*tokenizer);
  served.chat_format = ChatFormat::kV3;
  served.vocab_size = kVocabSize;
  served.max_model_len = kMaxModelLen;
  served.fingerprint = "fathom-null";
  backend->grammars = std::make_unique<GrammarCompiler>(served.tokenizer, kVocabSize);
  backend->engine = std::move(*Engine::create({.max_num_seqs = kStreams},
                                              std::make_unique<NullRunner>(), served.tokenizer));
  ApiOptions options;
  options.http.port = 0;
  options.http.worker_threads = 2;  // as in `fathom serve`
  options.http.access_log = false;
  options.http.max_connections = kIdleConnections + 16;
  auto server = std::move(*ApiServer::create(std::move(options)));
  FATHOM_CHECK(server->listen(), "no port");
  server->start();
  server->serve(std::move(backend));
  return server;
}

std::string post(std::string_view path, std::string_view body) {
  return fmt::format(
      "POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
      "Content-Length: {}\r\n\r\n{}",
      path, body.size(), body);
}

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Reads all sockets until the server closes them; returns the number of complete streams.
size_t drain(const std::vector<http::RawClient>& clients) {
  constexpr std::string_view kEnd = "data: [DONE]\n\n";
  const int poll = epoll_create1(0);
  for (size_t i = 0; i < clients.size(); ++i) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = i}};
    epoll_ctl(poll, EPOLL_CTL_ADD, clients[i].descriptor(), &event);
  }
  std::vector<char> buffer(1 << 16);
  std::vector<bool> done(clients.size());
  epoll_event events[kStreams];
  for (size_t open = clients.size(); open > 0;) {
    const int count = epoll_wait(poll, events, kStreams, -1);
    for (int i = 0; i < count; ++i) {
      const size_t client = events[i].data.u64;
      const ssize_t got = recv(clients[client].descriptor(), buffer.data(), buffer.size(), 0);
      if (got <= 0) {
        epoll_ctl(poll, EPOLL_CTL_DEL, clients[client].descriptor(), nullptr);
        --open;
      } else if (std::string_view(buffer.data(), static_cast<size_t>(got)).find(kEnd) !=
                 std::string_view::npos) {
        done[client] = true;
      }
    }
  }
  close(poll);
  return static_cast<size_t>(std::count(done.begin(), done.end(), true));
}

// 256 concurrent streams of 1,000 tokens, from the first request to the last byte. server_us/token
// is the CPU time of all threads except the clients'.
void stream_tokens(benchmark::State& state, std::string_view path, std::string_view question) {
  constexpr int64_t kTokens = 1000;
  const auto server = start_server();
  const std::string request = post(
      path, fmt::format(R"({{{},"stream":true,"max_tokens":{},"temperature":0,"ignore_eos":true}})",
                        question, kTokens));
  for (auto _ : state) {
    const auto begin = Clock::now();
    const double all_begin = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    const double client_begin = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    std::vector<http::RawClient> clients;
    for (size_t i = 0; i < kStreams; ++i) {
      clients.emplace_back(server->port());
      clients.back().send(request);
    }
    FATHOM_CHECK(drain(clients) == kStreams, "an answer did not come to its end");
    const double wall = std::chrono::duration<double>(Clock::now() - begin).count();
    const double client = seconds_of(CLOCK_THREAD_CPUTIME_ID) - client_begin;
    const double all = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - all_begin;
    const auto tokens = static_cast<double>(kStreams * kTokens);
    state.SetIterationTime(wall);
    state.counters["tokens/s"] = tokens / wall;
    state.counters["server_us/token"] = (all - client) / tokens * 1e6;
    state.counters["client_us/token"] = client / tokens * 1e6;
  }
}
#define STREAMS Iterations(1)->Repetitions(5)->UseManualTime()->Unit(benchmark::kSecond)
BENCHMARK_CAPTURE(stream_tokens, completions, "/v1/completions", R"("prompt":[1,2,3,4])")->STREAMS;
BENCHMARK_CAPTURE(stream_tokens, chat, "/v1/chat/completions",
                  R"("messages":[{"role":"user","content":"Hello"}])")
    ->STREAMS;

// Returns English words, different ones for each seed.
std::string prose(uint64_t seed, int64_t words) {
  constexpr const char* kWords[] = {"the",  "house", "of",    "water", "and",  "light",
                                    "that", "stone", "river", "in",    "with", "morning"};
  std::string text;
  for (int64_t i = 0; i < words; ++i) {
    text += kWords[random_bits(2, seed, static_cast<uint64_t>(i)) % std::size(kWords)];
    text += ' ';
  }
  return text;
}

// A chat of about 4,000 tokens that misses the prefix cache, over HTTP, with a completion of one
// token: parsed, rendered, tokenized, admitted, scheduled in two steps, answered. `tokens` is the
// length of the prompt.
void long_chat(benchmark::State& state) {
  const auto server = start_server();
  uint64_t seed = 0;
  double tokens = 0;
  for (auto _ : state) {
    state.PauseTiming();
    const std::string request =
        post("/v1/chat/completions",
             fmt::format(R"({{"messages":[{{"role":"user","content":"{}"}}],"max_tokens":1}})",
                         prose(++seed, state.range(0))));
    http::RawClient client(server->port());
    state.ResumeTiming();
    client.send(request);
    const http::RawResponse response = client.read_response();
    FATHOM_CHECK(response.status == 200, "{}", response.body);
    const size_t at = response.body.find("\"prompt_tokens\":");
    tokens = std::atof(response.body.c_str() + at + 16);
  }
  state.counters["tokens"] = tokens;
}
BENCHMARK(long_chat)->Arg(3990)->UseRealTime()->Iterations(50)->Repetitions(5)->Unit(
    benchmark::kMillisecond);

double resident_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmRSS:") continue;
    double kib = 0;
    status >> kib;
    return kib / 1024;
  }
  return 0;
}

// Runs the clients in a process of their own: only the server is measured, and each process needs
// half of the descriptors. Writes one byte to `ready` when every client has had a response, then
// waits until `release` closes.
[[noreturn]] void be_idle_clients(int port, int ready, int release) {
  std::vector<http::RawClient> clients;
  clients.reserve(kIdleConnections);
  for (int i = 0; i < kIdleConnections; ++i) {
    clients.emplace_back(port);
    clients.back().send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    if (clients.back().read_response().status != 200) _exit(1);
  }
  char byte = 1;
  if (write(ready, &byte, 1) != 1 || read(release, &byte, 1) < 0) _exit(1);
  _exit(0);
}

// Connections that had one response and are idle. MiB is the growth of the server process, without
// the kernel's memory for them.
void idle_connections(benchmark::State& state) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < kIdleConnections + 64) {
    return state.SkipWithError("too few files may be open (ulimit -Hn)");
  }
  const auto server = start_server();
  for (auto _ : state) {
    const double before = resident_mib();
    int ready[2], release[2];
    FATHOM_CHECK(pipe(ready) == 0 && pipe(release) == 0, "no pipe");
    const pid_t child = fork();
    if (child == 0) {
      close(release[1]);
      be_idle_clients(server->port(), ready[1], release[0]);
    }
    close(ready[1]);
    char byte = 0;
    FATHOM_CHECK(read(ready[0], &byte, 1) == 1, "a client got no answer");
    state.counters["MiB"] = resident_mib() - before;
    for (const int end : {ready[0], release[0], release[1]}) close(end);
    waitpid(child, nullptr, 0);
  }
}
BENCHMARK(idle_connections)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fathom
